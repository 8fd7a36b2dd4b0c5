"""Operators in graphs: `torch.ops.fddp.psum` and others, which tracers record.

[Note: order of collectives in graphs]
Collectives are matched by the order in which operators run, but compilers only respect data
dependencies. So the last result of each operator is a token, an empty tensor, which the next
operator in the graph takes as an argument. This chain fixes the order, and makes all calls
different, so none are merged. One chain runs over all communicators and through the backward part
of a graph. The operators are also registered with ordered effects, so that unused ones are kept.
Effects alone do not keep the order in inductor: torch 2.13 records the dependency under a name that
its scheduler never looks up.

[Note: calls as text]
The graph holds each call as JSON: ranks, leaves, buckets, roles, call site, and the position of the
call in the trace, which identifies the call that a derivative belongs to. Only the communicator is
a number, valid in this process. So graphs are readable and can run any number of times. Each run
creates a new `Call` from the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, enable_grad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fddp.collectives.calls import Call
from fddp.collectives.communicator import Communicator, communicator_by_id
from fddp.collectives.execute import on_inexact, run_eagerly
from fddp.collectives.operator_program import MOVES_ROWS, Operator, OperatorProgram
from fddp.core.entrance import entrance
from fddp.core.plan.leaf import LeafSpec
from fddp.native import extension
from fddp.native.torch_private import (
    SingleLevelFunction,
    are_functorch_transforms_active,
    below_autograd,
    enable_single_level_autograd_function,
    keep_ordered,
    set_fwd_grad_enabled,
)

Parsed: TypeAlias = tuple[OperatorProgram, tuple[str, ...], str, int | None]
"""Program, roles, call site and position within the graph."""

_KNOWN_CALLS = 1024

LIBRARY: Any = torch.library.Library("fddp", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Registrations of the operators; kept until the process ends."""


def emit(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Record a call in the graph that is being traced.

    Args:
        call: the call to run when the graph runs.
        leaves: tensors of the tracer; None for zeros.

    Returns:
        Results as of `execute.run_eagerly`.
    """
    operator = getattr(torch.ops.fddp, call.program.operator).default
    number(call.original)
    tracer = getattr(get_proxy_mode(), "tracer", None)
    before = getattr(tracer, "fddp_token", None)
    results: list[Tensor]
    # torch's higher-order operator for effects does not support lazy conjugation.
    plain = [None if leaf is None else leaf.resolve_conj().resolve_neg() for leaf in leaves]
    *results, token = operator(plain, before, call.communicator.number, call_to_json(call))
    if tracer is not None:
        tracer.fddp_token = token
    return results


def number(call: Call) -> None:
    """Number a call of the caller's code within the graph that is being recorded."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    if call.position is None and tracer is not None:
        call.position = getattr(tracer, "fddp_calls", 0)
        tracer.fddp_calls = call.position + 1


def call_to_json(call: Call) -> str:
    """A call as JSON; see [Note: calls as text]."""
    program = call.program
    return json.dumps(
        {
            "axes": program.place.axes,
            "root": program.root,
            "units": [(u.path, [*map(int, u.shape)], u.dtype, u.device) for u in program.units],
            "devices": [str(device) for device in program.devices],
            "buckets": program.buckets,
            "batch": [int(size) for size in program.batch],
            "tiled": program.tiled,
            "roles": call.roles,
            "site": str(call.site or ""),
            "position": call.original.position,
        }
    )


def call_of(operator: Operator, communicator: Communicator, text: str) -> Call:
    """A new call, from the JSON that `call_to_json` returned."""

    def make() -> Parsed:
        return _parse(operator, communicator, json.loads(text))

    key = (operator, text)
    program, roles, site, position = communicator.cached("texts", key, make, _KNOWN_CALLS)
    return Call(communicator, program, site or None, roles, position=position)


def _parse(operator: Operator, communicator: Communicator, fields: dict[str, Any]) -> Parsed:
    units = tuple(
        LeafSpec(path, tuple(shape), dtype, device=device)
        for path, shape, dtype, device in fields["units"]
    )
    program = OperatorProgram(
        operator,
        communicator.place(tuple(fields["axes"])),
        fields["root"],
        units,
        tuple(torch.device(device) for device in fields["devices"]),
        tuple(tuple(bucket) for bucket in fields["buckets"]),
        tuple(fields["batch"]),
        fields["tiled"],
    )
    return program, tuple(fields["roles"]), fields["site"], fields["position"]


# Registration: one `torch.library` operator for each operator of fddp.


def _token() -> Tensor:
    return torch.empty(0)


class FddpRecorded(SingleLevelFunction):
    """An operator in a graph that was recorded without derivatives and is differentiated now. It
    handles one level of transforms; torch calls it once for each level."""

    @staticmethod
    def forward(ctx: Any, call: Call, *leaves: Tensor | None) -> tuple[Tensor, ...]:
        program = call.program
        if program.operator == "pmax":  # it gathers in a graph, and amax follows it there
            program = replace(program, operator="all_gather")
        ctx.call = replace(call, program=program)
        ctx.set_materialize_grads(False)
        # torch has disabled both modes here, but outer levels of transforms need them.
        with enable_grad(), set_fwd_grad_enabled(True), below_autograd():
            return _recorded(call, *leaves)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return (None, *_derivative(ctx.call, ctx.call.transposed(), cotangents))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Any, ...]:
        return tuple(_derivative(ctx.call, ctx.call.tangent(), tangents))


