"""Every error that fddp raises on purpose.

Two families: mistakes a caller can mend (`FddpError` and its kinds) and broken invariants of the
library itself (`InternalError`). The kinds that concern the whole group are raised on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LONGEST_TEXT = 8000  # characters


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


class NonFiniteError(FddpError, ArithmeticError):
    """Gradients, or their sum, hold NaN or infinity, and `nonfinite="raise"` was asked for; raised
    on every rank, which can all go on.

    Attributes:
        step: number of the step.
        ranks: those whose own gradients are at fault; empty where sums overflowed.
        paths: by rank, the leaves at fault of its own; 100 at most of each.
        counts: the same with how many elements are NaN, and how many infinite.
        overflowed: leaves whose sum over ranks is not finite, with the same counts; empty where a
            rank is at fault. Of results that are each rank's own, the most of any rank.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int = -1,
        counts: Mapping[int, Mapping[str, tuple[int, int]]] = MappingProxyType({}),
        overflowed: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.counts = {rank: dict(own) for rank, own in counts.items()}
        self.ranks = tuple(self.counts)
        self.paths = {rank: tuple(own) for rank, own in self.counts.items()}
        self.overflowed = dict(overflowed)


class PeerError(FddpError):
    """Another rank failed in this step; the group stays usable.

    Attributes:
        failures: the message of each failing rank, by rank.
    """

    def __init__(self, message: str, failures: Mapping[int, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class DesyncError(FddpError):
    """Ranks met in one collective while at different steps or with different plans, or their
    replicas differ.

    Attributes:
        path: the first leaf in which replicas differ; empty where something else does.
        ranks: those whose replicas differ from most ranks'; all where no side is the larger one.
    """

    def __init__(self, message: str, *, path: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.ranks = ranks


class _WaitedInVain(FddpError):  # noqa: N818 - no error that users meet by this name
    bucket: int = -1
    paths: tuple[str, ...] = ()
    step: int = -1

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankLostError(_WaitedInVain):
    """A rank died or closed its connection in the middle of an operation.

    Attributes:
        ranks: the ranks that are known to be lost; empty where the backend does not tell.
        bucket: the bucket whose operation ended so; -1 for the control word, and outside of steps.
        paths: the bucket's leaves.
        step: number of the synchronisation; -1 outside of steps.
    """


class SyncTimeoutError(_WaitedInVain, TimeoutError):
    """An operation did not finish within `timeout_s` although no rank is known to be lost.

    Attributes:
        ranks: the ranks that were waited for in vain; empty where every rank gave word.
        bucket, paths, step: as those of `RankLostError`.
    """


class ClosedError(FddpError):
    """Use of a `GradSync` or transport after `close()` or after its communicator failed."""


class ExtensionError(ImportError):
    """The compiled extension is missing or was built for another torch."""


class InternalError(AssertionError):
    """An invariant of fddp does not hold: a bug in fddp, not in the caller's code."""


def error_text(error: BaseException) -> str:
    """Name and message of an error, truncated so that it can be sent to every rank."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an error that can't be printed must not keep the others waiting
        return type(error).__name__
    more = len(text) - _LONGEST_TEXT
    return f"{text[:_LONGEST_TEXT]}... ({more:,} more characters)" if more > 0 else text
