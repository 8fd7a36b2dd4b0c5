"""Operators under dynamo: the tree is flattened in the trace, the rest is one call in the graph.

Dynamo rejects `torch.autograd.Function`s with a `jvp`, and can't trace the bookkeeping of a
communicator. So it records a call of `_in_graph` with leaves and constants. AOTAutograd, or the
backend, runs that function in Python and records the operators of `torch_library.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.autograd import apply_rules
from fddp.collectives.call_cache import CalledOperator, checked_spec, program_of, tiles, untiled
from fddp.collectives.calls import Call
from fddp.collectives.communicator import Communicator, communicator_by_id, communicator_of
from fddp.collectives.group_position import Axis, resolve_communicator
from fddp.core.plan.plan import BucketPlan
from fddp.native.torch_private import extract_stack
from fddp.runtime.inputs import outside_tracing
from fddp.telemetry.call_site import is_inside
from fddp.transport import Group, LoopbackGroup
from fddp.transport.mesh import Mesh
from fddp.tree.pytree import flatten


def operate(
    operator: CalledOperator,
    tree: Any,
    group: Group | Communicator | None,
    mesh: Mesh | None,
    axis: Axis,
    plan: BucketPlan | None,
    root: Any,
    tiled: bool,
) -> Any:
    """Run an operator in code that dynamo can trace."""
    label = group.label if isinstance(group, Communicator) else _open(group, mesh)
    _prepare()
    leaves, treedef = flatten(tree)
    present = [k for k, leaf in enumerate(leaves) if leaf is not None]
    plan_text = None if plan is None else _plan_text(plan)
    arguments = (operator, label, axis, root, tiled, plan_text)
    leaves_of = (treedef.paths, tuple(present), traced_site())
    results = _in_graph(arguments, *leaves_of, *[leaves[k] for k in present])
    whole: list[Any] = [None] * len(leaves)
    for position, result in zip(present, results, strict=True):
        whole[position] = result
    return treedef.unflatten(whole)


# Dynamo calls these functions while it traces, with constants, and treats results as constants.


def _open(group: Any, mesh: Any) -> str:
    if isinstance(group, LoopbackGroup):
        raise TypeError(
            "a group of fddp.loopback in a compiled function: dynamo keeps graphs for the process, "
            "and these ranks are threads of one; run the ranks as processes (torchrun)"
        )
    with outside_tracing():
        return communicator_of(group, mesh).label


def _prepare() -> None:
    torch.compiler.allow_in_graph(_in_graph)  # type: ignore[no-untyped-call]


def _plan_text(plan: BucketPlan) -> str:
    return plan.to_json()


def traced_site() -> str:
    """The innermost line of the code being traced that is neither fddp's nor torch's."""
    for frame in reversed(extract_stack()):
        if not is_inside(frame.filename, ()):
            return f"{frame.filename}:{frame.lineno}"
    return ""


# The attribute that `torch._dynamo.assume_constant_result` sets; that would load dynamo.
_FUNCTIONS: tuple[Any, ...] = (_open, _prepare, _plan_text, traced_site)
for _function in _FUNCTIONS:
    _function._dynamo_marked_constant = True


# Dynamo puts each argument into the graph, which holds constants and tensors only: no value types.
def _in_graph(
    arguments: tuple[Any, ...],
    paths: Sequence[str],
    present: Sequence[int],
    site: str,
    *leaves: Tensor,
) -> tuple[Tensor, ...]:
    """Run an operator on the leaves that are not None; called by a graph."""
    from fddp.collectives.torch_library import number

    operator, label, axis, root, tiled, plan_text = arguments
    communicator = communicator_by_id(int(label))
    communicator, place = resolve_communicator(operator, communicator, None, axis)
    try:
        plan = None if plan_text is None else BucketPlan.from_json(plan_text)
        spec = checked_spec(operator, place, plan, root, tiled)
        leaves = tuple(tiles(spec, list(leaves), [paths[k] for k in present]))
        program = program_of(
            communicator.cap_bytes, spec, paths, present, [*map(example_of, leaves)]
        )
    except Exception as error:
        handshake.abort_handshake(communicator, place, f"{operator}, called at {site}", error)
    call = Call(communicator, program, site, splits=True)
    number(call)
    results = apply_rules(operator, call, leaves)
    return tuple(untiled(spec, results))


def example_of(leaf: Any) -> Any:
    """Tensor with the metadata of a leaf and integer sizes. A program is for fixed shapes, so
    symbolic sizes of dynamo are specialised to constants here."""
    if not (isinstance(leaf, Tensor) and leaf.layout is torch.strided):
        return leaf
    shape = [int(size) for size in leaf.shape]
    with outside_tracing():
        return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(shape)
