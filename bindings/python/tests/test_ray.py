"""Workers as actors of a real Ray on this machine, with a second node that gets lost."""

import os
import signal
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="NOT TESTED: it needs the package ray")

from ray.cluster_utils import Cluster  # noqa: E402

import poseidon.ray as psd_ray  # noqa: E402
from poseidon.ray import WorkerFailed, _describe  # noqa: E402

# A node that is gone is noticed in a second or two, and not in twenty. One that is only slow is none.
# Ray's workers are nice to others (15) if they are not told: on a busy machine they hardly run.
SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 5,
}


# One process has all of them, where several run tests (pytest-xdist): there is one Ray.
pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all tests. Places are counted, not measured: more than this machine has cores."""
    head = {"num_cpus": 4, "include_dashboard": False, "_system_config": SETTINGS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # Workers import this file, as functions of it are called there.
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    variables = {"env_vars": {"PYTHONPATH": path}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=variables)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def add_up(factor):
    import torch
    from torch import nn

    import poseidon.torch as psd

    psd.init()
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    model = psd.DistributedDataParallel(net)
    (model(torch.tensor([[factor * (psd.rank() + 1.0)]])).sum()).backward()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = {name: os.environ[name] for name in names}
    return net.weight.grad.item(), told, ray.util.get_current_placement_group().id


def test_workers_train_together_and_return_by_rank(cluster):
    results = psd_ray.run(add_up, workers=2, arguments={"factor": 10.0})
    # The mean of 10 and 20.
    assert [mean for mean, _, _ in results] == [15.0, 15.0]
    # One placement group has both places, and does not outlive the job.
    assert len({group for _, _, group in results}) == 1
    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states == {"REMOVED"}
    for rank, (_, told, _) in enumerate(results):
        expected = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        assert told == {name: str(value) for name, value in expected.items()}


def fail_once(folder):
    """Worker 1 dies the first time, when worker 0 waits for it."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(f"{folder}/{os.environ['RANK']}-{attempt}", "w"):
        pass
    if attempt == 0 and os.environ["RANK"] == "1":
        os._exit(9)
    return add_up(1.0)[0]


def test_all_begin_again_after_one_is_lost(cluster, tmp_path):
    results = psd_ray.run(fail_once, workers=2, restarts=1, arguments={"folder": str(tmp_path)})
    assert results == [1.5, 1.5]
    assert {"1-0", "0-1", "1-1"} <= {path.name for path in tmp_path.iterdir()}


def lose_its_machine(head):
    """The worker that is not on the head takes its node along, the first time."""
    node = ray.get_runtime_context().get_node_id()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if node != head:
            # A worker is a child of what Ray runs on every node.
            os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return node


def test_all_begin_again_elsewhere_after_a_machine_is_lost(cluster):
    head = ray.get_runtime_context().get_node_id()
    cluster.add_node(num_cpus=4)
    arguments = {"head": head}
    results = psd_ray.run(
        lose_its_machine, workers=2, restarts=1, strategy="SPREAD", arguments=arguments
    )
    assert results == [head, head]


def test_a_lost_machine_that_nothing_replaces_is_not_waited_for_without_end(cluster):
    head = ray.get_runtime_context().get_node_id()
    cluster.add_node(num_cpus=4)
    arguments = {"head": head}
    with pytest.raises(TimeoutError, match="no place for 2 workers"):
        psd_ray.run(
            lose_its_machine,
            workers=2,
            restarts=1,
            strategy="STRICT_SPREAD",
            arguments=arguments,
            patience=10,
        )


def raise_on_last():
    if os.environ["RANK"] == "2":
        raise ValueError("no such data")
    import time

    time.sleep(600)


def test_the_worker_that_fails_is_named_and_the_others_are_ended(cluster):
    with pytest.raises(WorkerFailed, match=r"worker 2 on .* failed: .*no such data") as caught:
        psd_ray.run(raise_on_last, workers=3)
    assert caught.value.rank == 2
    # Their places are free again.
    assert len(set(psd_ray.run(os.getpid, workers=4))) == 4


def test_places_that_nobody_has_are_told(cluster):
    with pytest.raises(TimeoutError, match="no place for 9 workers"):
        psd_ray.run(add_up, workers=9, patience=2)


def test_ranks_of_a_machine_follow_each_other():
    places = [(machine, f"10.0.0.{i}", (1, 2)) for i, machine in enumerate("abab")]
    actors, told, addresses = _describe(list("wxyz"), places, attempt=0)
    assert actors == ["w", "y", "x", "z"]
    assert addresses == ["10.0.0.0", "10.0.0.2", "10.0.0.1", "10.0.0.3"]
    assert [variables["LOCAL_RANK"] for variables in told] == ["0", "1", "0", "1"]
    assert {variables["LOCAL_WORLD_SIZE"] for variables in told} == {"2"}
    assert {variables["POSEIDON_COORDINATOR"] for variables in told} == {"10.0.0.0:2"}
    assert len({variables["POSEIDON_SECRET"] for variables in told}) == 1
