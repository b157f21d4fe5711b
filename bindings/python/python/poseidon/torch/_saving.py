"""Checkpoints that are written beside the training."""

import json
import threading
import warnings
from typing import Any, Callable, List, Optional, Tuple

from poseidon import _native
from poseidon.torch._job import Job, rank

# Seconds that the slowest worker may take to write its part. Training goes on meanwhile.
_SLOWEST = 30 * 60.0


class Saving:
    """A checkpoint that is being written, as ``psd.save`` returns it.

    A thread of every worker writes. If one of them fails, the checkpoint fails everywhere, older ones are as they were,
    and training goes on: ``result()`` raises the error. One that nobody waits for is a warning when it happens.
    """

    # The one that was begun last.
    _last: "Optional[Saving]" = None

    def __init__(self, step: int, write: "Callable[[Together], None]", waits: bool):
        self.step = step
        self._write = write
        self._waits = waits
        self._error: Optional[Exception] = None
        self._together = Together()
        # It ends with the job: see `_close`.
        self._thread = threading.Thread(target=self._run, name="poseidon-checkpoint", daemon=True)
        Saving._last = self
        Job.closers.append(self._close)
        self._thread.start()

    def done(self) -> bool:
        """Whether ``result()`` would return at once."""
        return not self._thread.is_alive()

    def result(self, timeout: Optional[float] = None) -> None:
        """Waits until the checkpoint is complete. Raises ``poseidon.CheckpointError`` if it has failed.

        Raises ``TimeoutError`` if it is still being written after ``timeout`` seconds, and may be called again.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint of step {self.step} is still being written after {timeout} seconds")
        if self._error is not None:
            raise self._error

    @classmethod
    def await_last(cls) -> None:
        """Returns when no checkpoint is being written. Who waits for it hears how it has ended."""
        if cls._last is not None:
            cls._last._thread.join()

    def _run(self) -> None:
        try:
            self._write(self._together)
        except Exception as error:
            self._error = error
            if not self._waits:
                warnings.warn(f"the checkpoint of step {self.step} was not written: {error}", stacklevel=1)
        finally:
            # What it has copied is free.
            del self._write
            Job.closers.remove(self._close)

    def _close(self, because: Optional[str] = None) -> Callable[[], None]:
        """The job ends: not before the checkpoint is there, unless it ends with an error."""
        if because is None:
            self._thread.join()
        return lambda: None


class Together:
    """What all workers do for one checkpoint, each its part. Made on every worker, in the same order."""

    def __init__(self) -> None:
        Job.checkpoints += 1
        self._name = f"checkpoint {Job.checkpoints}"
        self._session, self._rank = Job.get(), rank()

    def do(self, purpose: str, work: Callable[..., Any], *arguments: Any, waits: bool = False) -> List[Any]:
        """What ``work`` has returned on each worker. If it fails on one of them, all of them get an error.

        ``waits`` is for the program's own thread: the program waits for the others as it does elsewhere.
        """
        failure: Optional[Exception] = None
        word: Tuple[str, Any]
        try:
            word = "done", work(*arguments)
        except Exception as error:
            failure, word = error, ("failed", str(error))
        topic = f"{self._name}: {purpose}"
        words = [json.loads(w) for w in self._session.gather(topic, json.dumps(word), None if waits else _SLOWEST)]
        if isinstance(failure, _native.CheckpointError):
            raise failure
        if failure is not None:
            raise _native.CheckpointError(f"worker {self._rank} {purpose}: {failure}") from failure
        for worker, (outcome, value) in enumerate(words):
            if outcome == "failed":
                raise _native.CheckpointError(f"worker {worker} {purpose}: {value}")
        return [value for _, value in words]
