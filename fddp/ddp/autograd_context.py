"""Gradients of a wrapped module in a context of distributed autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fddp.ddp.parameters import HookedParameters
from fddp.native import extension
from fddp.runtime.contributions import TreeContributions
from fddp.runtime.step import Step

SKIP_IN_CONTEXT = (
    "nonfinite='skip' can't skip a step whose gradients are in a context of distributed autograd: "
    "gradients can't be removed from there, and the optimizer would use each rank's own; build the "
    "wrapper with nonfinite='raise'"
)


def begin_in_context(
    step: Step, parameters: HookedParameters, context: int
) -> Callable[[Sequence[Tensor | None]], None]:
    """Begin a step over the gradients in a context, after backward. Return the writer of results.

    It writes results over this rank's gradients in the context, and adds those that this rank does
    not have. An undefined gradient stands for zeros.
    """
    from torch.distributed.autograd import get_gradients

    params, used = parameters.leaves, parameters.hooks.used()
    grads = get_gradients(context)
    own = [grads.get(param) for param in params]
    rows = zip(own, used, params, strict=True)
    filled = [torch.zeros_like(p) if flag and grad is None else grad for grad, flag, p in rows]
    step.begin(TreeContributions(step.program, filled, 1.0), params)
    return partial(_write, context, params, own)


def _write(
    context: int,
    params: Sequence[Tensor],
    own: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
) -> None:
    new = []
    for param, grad, result in zip(params, own, results, strict=True):
        if result is not None:
            if grad is None:
                new.append((param, result))
            else:
                grad.copy_(result)
    extension.compiled.add_to_context(context, new)
