"""Every error that fddp raises on purpose.

Two families: mistakes a caller can mend (`FddpError` and its kinds) and broken invariants of the
library itself (`InternalError`). The kinds that concern the whole group are raised on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class FddpError(RuntimeError):
    """Base of the errors that a caller can act on."""


class PlanMismatchError(FddpError):
    """Ranks disagree on what they are about to synchronise; found at construction."""


class ScheduleError(FddpError, ValueError):
    """A schedule does not give the result that it states; found by `check_schedule`.

    Attributes:
        op: position of the operation at fault in `schedule.ops`; -1 where one is missing.
        bucket: its bucket; -1 for the control word.
        paths: the bucket's leaves that are concerned.
        ranks: some that are concerned, where ranks differ; empty where it is the same on all.
    """

    def __init__(
        self,
        message: str,
        *,
        op: int = -1,
        bucket: int = -1,
        paths: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.op = op
        self.bucket = bucket
        self.paths = paths
        self.ranks = ranks


class TreeMismatchError(FddpError, ValueError):
    """A tree does not have the leaves (paths, shapes, dtypes) that the plan was made for."""


class NoGradientError(FddpError, ValueError):
    """A parameter tree has no leaf of a floating or complex dtype, or none is selected."""


class LossError(FddpError, ValueError):
    """A loss function returned something that has no gradient: not a real scalar tensor."""


class WeightError(FddpError, ValueError):
    """A weight is negative or not finite, or the total weight of a step is zero."""


class TransformError(FddpError):
    """A call inside a `torch.func` transform that fddp cannot serve there."""


class ReentryError(FddpError):
    """A step was called while backward of another step of the same `GradSync` runs."""


class UnevenError(FddpError):
    """A round of `fddp.uneven` synchronised more or less often than once."""


class HookError(FddpError, TypeError):
    """A communication hook returned something that is no result."""


class PeerError(FddpError):
    """Another rank failed in this step; the group stays usable.

    Attributes:
        failures: the message of each failing rank, by rank.
    """

    def __init__(self, message: str, failures: Mapping[int, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class DesyncError(FddpError):
    """Ranks met in one collective while at different steps or with different plans."""


class RankLostError(FddpError):
    """A rank died or closed its connection in the middle of an operation.

    Attributes:
        ranks: the ranks that are known to be lost; empty where the backend does not tell.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SyncTimeoutError(FddpError, TimeoutError):
    """An operation did not finish within `timeout_s` although no rank is known to be lost."""


class ClosedError(FddpError):
    """Use of a `GradSync` or transport after `close()` or after its communicator failed."""


class ExtensionError(ImportError):
    """The compiled extension is missing or was built for another torch."""


class InternalError(AssertionError):
    """An invariant of fddp does not hold: a bug in fddp, not in the caller's code."""
