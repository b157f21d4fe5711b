"""``sync="ssp:S"`` and ``"asp"``: workers go ahead of a slow one, and are equal after a step that they take together."""

import json

import pytest
import torch
from cluster import attempt, run
from torch import nn



def store(folder):
    """Where workers tell each other how far they are."""
    return torch.distributed.FileStore(f"{folder}/store", -1)


def wrapped(rule, sync, scheme, device="cpu", hidden=6):
    import poseidon.torch as psd

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 4)).to(device)
    model = psd.DistributedDataParallel(net, update="server", sync=sync, scheme=scheme)
    # A wide net goes astray with the rate of a narrow one.
    rate = dict(lr=0.3 / hidden)
    settings = dict(rate, momentum=0.9) if rule == "momentum" else rate
    return model, (psd.AdamW if rule == "adamw" else psd.SGD)(model.parameters(), **settings)


def step(model, optimizer, at, rank, waits=True):
    """One step with samples of this worker's own. Returns when its parameters are here, unless it does not wait."""
    optimizer.zero_grad()
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * at + rank))
    model(x.to(model.device)).square().mean().backward()
    optimizer.step()
    if waits:
        model.synchronize()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.module.parameters()]).clone()


def ahead_of_a_slow_one(folder, rule, scheme, sync, lead, **where):
    """The last worker begins when the others have taken ``lead`` steps without it and wait in the next one."""
    import poseidon.torch as psd

    psd.init()
    rank, last = psd.rank(), psd.world_size() - 1
    said = store(folder)
    model, optimizer = wrapped(rule, sync, scheme, **where)
    # In the first step the shards get their parameters, from all workers.
    model.step_together()
    step(model, optimizer, 0, rank)
    assert len({tuple(values) for values in gathered(flat(model).tolist())}) == 1
    if rank == last:
        for other in range(last):
            assert said.get(f"ahead {other}") == str(lead).encode()
    for at in range(1, lead + 1):
        step(model, optimizer, at, rank)
    step(model, optimizer, lead + 1, rank, waits=False)
    if rank != last:
        # Nobody answers the step that is one too far, however long one waits: the slow worker waits for this one.
        assert not any(model._session.is_ready(unit.index) for unit in model._units)
        said.set(f"ahead {rank}", str(lead))
    model.step_together()
    step(model, optimizer, lead + 2, rank)
    ends = gathered(flat(model).tolist())
    # Buffers are rank 0's from the next forward on.
    with torch.no_grad():
        model.eval()(torch.ones(5, 12, device=model.device))
    means = gathered(model.module[1].running_mean.tolist())
    schemes = [row[2] for row in model.sessions_plan()]
    psd.shutdown()
    return ends, means, schemes


def gathered(value):
    """Every worker's ``value``."""
    from poseidon.torch._job import Job

    gathered.count = getattr(gathered, "count", 0) + 1
    return [json.loads(text) for text in Job.get().gather(f"a test's {gathered.count}", json.dumps(value))]


@pytest.mark.parametrize(
    "rule, scheme, sync, lead",
    [("sgd", "ps", "ssp:2", 2), ("momentum", "sfb", "ssp:1", 1), ("adamw", "ps", "asp", 16)],
)
def test_workers_go_ahead_of_a_slow_one_as_far_as_they_may(tmp_path, rule, scheme, sync, lead):
    check_ahead(tmp_path, rule=rule, scheme=scheme, sync=sync, lead=lead)


def check_ahead(folder, scheme, **options):
    for ends, means, schemes in run(ahead_of_a_slow_one, 3, folder=str(folder), scheme=scheme, **options):
        assert ("sfb" in schemes) == (scheme == "sfb"), schemes
        # Bit by bit.
        assert all(torch.tensor(end).isfinite().all() for end in ends)
        assert ends.count(ends[0]) == len(ends) and means.count(means[0]) == len(means)


def zeros():
    """A layer whose sums are exact."""
    linear = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def own_contribution(folder):
    """With plain SGD a worker sees its own steps at once, and those of others when they have come."""
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    said = store(folder)
    linear = zeros()
    model = psd.DistributedDataParallel(linear, update="server", sync="asp", scheme="ps")
    optimizer = psd.SGD(model.parameters(), lr=0.5)

    def contribute(number):
        # The gradient of every element is this number.
        (number * model(torch.ones(1, 3))).sum().backward()
        optimizer.step()
        model.synchronize()
        return linear.weight.detach().neg().unique().tolist()

    # In the first step the shards get their parameters, from all workers.
    contribute(0.0)
    seen = []
    if rank == 1:
        said.get("two steps")
    for number in (1.0, 2.0):
        seen.append(contribute(number * (1 + 9 * rank)))
    if rank == 0:
        said.set("two steps", "taken")
    model.step_together()
    seen.append(contribute(4.0))
    psd.shutdown()
    return seen


