"""The backend ``poseidon`` of torch.distributed where programs do the unusual, and where things go wrong."""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cluster import run


def start(backend="poseidon", seconds=30):
    import poseidon._c10d_register

    poseidon._c10d_register.register()
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return dist.get_rank(), dist.get_world_size()


def callbacks_that_wait():
    """Rank 1 goes on only when rank 0 has asked for the future of what is begun next: none is settled at once."""
    rank, size = start()
    sign = torch.zeros(1)
    if rank == 1:
        for _ in range(4):
            dist.recv(sign, 0)
            dist.all_reduce(torch.ones(3))
        return

    def future(x):
        return dist.all_reduce(x, async_op=True).get_future()

    def deeper(done):
        inner = future(done.value()[0])
        dist.send(sign, 1)
        return inner.wait()[0]

    first = future(torch.ones(3)).then(deeper)
    dist.send(sign, 1)
    assert torch.equal(first.wait(), torch.full((3,), 3.0))
    # A future that is older than the callback.
    third, fourth = future(torch.ones(3)), future(torch.ones(3))

    def waits_for_another(done):
        dist.send(sign, 1)
        return fourth.wait()[0]

    then = third.then(waits_for_another)
    dist.send(sign, 1)
    assert torch.equal(then.wait(), torch.full((3,), 2.0))


def power_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    start()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, power.powerSGD_hook)
    stepper = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(5):
        torch.manual_seed(10 * step + dist.get_rank())
        stepper.zero_grad()
        ddp(torch.randn(8, 40)).pow(2).sum().backward()
        stepper.step()
    return [p.detach() for p in net.parameters()]


def views():
    rank, size = start()
    z = torch.tensor([1 + 2j, 3 - 4j]) * (rank + 1)
    whole = [torch.tensor([1 + 2j, 3 - 4j]) * (r + 1) for r in range(size)]
    row = lambda like: [torch.zeros_like(like) for _ in range(size)]
    out = row(z.real)
    dist.all_gather(out, z.conj().imag)
    assert all(torch.equal(o, -w.imag) for o, w in zip(out, whole))
    out = row(z)
    dist.gather(z.conj(), out if rank == 0 else None, 0)
    assert rank != 0 or all(torch.equal(o, w.conj()) for o, w in zip(out, whole))
    # Views are written through, too.
    w = z.clone()
    dist.broadcast(w.conj().imag, 0)
    assert torch.equal(w, torch.complex(z.real, whole[0].imag))


def test_conjugate_and_negative_views_go_as_what_they_show():
    run(views, 2, timeout=60)


def test_a_callback_may_wait_for_another_future():
    run(callbacks_that_wait, 2, timeout=60)


def test_power_sgd_keeps_replicas_equal():
    first, second = run(power_sgd, 2, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def forks(child):
    rank, size = start()
    group = dist.new_group()
    pid = os.fork()
    if pid == 0:
        if child == "uses":
            with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}"):
                dist.all_reduce(torch.ones(3))
        if child == "leaves":
            dist.destroy_process_group()
        # The ways out of a process that run what was left for the end.
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((3,), float(size * size)))
    dist.destroy_process_group()


@pytest.mark.parametrize("child", ["ends", "uses", "leaves"])
def test_a_fork_leaves_its_parents_groups_alone(child):
    run(forks, 2, timeout=60, child=child)


def comes_late():
    """Rank 1 comes when the others have given up."""
    rank, _ = start()
    gloo = dist.new_group(backend="gloo")
    error = None
    if rank != 1:
        try:
            dist.new_group(timeout=timedelta(seconds=2))
        except RuntimeError as e:
            error = str(e)
    dist.barrier(group=gloo)
    return error


def test_who_does_not_come_in_time_is_named():
    for rank, words in enumerate(run(comes_late, 3, timeout=60)):
        assert rank == 1 or ("worker 1" in words and "within 2" in words), words


def again():
    """The second round finds what the first has left in the store."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ["RANK"] == "0")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from poseidon import _c10d_register

    _c10d_register.register()
    for _ in range(3):
        dist.init_process_group("poseidon", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        x = torch.ones(3)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((3,), float(size)))
        dist.destroy_process_group()
    # Of a rank 0 that did not live to see the others, its address stays.
    from poseidon._c10d_rendezvous import rendezvous

    other = dist.PrefixStore("other", store)
    if rank == 0:
        other.set("poseidon", "127.0.0.1:9 0123456789abcdef0123456789abcdef")
        store.set("stale", "")
        # Rank 1 has found it.
        store.wait(["found"])
    else:
        store.wait(["stale"])
        assert other.get("poseidon")
        store.set("found", "")
    group = rendezvous(other, rank, list(range(size)), timedelta(seconds=30), [])
    group.leave(2.0)


def test_a_store_may_be_used_again():
    run(again, 2, timeout=60)


def refusals():
    rank, size = start()
    with pytest.raises(ValueError, match="must not be negative, got -7"):
        dist.send(torch.ones(1), 1 - rank, tag=-7)
    with pytest.raises(RuntimeError, match="each of 2 ranks, got 3"):
        dist.all_gather([torch.zeros(1)] * 3, torch.ones(1))
    halves = torch.ones(4, dtype=torch.complex32)
    dist.reduce(halves, 0)
    assert torch.equal(torch.view_as_real(halves)[0], torch.tensor([2.0 if rank == 0 else 1.0, 0.0]).half())
    # The group has not suffered, until now.
    try:
        if rank == 0:
            dist.send(torch.ones(3), 1)
            dist.barrier()
        else:
            dist.recv(torch.zeros(4), 0)
    except RuntimeError as error:
        return str(error)


def stops():
    """Rank 1 stops the group; the others say so to each other as well."""
    rank, _ = start()
    if rank == 1:
        dist.group.WORLD.abort()
        return None
    try:
        dist.all_reduce(torch.ones(100_000))
    except RuntimeError as error:
        return str(error)


def test_what_cannot_be_is_refused():
    sender, receiver = run(refusals, 2, timeout=60)
    assert "rank 0 sent 12 bytes with tag 0, which is not what is received here" in receiver
    assert sender.startswith("rank 1 stopped the job: rank 0 sent 12 bytes")


def test_an_abort_names_its_author_once():
    for rank, words in enumerate(run(stops, 4, timeout=60)):
        assert rank == 1 or words == "rank 1 stopped the job: the program aborted its process group"


def beside_another():
    rank, size = start("cpu:poseidon,cuda:gloo")
    backend = lambda device: dist.group.WORLD._get_backend(torch.device(device)).name()
    assert (backend("cpu"), backend("cuda")) == ("poseidon", "gloo")
    pair = dist.new_group([0, 1])
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.all_reduce(x, group=pair)
    assert torch.equal(x, torch.full((3,), 4.0))
    work = dist.all_reduce(x, async_op=True)
    assert torch.equal(work.get_future().then(lambda done: done.value()[0] + 1).wait(), torch.full((3,), 9.0))
    got = torch.zeros(1)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(got, 0)
        assert got.item() == 1
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    net(torch.full((2, 4), float(rank))).sum().backward()
    assert torch.equal(net.module.weight.grad, torch.ones(4, 4))
    dist.barrier()
    dist.destroy_process_group()


def test_other_devices_may_have_another_backend():
    run(beside_another, 2, timeout=60)
