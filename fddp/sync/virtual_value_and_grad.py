"""Loss functions over virtual ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fddp.runtime.step import Step
from fddp.runtime.virtual_sums import VirtualSums
from fddp.sync.value_and_grad import Computed, ValueAndGrad
from fddp.sync.virtual_batches import arguments_of, check_batches


@dataclass(frozen=True, eq=False, repr=False)
class VirtualValueAndGrad(ValueAndGrad):
    """A `ValueAndGrad` of a `GradSync` with virtual ranks.

    Arguments made by `GradSync.virtual_batches` have one value for each virtual rank that this rank
    carries. The loss function is called once for each, in ascending order, on its own values. The
    loss of a call, and its aux, is a tuple with one for each of these virtual ranks, None where an
    input was `EXHAUSTED`. Weights are those of virtual ranks.

    Raises of a call:
        TypeError: there are no inputs of virtual ranks, or `accumulated` was passed.
        ValueError: the inputs are of other virtual ranks than this rank carries.

    Example:
        >>> import fddp, torch
        >>> def train(group):
        ...     params = {"w": torch.ones(())}
        ...     with fddp.GradSync(params, group=group, virtual_ranks=3) as sync:
        ...         step = sync.value_and_grad(lambda p, x: p["w"] * x)
        ...         losses, grads = step(params, sync.virtual_batches(lambda v: 2.0 * v))
        ...         return [x.item() for x in losses], grads["w"].item()
        >>> fddp.loopback(1, train)
        [([0.0, 2.0, 4.0], 2.0)]
        >>> fddp.loopback(2, train)
        [([0.0], 2.0), ([2.0, 4.0], 2.0)]
    """

    def _compute(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        accumulated: tuple[Any, float] | None,
        sums: VirtualSums | None = None,
    ) -> Computed:
        if accumulated is not None:
            raise TypeError(
                "accumulated gradients are a sum of some virtual ranks, in another order than "
                "theirs; pass one batch for each virtual rank, and raise virtual_ranks for more"
            )
        ranks = step.program.carried
        check_batches([*args, *kwargs.values()], ranks)
        sums = VirtualSums(step.program, step.pool, step.devices)
        computed = []
        for number in ranks:
            own_args, own_kwargs = arguments_of(number, args, kwargs)
            computed.append(super()._compute(step, own_args, own_kwargs, None, sums))
        last = computed[-1]
        losses, auxs = zip(*((each.loss, each.aux) for each in computed), strict=True)
        return last._replace(loss=losses, aux=auxs)
