"""Models' parts in the job."""

import json
import weakref
from typing import Any, Dict, List, Optional, Sequence

from poseidon import _native
from poseidon.torch._job import Job


class Part:
    """A model's sessions, from when it lets go of them until they end.

    To end a session, every worker has to. Garbage is not collected everywhere at the same time, so what a model
    leaves behind waits for the next point that all workers come to: another model, or the end of the job.
    """

    _all: Dict[int, "Part"] = {}

    def __init__(self, model: Any, number: int):
        self._number = number
        self._model = weakref.ref(model)
        self._left: Optional[Sequence[_native.Session]] = None
        self._all[number] = self
        Job.closers.append(self.close)

    def leave(self, sessions: Sequence[_native.Session]) -> None:
        """The model needs them no more."""
        self._left = sessions

    def close(self, because: Optional[str] = None) -> None:
        """Ends the model's sessions, together with the other workers or, if there is a reason, at once."""
        model = self._model()
        if model is not None:
            model._leave(waits=because is None)
        if self._all.pop(self._number, None) is None:
            return
        Job.closers.remove(self.close)
        for session in self._left or ():
            session.finish() if because is None else session.abort(because)

    @classmethod
    def close_those_left(cls, number: int) -> None:
        """Before model ``number`` begins: ends the sessions of models that no worker has any more."""
        mine: List[int] = [n for n, part in list(cls._all.items()) if part._left is not None]
        everybodys = Job.get().gather(f"models left before {number}", json.dumps(mine))
        for n in sorted(set(mine).intersection(*map(json.loads, everybodys))):
            cls._all[n].close()
