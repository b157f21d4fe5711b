"""Workers as actors of Ray.

    import poseidon.ray

    def train(epochs):
        import poseidon.torch as psd
        psd.init()
        ...

    results = poseidon.ray.run(train, workers=4, gpus=1, restarts=3, arguments={"epochs": 10})

``run`` reserves a place for every worker (a placement group), starts an actor in each, tells it who
it is in its environment, as torchrun would, and calls the function there. What the function returns
comes back, by rank. If a worker fails, or its machine is lost, the others are ended. With
``restarts`` all of them then begin again, up to so many times, on other machines if need be: a
function that should not begin from scratch saves its state and loads it (``psd.save``, ``psd.load``).
"""

import os
import secrets
import socket
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

__all__ = ["WorkerFailed", "run"]


class WorkerFailed(RuntimeError):
    """A worker failed, and no restart was left. ``rank`` says which one."""

    def __init__(self, rank: int, words: str):
        super().__init__(words)
        self.rank = rank


def run(
    function: Callable[..., Any],
    *,
    workers: int,
    cpus: float = 1,
    gpus: float = 0,
    restarts: int = 0,
    strategy: str = "PACK",
    arguments: Optional[Mapping[str, Any]] = None,
    environment: Optional[Mapping[str, str]] = None,
    patience: float = 300,
) -> List[Any]:
    """Calls ``function(**arguments)`` on every worker, and returns what each returned, by rank.

    ``cpus`` and ``gpus`` are what each worker has. ``strategy`` is Ray's: ``PACK`` puts workers on
    few machines, ``SPREAD`` on many, ``STRICT_SPREAD`` on one each. ``environment`` is set for every
    worker. ``patience`` is how many seconds to wait for the places, and for the workers to start, each
    time. ``TORCHELASTIC_RESTART_COUNT`` tells a worker how many restarts there were. If Ray has not been
    started, it is, on this machine.
    """
    if workers < 1 or restarts < 0:
        raise ValueError(f"workers={workers}, restarts={restarts}: at least 1 and 0")
    ray = _ray()
    from ray.util.placement_group import placement_group, remove_placement_group

    if not ray.is_initialized():
        ray.init()
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    group = placement_group([bundle] * workers, strategy=strategy)
    try:
        for attempt in range(restarts + 1):
            # Ray looks for other places for those of a machine that was lost.
            ready, _ = ray.wait([group.ready()], timeout=patience)
            if not ready:
                names = ("CPU", "GPU")
                has = {name: n for name, n in ray.cluster_resources().items() if name in names}
                raise TimeoutError(
                    f"no place for {workers} workers with {bundle} each within {patience} s: the "
                    f"cluster has {has}, and others may use it; strategy={strategy!r}"
                )
            try:
                actor = _actor(ray, cpus, gpus)
                call = _Call(function, dict(arguments or {}), dict(environment or {}), attempt)
                return _attempt(ray, actor, group, workers, call, patience)
            except WorkerFailed as failure:
                if attempt == restarts:
                    raise
                print(f"poseidon.ray: {failure}; restart {attempt + 1} of {restarts}", flush=True)
    finally:
        remove_placement_group(group)
    raise AssertionError("the last attempt returns or raises")


class _Worker:
    """One worker. Ray makes an actor of it."""

    def place(self):
        """Where it runs: the machine's identity and address, and two ports that are free there."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        sockets = [socket.socket() for _ in range(2)]
        for one in sockets:
            one.bind(("", 0))
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        return context.get_node_id(), address, ports

    def run(self, function, environment, arguments):
        os.environ.update(environment)
        return function(**arguments)


class _Call(NamedTuple):
    """What all workers are to do."""

    function: Callable[..., Any]
    arguments: Dict[str, Any]
    environment: Dict[str, str]
    attempt: int


def _actor(ray, cpus, gpus):
    # A worker that fails is not restarted alone: the others could not go on with it.
    return ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0)(_Worker)


def _attempt(ray, actor, group, workers, call, patience):
    """Starts all workers and returns what they return. At the first failure all are ended."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def start(index):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return actor.options(scheduling_strategy=strategy).remote()

    actors = [start(index) for index in range(workers)]
    try:
        try:
            places = ray.get([one.place.remote() for one in actors], timeout=patience)
        except ray.exceptions.RayError as error:
            raise WorkerFailed(-1, f"a worker could not be started: {_words(error)}") from error
        actors, told, addresses = _describe(actors, places, call.attempt)
        calls = {}
        for rank, (one, variables) in enumerate(zip(actors, told)):
            variables.update(call.environment)
            calls[one.run.remote(call.function, variables, call.arguments)] = rank
        results: List[Any] = [None] * workers
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            for ended in done:
                rank = calls[ended]
                try:
                    results[rank] = ray.get(ended)
                except ray.exceptions.RayError as error:
                    words = f"worker {rank} on {addresses[rank]} failed: {_words(error)}"
                    raise WorkerFailed(rank, words) from error
        return results
    finally:
        for one in actors:
            ray.kill(one)


def _describe(actors, places, attempt):
    """The workers in the order of their ranks, those of a machine one after the other; what each is
    told; and each one's address."""
    machines = list(dict.fromkeys(machine for machine, _, _ in places))
    order = sorted(range(len(actors)), key=lambda i: (machines.index(places[i][0]), i))
    _, master, (port, coordinator) = places[order[0]]
    host = f"[{master}]" if ":" in master else master
    shared = {
        "WORLD_SIZE": str(len(actors)),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "POSEIDON_COORDINATOR": f"{host}:{coordinator}",
        "POSEIDON_SECRET": secrets.token_hex(32),
        "POSEIDON_CLUSTER": "ray",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    sizes = {machine: [place[0] for place in places].count(machine) for machine in machines}
    seen: Dict[str, int] = {}
    told = []
    for rank, index in enumerate(order):
        machine = places[index][0]
        local = {"LOCAL_RANK": str(seen.get(machine, 0)), "LOCAL_WORLD_SIZE": str(sizes[machine])}
        seen[machine] = seen.get(machine, 0) + 1
        told.append({**shared, **local, "RANK": str(rank)})
    return [actors[index] for index in order], told, [places[index][1] for index in order]


def _words(error):
    """The last line of what Ray says: the exception of the worker, or how its process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _ray():
    try:
        import ray
    except ImportError as error:
        raise ImportError("poseidon.ray needs Ray: pip install ray") from error
    return ray
