"""Operators as `torch.autograd.Function`s. Every derivative rule is built from operators again, so
derivatives of all orders exist, in forward and reverse mode and under `vmap`.

[Note: forward mode twice]
Plain operations inside the `jvp` of a `torch.autograd.Function` carry no tangents of an outer
forward-mode level: torch (2.13) silently drops them. So each `jvp` here only applies
`torch.autograd.Function`s.
"""

# torch calls these methods with positional arguments, so their signatures differ from the base's.
# mypy: disable-error-code="override,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fddp.collectives.calls import Call
from fddp.collectives.execute import on_inexact, run_eagerly
from fddp.collectives.operator_program import GIVES_ROWS, TAKES_ROWS
from fddp.core.entrance import entrance
from fddp.native import extension
from fddp.native.torch_private import are_functorch_transforms_active, dispatch_depth
from fddp.native.untraced import untraced


class _Operator(torch.autograd.Function):
    """Base of functions of a call and its leaves."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.call = inputs[0]

    @classmethod
    def vmap(
        cls, info: Any, in_dims: tuple[Any, ...], call: Call, *leaves: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        operator = call.program.operator
        batched = _batched(leaves, in_dims[1:], info.batch_size, int(operator in TAKES_ROWS))
        results = cls.apply(call.batched(info.batch_size), *batched)
        return results, (int(operator in GIVES_ROWS),) * len(results)


class FddpLinear(_Operator):
    """All operators except `pmax`. They are linear: tangents go through the same operator,
    cotangents through its transpose. None stands for zeros, which are communicated: a rank whose
    result was not used still takes part in the collective."""

    @staticmethod
    def forward(call: Call, *leaves: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(run(call, leaves))

    @staticmethod
    @entrance
    @untraced()
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return (None, *_derivative(ctx.call, ctx.call.transposed(), cotangents))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(_derivative(ctx.call, ctx.call.tangent(), tangents))


class FddpMaximum(_Operator):
    """`pmax`. Returns the maxima, followed by one tensor for each differentiable unit: the share of
    the derivative that belongs to this rank's elements."""

    @staticmethod
    def forward(call: Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        rows = run(call, leaves)
        largest = [row.amax(0) for row in rows]
        shares = [_share(rows[k], largest[k], leaves[k]) for k in call.program.inexact]
        return (*largest, *shares)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _Operator.setup_context(ctx, inputs, output)
        shares = output[len(ctx.call.program.units) :]
        ctx.mark_non_differentiable(*shares)
        ctx.save_for_backward(*shares)
        ctx.save_for_forward(*shares)

    @staticmethod
    @entrance
    @untraced()
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        totals = _derivative(call, call.derived(call.program.summing, "backward"), cotangents)
        for k, share in zip(call.program.inexact, ctx.saved_tensors, strict=True):
            totals[k] = share * totals[k]
        return (None, *totals)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        own = list(tangents)
        for k, share in zip(call.program.inexact, ctx.saved_tensors, strict=True):
            own[k] = None if own[k] is None else FddpScaled.apply(share, own[k])
        results = _derivative(call, call.derived(call.program.summing, "jvp"), own)
        return (*results, *([None] * len(ctx.saved_tensors)))


class FddpMeanOnBackward(_Operator):
    """`sync_on_backward`: the identity in forward, the mean over ranks in backward."""

    @staticmethod
    def forward(call: Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    @entrance
    @untraced()
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        averaging = ctx.call.derived(ctx.call.program.averaging, "backward")
        return (None, *_derivative(ctx.call, averaging, cotangents))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else FddpPassed.apply(t) for t in tangents)


class FddpScaled(torch.autograd.Function):
    """Product with a factor that is not differentiated; see [Note: forward mode twice]."""

    @staticmethod
    def forward(factor: Tensor, value: Tensor) -> Tensor:
        return factor * value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    @untraced()
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor]:
        (factor,) = ctx.saved_tensors
        return None, FddpScaled.apply(factor, cotangent)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> Tensor:
        (factor,) = ctx.saved_tensors
        return FddpScaled.apply(factor, tangent)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], factor: Tensor, value: Tensor
    ) -> tuple[Tensor, int]:
        return FddpScaled.apply(*_batched((factor, value), in_dims, info.batch_size, 0)), 0


class FddpPassed(torch.autograd.Function):
    """View of the whole tensor; see [Note: forward mode twice]."""

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    @untraced()
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return FddpPassed.apply(tangent)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], value: Tensor) -> tuple[Tensor, Any]:
        return FddpPassed.apply(value), in_dims[0]


def has_rules(leaves: Sequence[Any]) -> bool:
    """Return True if the leaves need autograd or functorch rules and are not just plain tensors."""
    return (
        are_functorch_transforms_active()
        or extension.compiled.have_derivatives(leaves, torch.is_grad_enabled())
        or extension.compiled.first_without_memory(leaves) >= 0
    )


def apply_rules(operator: str, call: Call, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results of an operator on leaves that need autograd or functorch rules."""
    if operator == "sync_on_backward":
        return FddpMeanOnBackward.apply(call, *leaves)  # type: ignore[no-any-return]
    if operator == "pmax":
        return FddpMaximum.apply(call, *leaves)[: len(leaves)]  # type: ignore[no-any-return]
    return FddpLinear.apply(call, *leaves)  # type: ignore[no-any-return]


def run(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Run a call on plain tensors, or record it if a tracer is active; as `run_eagerly`."""
    if dispatch_depth():
        from fddp.collectives import torch_library  # registers operators; only tracing needs it

        return torch_library.emit(call, leaves)
    return run_eagerly(call, leaves)


def _derivative(call: Call, derived: Call, values: Sequence[Tensor | None]) -> list[Any]:
    return on_inexact(call.program, partial(FddpLinear.apply, derived), values)


def _batched(
    leaves: Sequence[Tensor | None], dims: Sequence[int | None], size: int, at: int
) -> list[Tensor | None]:
    """Leaves with the batch dimension at `at`. Unbatched leaves are expanded, because a leaf may be
    batched on one rank and not on another, and shapes must agree."""
    moved: list[Tensor | None] = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if leaf is None:
            moved.append(None)
        elif dim is None:
            leaf = leaf.unsqueeze(at)
            moved.append(leaf.expand(*leaf.shape[:at], size, *leaf.shape[at + 1 :]))
        else:
            moved.append(leaf.movedim(dim, at))
    return moved


def _share(row: Tensor, largest: Tensor, own: Tensor) -> Tensor:
    """Share of the derivative for each element: split equally among the ranks that attain the
    maximum. NaN counts as the largest value, and all NaNs attain it."""
    attained = (row == largest) | (row.isnan() & largest.isnan())
    mine = (own == largest) | (own.isnan() & largest.isnan())
    return mine.to(own.dtype) / attained.sum(0)
