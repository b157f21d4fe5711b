"""Workers that need not be at the same step: ``sync="ssp:2"``, ``sync="asp"``."""

from poseidon import _native


class Staleness:
    """Whether the workers of a model are together. With ``sync="bsp"`` they always are."""

    def __init__(self, sync: str):
        self.sync = sync
        if sync.startswith("drop-slowest"):
            raise ValueError(
                f"sync={sync!r}: slow workers are dropped by 'poseidon train' only. Expected bsp, ssp:S or asp"
            )
        # Whether workers may be at different steps.
        self.is_allowed = _native.lets_workers_be_apart(sync)
        # Whether the next step is to be taken together, and whether the last one was.
        self.is_asked = False
        self._is_together = True

    def refuse(self, what: str, instead: str) -> None:
        """Refuses ``what`` where workers may be at different steps, and says what to do."""
        if self.is_allowed:
            raise ValueError(f"sync={self.sync!r}: {what}. Expected {instead}, or sync='bsp'")

    def begin_step(self, session: _native.Session) -> bool:
        """Another step begins. True if workers, who may be apart, are together after it."""
        if not self.is_allowed:
            return False
        self._is_together, self.is_asked = self.is_asked, False
        if self._is_together:
            session.step_together()
        return self._is_together

    def check_together(self, what: str) -> None:
        """Refuses ``what``, unless all workers have the same parameters."""
        if not self._is_together:
            raise RuntimeError(
                f"{what}: with sync={self.sync!r} this worker may lack what others have contributed. On every worker, call "
                "model.step_together() before the last backward. After that step all have the same parameters"
            )