def test_a_worker_sees_its_own_steps(tmp_path):
    first, second = run(own_contribution, 2, folder=str(tmp_path))
    # The mean over two workers, times the rate: a quarter of each number.
    assert first[:2] == [[0.25 * 1], [0.25 * (1 + 2)]]
    # The second worker has its own, and all that the first one had contributed.
    assert second[0][0] >= 0.25 * (1 + 2 + 10) and second[1][0] >= 0.25 * (1 + 2 + 10 + 20)
    assert first[2] == second[2] == [0.25 * (1 + 2 + 10 + 20 + 4 + 4)]


def saved_and_resumed(folder, rule, scheme):
    """Saved after a step together; goes on from it in another model. Refused elsewhere, with nothing lost."""
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    model, optimizer = wrapped(rule, "ssp:2", scheme)
    step(model, optimizer, 0, rank)
    words = []
    for refused in (
        model.state_dict,
        model.module.state_dict,
        optimizer.state_dict,
        lambda: psd.save(folder, model, optimizer, step=1),
        lambda: psd.load(folder, model, optimizer),
        lambda: optimizer.load_state_dict({**torch.optim.SGD(model.parameters()).state_dict(), "state": {}}),
        model.close,
    ):
        try:
            refused()
            words.append("")
        except RuntimeError as error:
            words.append(str(error))
    model.step_together()
    step(model, optimizer, 1, rank)
    psd.save(folder, model, optimizer, step=2)
    for at in (2, 3):
        model.step_together()
        step(model, optimizer, at, rank)
    straight = flat(model)
    notes = psd.load(folder, model, optimizer)
    for at in (2, 3):
        model.step_together()
        step(model, optimizer, at, rank)
    apart = (flat(model) - straight).abs().max().item()
    psd.shutdown()
    return words, notes["step"], apart


@pytest.mark.parametrize("rule, scheme", [("sgd", "ps"), ("momentum", "sfb"), ("adamw", "ps")])
def test_what_is_saved_was_taken_together(tmp_path, rule, scheme):
    for words, at, apart in run(saved_and_resumed, 2, folder=str(tmp_path), rule=rule, scheme=scheme):
        assert all("step_together" in refused and "ssp:2" in refused for refused in words), words
        assert at == 2 and apart < 1e-5, (at, apart)


def left_apart():
    import poseidon.torch as psd

    psd.init()
    model, optimizer = wrapped("sgd", "ssp:2", "ps")
    step(model, optimizer, 0, psd.rank())
    psd.shutdown()


def test_leaving_without_a_step_together_is_refused_in_words():
    ended = attempt(left_apart, 2)
    assert all(status != 0 for status, *_ in ended), ended
    assert any("model.step_together()" in errors for *_, errors in ended), ended


def refusals():
    import poseidon.torch as psd

    psd.init()

    def words(**settings):
        try:
            psd.DistributedDataParallel(nn.Linear(3, 2), **settings)
        except ValueError as error:
            return str(error)

    server = dict(update="server", sync="ssp:2")
    said = {
        "worker": words(sync="ssp:2"),
        "deterministic": words(deterministic=True, **server),
        "unused": words(find_unused_parameters=True, **server),
        "static": words(static_graph=True, **server),
        "text": words(update="server", sync="ssp:17"),
        "dropped": words(update="server", sync="drop-slowest:1"),
        # As bsp, by another name.
        "none": words(sync="ssp:0"),
    }
    model = psd.DistributedDataParallel(nn.Linear(3, 2), **server)
    for name, call in (("join", lambda: model.join().__enter__()), ("static later", model._set_static_graph)):
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    try:
        psd.DistributedDataParallel(nn.Linear(3, 2), update="server", sync=f"ssp:{psd.rank()}")
    except psd._parallel._native.ModelMismatchError as error:
        said["different"] = str(error)
    return said


def test_what_has_no_meaning_is_refused_in_words():
    for _, said, errors in attempt(refusals, 2):
        assert said is not None, errors
        assert 'update="server"' in said["worker"] and "'bsp'" in said["worker"] and "ssp:2" in said["worker"]
        assert "deterministic=False" in said["deterministic"]
        assert "find_unused_parameters=False" in said["unused"] and "static_graph=False" in said["static"]
        assert "ssp:S" in said["text"] and said["none"] is None
        assert "bsp, ssp:S or asp" in said["dropped"]
        assert "join()" in said["join"] and "static_graph=False" in said["static later"]
        assert "sync is ssp:0 on worker 0 and ssp:1 on worker 1" in said["different"]


def accumulated():
    """no_sync works as ever: what was accumulated goes with the next step."""
    import poseidon.torch as psd

    psd.init()
    linear = zeros()
    model = psd.DistributedDataParallel(linear, update="server", sync="ssp:1")
    optimizer = psd.SGD(model.parameters(), lr=1.0)
    with model.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    model.step_together()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model.synchronize()
    moved = linear.weight.detach().neg().unique().tolist()
    psd.shutdown()
    return moved


def test_gradients_that_were_accumulated_go_with_the_next_step():
    for moved in run(accumulated, 2):
        assert moved == [2.0], moved
