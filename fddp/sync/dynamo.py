"""Steps under dynamo: the tree is flattened in the trace, the rest is one call in the graph.

AOTAutograd, or the backend, runs that call in Python, and records the operators of
`torch_library.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fddp.collectives.dynamo import traced_site
from fddp.core.protocol.calls import Method
from fddp.native.torch_private import peek_interpreter_stack
from fddp.native.untraced import untraced
from fddp.sync.engine import Engine
from fddp.telemetry.step_info import GraphInfo
from fddp.transport import LoopbackGroup
from fddp.tree.pytree import TreeDef, flatten

INSTEAD_IN_A_GRAPH = (
    "a graph can have sync(grads) and steps of sync.value_and_grad(loss_fn), without a hook that "
    "keeps state, accumulated=, virtual ranks, shards, sparse leaves, nonfinite='skip', EXHAUSTED, "
    "ranks that are threads, or a transform of torch.func around it; take other steps outside of "
    "the compiled function"
)
"""Advice in the error of torch.compile with `fullgraph=True`."""


@untraced(INSTEAD_IN_A_GRAPH)
def break_graph(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside of the graph, in eager mode."""
    return call(*args, **kwargs)


def sync_tree(engine: Engine, method: Method, grads: Any, weight: Any, *, with_info: bool) -> Any:
    """Record the mean over ranks of a tree of gradients, as `tree_step.sync_tree`."""
    leaves, treedef = flatten(grads)
    tree, *info = sync_leaves(engine, method, leaves, treedef, weight, with_info=with_info)
    return (tree, *info) if info else tree


def sync_leaves(
    engine: Engine,
    method: Method,
    leaves: Sequence[Tensor | None],
    treedef: TreeDef,
    weight: Any,
    *,
    with_info: bool,
) -> tuple[Any, ...]:
    """Record the mean of leaves, and return its tree, and an info if that is wanted."""
    label = _registered(engine, engine.graph_label)
    _prepare()
    reduced = _reduced(engine)
    present = [k for k, leaf in enumerate(leaves) if leaf is not None]
    step = (label, int(method), treedef.paths, tuple(present), with_info, traced_site())
    results = _in_graph(step, float(weight), *[leaf for leaf in leaves if leaf is not None])
    whole: list[Any] = [None] * len(leaves)
    given = [k for k, leaf in enumerate(leaves) if leaf is not None or k in reduced]
    for position, result in zip(given, results, strict=False):
        whole[position] = result
    tree = treedef.unflatten(whole)
    return (tree, GraphInfo(*results[-1].unbind())) if with_info else (tree,)


def is_differentiable(leaf: Any) -> bool:
    """Return True for tensors that can have a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


# Dynamo calls these functions while it traces, with constants, and treats results as constants.


def _registered(engine: Engine, label: str) -> str:
    from fddp.sync.torch_library import steps_of

    steps_of(engine)
    return label


def fits(engine: Engine, label: str) -> bool:
    """Return True if a graph can have a step of an engine with this plan and hook, here."""
    bound, schedule = engine.setup.code.hook, engine.schedule
    return (
        schedule.virtual is None
        and schedule.result == "replicated_mean"
        and engine.terms.nonfinite != "skip"
        and (bound is None or not bound.stateful)
        and not any(bucket.sparse for bucket in schedule.plan.buckets)
        and not isinstance(engine.group, LoopbackGroup)
        and peek_interpreter_stack() is None  # where results would have no derivatives
    )


def _reduced(engine: Engine) -> tuple[int, ...]:
    return engine.program.plan.reduced


def _prepare() -> None:
    torch.compiler.allow_in_graph(_in_graph)  # type: ignore[no-untyped-call]


# The attribute that `torch._dynamo.assume_constant_result` sets; that would load dynamo.
_FUNCTIONS: tuple[Any, ...] = (_registered, _reduced, _prepare, fits)
for _function in _FUNCTIONS:
    _function._dynamo_marked_constant = True


# Dynamo puts each argument into the graph, which holds constants and tensors only: no value types.
def _in_graph(step: tuple[Any, ...], weight: float, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Record a step on the leaves that are not None; called by a graph."""
    from fddp.sync.torch_library import emit

    label, method, paths, present, with_info, site = step
    whole: list[Tensor | None] = [None] * len(paths)
    for position, leaf in zip(present, leaves, strict=True):
        whole[position] = leaf
    results = emit(label, Method(method), paths, whole, weight, with_info=with_info, site=site)
    return tuple(result for result in results if result is not None)
