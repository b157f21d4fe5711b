"""Models' parts in the job."""

import json
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence

from poseidon import _native
from poseidon.torch._job import Job
from poseidon.torch._replicas import tell


class Part:
    """What a model has with the other workers, from when it lets go of it until it ends.

    To end a session, every worker has to. Garbage is not collected everywhere at the same time, so what a model
    leaves behind waits for the next point that all workers come to: another model, or the end of the job.
    """

    _all: Dict[int, "Part"] = {}

    def __init__(self, model: Any, number: int):
        self._number = number
        self._model = weakref.ref(model)
        self._is_left = False
        self._sessions: List[_native.Session] = []
        self._groups: Sequence[Any] = ()
        self._all[number] = self
        Job.closers.append(self.close)

    def leave(self, sessions: List[_native.Session], *groups: Any) -> None:
        """The model needs them no more."""
        self._is_left = True
        self._sessions, self._groups = sessions, groups

    def close(self, because: Optional[str] = None) -> Callable[[], None]:
        """Says goodbye, or why the model stops. What is returned waits for the others, who may wait for another model first."""
        model = self._model()
        if model is not None and because is None:
            model._staleness.check_together("the end of a model")
        if model is not None:
            model._leave(waits=because is None)
        if self._all.pop(self._number, None) is None:
            return lambda: None
        Job.closers.remove(self.close)
        if because is not None:
            for session in self._sessions:
                session.abort(because)
            for group in self._groups:
                group.close(because)
            return lambda: None
        for session in self._sessions:
            session.say_goodbye()
            tell(session)
        return self._wait

    def _wait(self) -> None:
        for group in self._groups:
            group.close()
        for session in self._sessions:
            session.finish()

    @classmethod
    def close_those_left(cls, number: int) -> None:
        """Before model ``number`` begins: ends what models have left that no worker has any more."""
        mine: List[int] = [n for n, part in list(cls._all.items()) if part._is_left]
        everybodys = Job.get().gather(f"models left before {number}", json.dumps(mine))
        for n in sorted(set(mine).intersection(*map(json.loads, everybodys))):
            cls._all[n].close()()
