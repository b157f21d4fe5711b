"""What a wrapper does in forward passes: it sees which parameters are used how, and awaits those that are on their way."""

from typing import Any, Callable, Iterable, List, Optional, Set

import torch
from torch import nn

from poseidon.torch._awaited import give_back
from poseidon.torch._backward import CLOSED, Backward
from poseidon.torch._hooks import Hooks
from poseidon.torch._layers import Member, is_compiled
from poseidon.torch._parts import Part
from poseidon.torch._watch import Watch


class Forward(Backward):
    """The part of a `DistributedDataParallel` that runs in and before forward passes. The wrapper makes all of its state."""

    module: nn.Module
    _take_part: Callable[[], None]
    _share_buffers: Callable[[bool], None]
    _share_buffers_in_join: Callable[[], None]
    _torn: Callable[[], str]
    _part: Optional[Part]
    _hooks: Hooks
    _watched: bool
    _used_early: Set[nn.Parameter]
    _entered: Set[nn.Parameter]

    @torch.compiler.disable
    def _begin_forward(self) -> None:
        if self._part is None:
            self._take_part()
        if not self._is_open:
            raise RuntimeError(CLOSED)
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            why = self._torn()
            self._close(because=why)
            raise RuntimeError(why)
        if torch._C._current_graph_task_id() == -1:
            self._ending = None
        self._entered = set()
        self._forget_gradients()
        if self._join is None:
            self._share_buffers(self._synchronises)
        elif self._synchronises:
            self._join.note_forward()
            self._share_buffers_in_join()

    @torch.compiler.disable
    def _begin_evaluation(self) -> None:
        # A model whose job has ended can still be evaluated; in join, others who are through would not take part.
        if self._is_open and self._join is None:
            self._share_buffers(False)

    @torch.compiler.disable
    def _watched_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first forward: sees which parameters are used in other ways than by calling their module."""
        for m in self.module.modules():
            if is_compiled(m):
                # What happens inside cannot be seen: nothing is taken for granted.
                self._used_early.update(m.parameters())
        inside = {p: f for f in self._factored for p in f.linear.parameters()}

        def unexpected(parameter: nn.Parameter) -> bool:
            factored = inside.get(parameter)
            return parameter not in self._entered if factored is None else factored.inside == 0

        with Watch(unexpected) as watch:
            result = self.module(*args, **kwargs)
        self._watched = True
        self._used_early.update(watch.seen)
        for factored in list(self._factored):
            if factored.linear.weight in watch.seen or factored.linear.bias in watch.seen:
                self._give_up(factored)
                self._factored.remove(factored)
        return result

    def _await_in_forward(self) -> None:
        """With update="server": a module's parameters are awaited when its forward begins."""
        for module in self.module.modules():
            members = [self._members[p] for p in module.parameters(recurse=False) if p in self._members]
            if members:
                self._hooks.before_forward(module, self._enter, members)
        self._hooks.before_forward(self.module, self._await_early)
        self._hooks.before_state_dict(self.module, self._await_all)

    def _enter(self, members: List[Member], *_: Any) -> None:
        if not self._watched:
            self._entered.update(m.parameter for m in members)
        for member in members:
            unit = member.unit
            if unit is not None:
                self._await(unit) if unit.in_flight else unit.enter()
            give_back(member.parameter)

    def _await_early(self, *_: Any) -> None:
        self._await_those(self._used_early)

    def _await_all(self, *_: Any) -> None:
        self._staleness.check_together("state_dict()")
        self.synchronize()

    def _settle(self, module: nn.Module) -> None:
        """With update="server": a module's own parameters are the new ones."""
        if self._update == "server":
            self._await_those(module.parameters(recurse=False))

    def _await_those(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            member = self._members.get(p)
            if member is not None and member.unit is not None:
                self._await(member.unit)
                give_back(p)