def _derivative(call: Call, derived: Call, values: Sequence[Tensor | None]) -> list[Any]:
    return on_inexact(call.program, partial(_recorded, derived), values)


def _recorded(call: Call, *leaves: Tensor | None) -> tuple[Tensor, ...]:
    operator = getattr(torch.ops.fddp, call.program.operator).default
    *results, _ = operator(list(leaves), None, call.communicator.number, call_to_json(call))
    return tuple(results)


def _register(operator: Operator) -> None:
    name = f"fddp::{operator}"
    LIBRARY.define(
        f"{operator}(Tensor?[] leaves, Tensor? after, int communicator, str call) -> Tensor[]"
    )

    def found(communicator: int, call: str) -> Call:
        return call_of(operator, communicator_by_id(communicator), call)

    @entrance
    def execute(
        leaves: Sequence[Tensor | None], after: Tensor | None, communicator: int, call: str
    ) -> list[Tensor]:
        return [*run_eagerly(found(communicator, call), leaves), _token()]

    def shapes(
        leaves: Sequence[Tensor | None], after: Tensor | None, communicator: int, call: str
    ) -> list[Tensor]:
        program = found(communicator, call).program
        rows = (program.place.size,) if operator in MOVES_ROWS else ()
        forms = zip(program.units, program.dtypes, program.devices, strict=True)
        results = [torch.empty((*rows, *u.shape), dtype=d, device=on) for u, d, on in forms]
        return [*results, _token()]

    def differentiable(
        leaves: Sequence[Tensor | None], after: Tensor | None, communicator: int, call: str
    ) -> list[Tensor]:
        own = [leaf for leaf in leaves if leaf is not None]
        is_transformed = are_functorch_transforms_active()
        if is_transformed or extension.compiled.have_derivatives(own, torch.is_grad_enabled()):
            with enable_single_level_autograd_function():
                results = FddpRecorded.apply(found(communicator, call), *leaves)  # type: ignore[attr-defined]
            return [*results, _token()]
        with below_autograd():
            below: list[Tensor] = getattr(torch.ops.fddp, operator)(
                leaves, after, communicator, call
            )
        return below

    LIBRARY.impl(operator, execute, "CompositeExplicitAutograd")
    LIBRARY.impl(operator, differentiable, "Autograd")
    torch.library.register_fake(name, shapes, lib=LIBRARY)
    keep_ordered(name, LIBRARY)


for _operator in get_args(Operator):
    _register(_operator)
