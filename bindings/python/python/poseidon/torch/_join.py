"""Workers with different numbers of batches."""

from typing import Any, List, Optional

import torch

from poseidon import _native
from poseidon.torch._job import Job, add_up, rank, world_size


class Join:
    """Before each step, all workers say whether they still train."""

    def __init__(self, model: Any, divides_by_all: bool, throws: bool):
        self._model = model
        self._divides_by_all = divides_by_all
        self._throws = throws
        # Opened when workers ask for the first time: then the rule has all its groups.
        self._session: Optional[_native.Session] = None
        self._active: List[int] = list(range(world_size()))
        # By worker and group.
        self._rates: List[List[float]] = []
        self.is_through = False

    @property
    def first_active(self) -> int:
        return self._active[0]

    @property
    def scale(self) -> float:
        """What makes a mean over all workers one over those that train."""
        return 1.0 if self._divides_by_all else world_size() / max(len(self._active), 1)

    def note_forward(self) -> None:
        """This worker takes a step."""
        self._ask()
        if self._throws and len(self._active) < world_size():
            through = [r for r in range(world_size()) if r not in self._active]
            raise RuntimeError(f"worker {', '.join(map(str, through))} has no batches left")

    def go_along(self) -> None:
        """This worker is through: contributes nothing to every step of the others, until none is left."""
        self.is_through = True
        model = self._model
        while True:
            last = self._active[0]
            self._ask()
            if not self._active:
                break
            if self._throws:
                raise RuntimeError(f"worker {rank()} has no batches left")
            model._share_buffers_in_join()
            if model._session is None:
                model._start_session()
            if model._rule is not None:
                model._set_rates(self._rates[self.first_active])
                model.synchronize()
            for unit in model._units:
                unit.begin()
            with _no_gradients(model):
                model._send_the_rest()
                model.synchronize()
                if model._remainders is not None:
                    model._remainders.exchange()
            model._leave_factors()
        # With update="server" parameters came back all the while; otherwise only workers that trained
        # have stepped.
        stepped = model._trainable.values() if model._update == "worker" else ()
        model._shared.share(last, list(stepped))

    def close(self, because: Optional[str] = None) -> None:
        if self._session is not None:
            self._session.finish() if because is None else self._session.abort(because)

    def _ask(self) -> None:
        rule = self._model._rule
        own = [float(not self.is_through), *(rule.rates() if rule is not None else ())]
        flags = torch.zeros(world_size(), len(own), dtype=torch.float32, device="cpu")
        flags[rank()] = torch.tensor(own, dtype=torch.float32, device="cpu")
        if self._session is None:
            self._session = Job.open("join()", [("still training", flags.numel(), None)], optimizer="sum")
        add_up(self._session, 0, flags)
        self._active = [r for r, flag in enumerate(flags[:, 0].tolist()) if flag > 0]
        # Of those that train: a schedule of one that does not has stopped.
        self._rates = flags[:, 1:].tolist()


class _no_gradients:
    """Within it the model has no gradients; afterwards, those it had."""

    def __init__(self, model: Any):
        self._parameters = list(model._trainable.values())

    def __enter__(self) -> None:
        self._gradients = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None

    def __exit__(self, *_: Any) -> None:
        for p, gradient in zip(self._parameters, self._gradients):
            p.grad = gradient
