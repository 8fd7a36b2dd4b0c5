"""Weighted means: a factor before the collective, and one correction after it.

A rank contributes `weight * gradient / ranks`, and the reduced sum is multiplied by
`ranks / total_weight`. While the weights of all ranks are 1, the factor after is 1, and the
arithmetic is that of DistributedDataParallel. A schedule may also leave the division by the number
of ranks to the collective ("average") or to the correction after it ("after").

Sums are of weighted gradients, so a dtype bounds the weights that it can serve (`weight_problem`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Mean weights for which a sum in float16 neither overflows nor loses precision, and those for wider
# dtypes, whose range the weights share with the gradients.
_NARROW = (1.0 / 64.0, 1.0)
_WIDE = (2.0**-40, 2.0**40)


@dataclass(frozen=True)
class WeightScale:
    """Factors of a weighted mean over ranks.

    Attributes:
        ranks: total weight that needs no correction: the number of ranks.
        scaling: place of the division by the number of ranks, as in `Schedule.scaling`.

    Example:
        >>> scale = WeightScale(2)
        >>> scale.before(1.0), scale.after(2.0)
        (0.5, 1.0)
    """

    ranks: float
    scaling: Literal["before", "after", "average"] = "before"

    def before(self, weight: float) -> float:
        """Factor on a rank's gradients before the reduction."""
        return weight / self.ranks if self.scaling == "before" else weight

    def after(self, total_weight: float) -> float:
        """Factor on the reduced result. Exactly 1.0 if the total is the number of ranks, unless
        `scaling` is "after"."""
        return (1.0 if self.scaling == "after" else self.ranks) / total_weight


def weight_problem(mean_weight: float, narrow: str = "") -> str | None:
    """Describe why weights are out of proportion for their sums, with the way out, or return None.

    Args:
        mean_weight: mean of the weights above zero.
        narrow: what sums in float16, for the text; "" if nothing does.

    Example:
        >>> weight_problem(512.0) is None
        True
        >>> print(weight_problem(512.0, "bucket 0"))
        the mean weight is 512.0, and bucket 0 is summed in float16, which serves mean weights \
from 1/64 to 1; sum in float32 (reduce_dtype=torch.float32), or divide all weights by one number, \
such as the largest that occurs
    """
    lowest, highest = _NARROW if narrow else _WIDE
    if lowest <= mean_weight <= highest:
        return None
    if narrow:
        return (
            f"the mean weight is {mean_weight}, and {narrow} is summed in float16, which serves "
            f"mean weights from 1/64 to 1; sum in float32 (reduce_dtype=torch.float32), or divide "
            f"all weights by one number, such as the largest that occurs"
        )
    return (
        f"the mean weight is {mean_weight}, and sums serve mean weights from 2**-40 to 2**40; "
        f"divide all weights by one number, such as the largest that occurs"
    )
