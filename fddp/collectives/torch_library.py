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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, enable_grad
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fddp.collectives.calls import Call
from fddp.collectives.communicator import Communicator, communicator_by_id
from fddp.collectives.execute import finish_buckets, on_inexact, run_eagerly, start_bucket
from fddp.collectives.operator_program import MOVES_ROWS, Operator, OperatorProgram
from fddp.collectives.torch_private import keep_place
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
    number(call.original)
    program, text = call.program, call_to_json(call)
    is_whole = program.place.size == 1 or len(program.buckets) < 2 or not call.original.splits
    if is_whole or _is_differentiated(leaves):
        return record(program.operator, leaves, call.communicator.number, text)
    about = call.communicator.number, program.operator, text
    for bucket, members in enumerate(program.buckets):
        record_start("start_bucket", [leaves[k] for k in members], bucket, *about)
    return record("finish_buckets", [], *about)


def record(operator: str, leaves: Sequence[Tensor | None], *given: Any) -> list[Tensor]:
    """Call an operator of `LIBRARY` behind those that the graph has already.

    Args:
        operator: its name. It takes `leaves`, the token of the call before, and `given`.
        leaves: tensors of the tracer; None for zeros.

    Returns:
        Its results, without the token.
    """
    tracer = getattr(get_proxy_mode(), "tracer", None)
    before = getattr(tracer, "fddp_token", None)
    results: list[Tensor]
    # torch's higher-order operator for effects does not support lazy conjugation.
    plain = [None if leaf is None else leaf.resolve_conj().resolve_neg() for leaf in leaves]
    *results, token = getattr(torch.ops.fddp, operator).default(plain, before, *given)
    if tracer is not None:
        tracer.fddp_token = token
    return results


def record_start(operator: str, leaves: Sequence[Tensor | None], *given: Any) -> None:
    """Record an operator that starts a collective on `leaves`, as `record`, and move it up, behind
    the operation that gives its last input. It stays behind other collectives."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    if tracer is None:
        record(operator, leaves, *given)
        return
    keep_place(operator)
    place = last = next(iter(reversed(tracer.graph.nodes)))
    record(operator, leaves, *given)
    nodes = []
    node = last.next
    while node.op != "root":
        nodes.append(node)
        node = node.next
    inputs = {source for node in nodes for source in node.all_input_nodes}
    while place not in inputs and not _communicates(place) and place.op != "root":
        place = place.prev
    backward = place.meta.get("autograd_backward", False)
    for node in nodes:
        place.append(node)
        # Checkpoints are recomputed in one region of the graph without other nodes.
        node.meta["autograd_backward"] = backward
        place = node


def _communicates(node: Node) -> bool:
    """Return True for collectives, of whatever library, and for what may contain one."""
    namespace = getattr(node.target, "namespace", "")
    return "c10d" in namespace or namespace in ("fddp", "higher_order")


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


def new_token() -> Tensor:
    """The last result of each operator; see [Note: order of collectives in graphs]."""
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


def _is_differentiated(leaves: Sequence[Tensor | None]) -> bool:
    own = [leaf for leaf in leaves if leaf is not None]
    is_transformed = are_functorch_transforms_active()
    return is_transformed or extension.compiled.have_derivatives(own, torch.is_grad_enabled())


def _shapes(call: Call) -> list[Tensor]:
    """Empty results of a call, with its token."""
    program = call.program
    rows = (program.place.size,) if program.operator in MOVES_ROWS else ()
    forms = zip(program.units, program.dtypes, program.devices, strict=True)
    return [
        *(torch.empty((*rows, *u.shape), dtype=d, device=on) for u, d, on in forms),
        new_token(),
    ]


def register_kernels(name: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Register what an operator of `LIBRARY` does, and the shapes of its results. Graphs keep its
    calls, in order."""
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fddp::{name}", shapes, lib=LIBRARY)
    keep_ordered(f"fddp::{name}", LIBRARY)


def _register(operator: Operator) -> None:
    LIBRARY.define(
        f"{operator}(Tensor?[] leaves, Tensor? after, int communicator, str call) -> Tensor[]"
    )

    def found(communicator: int, call: str) -> Call:
        return call_of(operator, communicator_by_id(communicator), call)

    @entrance
    def execute(
        leaves: Sequence[Tensor | None], after: Tensor | None, communicator: int, call: str
    ) -> list[Tensor]:
        return [*run_eagerly(found(communicator, call), leaves), new_token()]

    def shapes(
        leaves: Sequence[Tensor | None], after: Tensor | None, communicator: int, call: str
    ) -> list[Tensor]:
        return _shapes(found(communicator, call))

    def differentiable(
        leaves: Sequence[Tensor | None], after: Tensor | None, communicator: int, call: str
    ) -> list[Tensor]:
        if _is_differentiated(leaves):
            with enable_single_level_autograd_function():
                results = FddpRecorded.apply(found(communicator, call), *leaves)  # type: ignore[attr-defined]
            return [*results, new_token()]
        with below_autograd():
            below: list[Tensor] = getattr(torch.ops.fddp, operator)(
                leaves, after, communicator, call
            )
        return below

    register_kernels(operator, execute, shapes)
    LIBRARY.impl(operator, differentiable, "Autograd")


for _operator in get_args(Operator):
    _register(_operator)


# An operator in parts, which are not differentiated.


def _split_call(communicator: int, operator: Operator, call: str) -> Call:
    return call_of(operator, communicator_by_id(communicator), call)


@entrance
def _start_bucket(
    leaves: Sequence[Tensor | None], after: Tensor | None, bucket: int, *call: Any
) -> list[Tensor]:
    start_bucket(_split_call(*call), bucket, leaves)
    return [new_token()]


@entrance
def _finish_buckets(
    leaves: Sequence[Tensor | None], after: Tensor | None, *call: Any
) -> list[Tensor]:
    return [*finish_buckets(_split_call(*call)), new_token()]


_CALL = "int communicator, str operator, str call"
LIBRARY.define(f"start_bucket(Tensor?[] leaves, Tensor? after, int bucket, {_CALL}) -> Tensor[]")
LIBRARY.define(f"finish_buckets(Tensor?[] leaves, Tensor? after, {_CALL}) -> Tensor[]")
register_kernels("start_bucket", _start_bucket, lambda *_: [new_token()])
register_kernels("finish_buckets", _finish_buckets, lambda _, __, *c: _shapes(_split_call(*c)))
