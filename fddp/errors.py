"""Exceptions of fddp.

`FddpError` and its subclasses report errors that the caller can fix or handle. `InternalError`
reports a bug in fddp. Errors that concern the whole group are raised on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

#: also names of `fddp`
__all__ = [
    "ClosedError", "DesyncError", "EquivalenceError", "FddpError", "HookError", "InternalError",
    "LossError", "NoGradientError", "NonFiniteError", "PeerError", "PlanMismatchError",
    "RankLostError", "ReentryError", "ReplicationError", "ScheduleError", "SyncTimeoutError",
    "TransformError", "TreeMismatchError", "UnevenError", "WeightError",
]  # fmt: skip

_LONGEST_TEXT = 8000  # characters


class FddpError(RuntimeError):
    """Base class of the errors that a caller can fix or handle."""


class PlanMismatchError(FddpError):
    """Ranks have different bucket plans, schedules or options. Raised at construction."""


class ScheduleError(FddpError, ValueError):
    """A schedule does not produce its stated result. Raised by `check_schedule`.

    Attributes:
        op: position of the faulty operation in `schedule.ops`; -1 if an operation is missing.
        bucket: index of the bucket; -1 for the control word.
        paths: paths of the affected leaves of the bucket.
        ranks: some of the affected ranks; empty if all ranks are affected alike.
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
    """A tree does not have the leaves (paths, shapes, dtypes) of the plan."""


class NoGradientError(FddpError, ValueError):
    """A parameter tree has no leaf of a floating or complex dtype, or none is selected."""


class LossError(FddpError, ValueError):
    """A loss function returned something other than a real scalar tensor with a gradient."""


class WeightError(FddpError, ValueError):
    """A weight is no number from 0 to 2**512, the total weight of a step is zero, or the mean
    weight does not fit the dtype of the sums."""


class TransformError(FddpError):
    """A call that fddp does not support inside a `torch.func` transform, `autograd.grad`, or the
    capture of a graph."""


class ReentryError(FddpError):
    """A step was called during backward of another step of the same `GradSync`."""


class UnevenError(FddpError):
    """A round of `fddp.uneven` did not synchronise exactly once, or inputs are too uneven."""


class HookError(FddpError, TypeError):
    """A communication hook returned an invalid result."""


class NonFiniteError(FddpError, ArithmeticError):
    """Gradients or their sum hold NaN or infinity, and `nonfinite="raise"` is set. Raised on every
    rank; the group stays usable.

    Attributes:
        step: number of the step.
        ranks: ranks with non-finite local gradients; empty if only sums overflowed.
        paths: paths of the non-finite leaves by rank, at most 100 per rank.
        counts: numbers of NaN and of infinite elements by rank and path.
        overflowed: the same counts by path for leaves whose sum over ranks is not finite; empty if
            a rank has non-finite local gradients. If results differ by rank, the largest counts of
            any rank.
        leaves: paths of all these leaves. Under `report="next"`, those whose mean is not finite;
            the other attributes but `step` are then empty.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int = -1,
        counts: Mapping[int, Mapping[str, tuple[int, int]]] = MappingProxyType({}),
        overflowed: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        leaves: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.counts = {rank: dict(own) for rank, own in counts.items()}
        self.ranks = tuple(self.counts)
        self.paths = {rank: tuple(own) for rank, own in self.counts.items()}
        self.overflowed = dict(overflowed)
        found = (*self.counts.values(), self.overflowed)
        self.leaves = tuple(leaves) or tuple(dict.fromkeys(path for own in found for path in own))


class PeerError(FddpError):
    """Another rank failed in this step; the group stays usable.

    Attributes:
        failures: error message by failing rank.
    """

    def __init__(self, message: str, failures: Mapping[int, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class DesyncError(FddpError):
    """Ranks joined one collective at different steps or with different plans, or their replicas
    differ.

    Attributes:
        path: path of the first leaf in which replicas differ; empty if something else differs.
        ranks: ranks whose replicas differ from those of the majority; all ranks without a majority.
    """

    def __init__(self, message: str, *, path: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.ranks = ranks


class ReplicationError(FddpError):
    """A training step does not keep replicas equal. Raised by `fddp.testing.check_replication`, and
    by a wrapped module whose gradients no step averages.

    Attributes:
        path: path of the result that differs between ranks, or name of the parameter; empty if
            collectives are at fault.
        line: file and line of the user's code; empty if it is not known.
    """

    def __init__(self, message: str, *, path: str = "", line: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class EquivalenceError(FddpError):
    """A training step does not do on several ranks what it does on one device with the whole batch.
    Raised by `fddp.testing.check_equivalence`.

    Attributes:
        path: path of a leaf of the state, or of the results, that differs.
        ratio: change of the leaf on several ranks, divided by that on one device; NaN if they are
            not proportional.
    """

    def __init__(self, message: str, *, path: str = "", ratio: float = math.nan) -> None:
        super().__init__(message)
        self.path = path
        self.ratio = ratio


class _FailedOperation(FddpError):  # noqa: N818 - a private base class
    bucket: int = -1
    paths: tuple[str, ...] = ()
    step: int = -1

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankLostError(_FailedOperation):
    """A rank died or closed its connection during an operation.

    Attributes:
        ranks: ranks known to be lost; empty if the backend does not report them. After `rebuild`
            they keep the numbers of the first group.
        bucket: index of the bucket of the failed operation; -1 for the control word and outside of
            steps.
        paths: paths of the bucket's leaves.
        step: number of the step; -1 outside of steps.
    """


class SyncTimeoutError(_FailedOperation, TimeoutError):
    """An operation did not finish within `timeout_s`, and no rank is known to be lost.

    Attributes:
        ranks: ranks that did not respond; empty if all responded.
        bucket, paths, step: as in `RankLostError`.
    """


class ClosedError(FddpError):
    """A `GradSync` or transport was used after `close()` or after its communicator failed."""


class ExtensionError(ImportError):
    """The compiled extension is missing or was built for another version of torch."""


class InternalError(AssertionError):
    """An invariant of fddp does not hold. This is a bug in fddp, not in the caller's code."""


def error_text(error: BaseException) -> str:
    """Type and message of an error, truncated to a size that can be sent to every rank."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # other ranks wait for this text, so a failing __str__ must not propagate
        return type(error).__name__
    more = len(text) - _LONGEST_TEXT
    return f"{text[:_LONGEST_TEXT]}... ({more:,} more characters)" if more > 0 else text
