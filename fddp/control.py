"""The control word: one small vector, summed over ranks beside the last bucket of every step.

From its sums every rank learns the same facts in the same step: which leaves were used anywhere,
which buckets received a gradient after they were launched, how many ranks took part and with what
weight, who has more input, whether a contribution was not finite, and whether a rank failed. No
flag of the caller's and no further collective is needed for any of them.

The fields are float64, in which counts of ranks and sums of token counts are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SCALARS = ("fingerprint", "active", "weight", "weight_squared", "has_next", "nonfinite", "failed")


@dataclass(frozen=True)
class ControlLayout:
    """Where each field lies in the vector.

    Attributes:
        leaves: number of reduced leaves.
        buckets: number of buckets.
        with_order: whether rank 0's ready order rides along (until a plan has been rebuilt by it).
    """

    leaves: int
    buckets: int
    with_order: bool = False

    @property
    def size(self) -> int:
        """Number of float64 elements."""
        return len(_SCALARS) + self.buckets + self.leaves * (2 if self.with_order else 1)


@dataclass(frozen=True)
class ControlWord:
    """What one rank reports of a step.

    Attributes:
        fingerprint: integer below 2**32 that must be the same on all ranks (plan and step).
        weight: this rank's weight; 0 contributes nothing.
        used: for each reduced leaf, whether this rank has a gradient for it.
        late: for each bucket, whether a gradient arrived after its launch.
        has_next: whether this rank has input for another step.
        nonfinite: whether one of its gradients holds NaN or infinity.
        failed: whether this rank could not complete the step.
        order: reduced leaves in the order in which their gradients arrived; only rank 0 gives it.
    """

    fingerprint: int
    weight: float
    used: Sequence[bool]
    late: Sequence[bool]
    has_next: bool = True
    nonfinite: bool = False
    failed: bool = False
    order: Sequence[int] = ()


@dataclass(frozen=True)
class ControlReport:
    """What all ranks know after the reduction; the same on each.

    Attributes:
        agreed: whether all ranks had the same fingerprint.
        active: number of ranks with a weight above zero.
        total_weight: sum of weights.
        total_squared: sum of squared weights.
        has_next: number of ranks with input for another step.
        nonfinite: number of ranks with a gradient that is not finite.
        failed: number of ranks that failed.
        users: for each reduced leaf, the number of ranks that used it.
        late: indices of the buckets that some rank has to repair.
        order: rank 0's ready order of the leaves that it saw; empty where it rode not along.
    """

    agreed: bool
    active: int
    total_weight: float
    total_squared: float
    has_next: int
    nonfinite: int
    failed: int
    users: tuple[int, ...]
    late: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def used(self) -> tuple[bool, ...]:
        """For each reduced leaf, whether any rank used it."""
        return tuple(count > 0 for count in self.users)


def encode(layout: ControlLayout, word: ControlWord) -> npt.NDArray[np.float64]:
    """One rank's summand, shape `(layout.size,)`, float64.

    Example:
        >>> layout = ControlLayout(leaves=2, buckets=1)
        >>> word = ControlWord(fingerprint=7, weight=3.0, used=(True, False), late=(False,))
        >>> encode(layout, word)
        array([7., 1., 3., 9., 1., 0., 0., 0., 1., 0.])
    """
    vector = np.zeros(layout.size, dtype=np.float64)
    vector[: len(_SCALARS)] = (
        word.fingerprint,
        word.weight > 0.0,
        word.weight,
        word.weight * word.weight,
        word.has_next,
        word.nonfinite,
        word.failed,
    )
    start = len(_SCALARS)
    vector[start : start + layout.buckets] = word.late
    start += layout.buckets
    vector[start : start + layout.leaves] = word.used
    if layout.with_order and len(word.order):
        # Positions count from one: zero says that the leaf was not seen.
        seats = start + layout.leaves + np.asarray(word.order)
        vector[seats] = np.arange(1, len(word.order) + 1)
    return vector


def decode(
    layout: ControlLayout, total: npt.NDArray[np.float64], *, fingerprint: int, world_size: int
) -> ControlReport:
    """Reads the sum over ranks.

    Args:
        layout: the layout that all ranks encoded with.
        total: the summed vector, shape `(layout.size,)`, float64.
        fingerprint: this rank's own; every rank notices when one differs, because the sum then
            is not `world_size` times its own.
        world_size: number of ranks in the sum.
    """
    scalars = dict(zip(_SCALARS, total[: len(_SCALARS)].tolist(), strict=True))
    start = len(_SCALARS)
    late = total[start : start + layout.buckets]
    start += layout.buckets
    used = total[start : start + layout.leaves]
    seats = total[start + layout.leaves :]
    order = np.argsort(seats, kind="stable")[np.count_nonzero(seats == 0.0) :]
    return ControlReport(
        agreed=scalars["fingerprint"] == float(fingerprint) * world_size,
        active=int(scalars["active"]),
        total_weight=scalars["weight"],
        total_squared=scalars["weight_squared"],
        has_next=int(scalars["has_next"]),
        nonfinite=int(scalars["nonfinite"]),
        failed=int(scalars["failed"]),
        users=tuple(used.astype(np.int64).tolist()),
        late=tuple(np.flatnonzero(late).tolist()),
        order=tuple(order.tolist()),
    )
