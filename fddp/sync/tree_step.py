"""Steps on trees that exist: gradients, or shards to gather."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.schedule.schedule import Result, Schedule
from fddp.runtime.contributions import Contributions
from fddp.runtime.inputs import (
    check_no_derivatives,
    check_no_transform,
    check_writable,
    checked_weight,
    matched_leaves,
    matched_shards,
)
from fddp.runtime.step import Step
from fddp.runtime.step_info import make_info
from fddp.runtime.virtual_sums import VirtualSums
from fddp.sync.engine import Engine
from fddp.sync.virtual_batches import gathered_trees
from fddp.tree.foreign import ForeignTreeDef
from fddp.tree.pytree import TreeDef


def sync_tree(
    engine: Engine,
    method: Method,
    grads: Any,
    weight: float | Sequence[float],
    *,
    with_info: bool = False,
    state: Any = None,
) -> Any:
    """Return the tree of results; in a tuple, if the new state or an info follows."""
    start_s = time.perf_counter()
    outcome = engine.run(
        method,
        lambda step: begin_tree(engine, step, method, grads, weight, state),
        with_stats=with_info,
    )
    own, treedef = outcome.begin_result
    in_place = method is Method.REDUCE
    tree = treedef.unflatten(_written(own, outcome.leaves) if in_place else outcome.leaves)
    states = (outcome.step.hook_states,) if method is Method.UPDATE else ()
    infos = (make_info(outcome, (start_s, start_s)),) if with_info else ()
    return (tree, *states, *infos) if states or infos else tree


def begin_tree(
    engine: Engine,
    step: Step,
    method: Method,
    grads: Any,
    weight: float | Sequence[float],
    state: Any,
) -> tuple[Sequence[Tensor | None], TreeDef]:
    """Pass this rank's gradients to a step. Return its leaves, and the tree's structure."""
    program = step.program
    sums: VirtualSums | None = None
    _check_method(method, program.schedule)
    if state is not None or step.code.hook is not None:
        step.take_states(engine.checked_states(state, "update(grads, state)"))
    if program.schedule.virtual is not None:
        sums, own, last_weight, treedef = gathered_trees(step, grads, weight)
    else:
        own, treedef = matched_leaves(grads, program, "gradients")
        if isinstance(treedef, ForeignTreeDef):
            # Other ranks may be in `value_and_grad`; JAX differentiates before the step.
            step.leave_method()
        check_no_derivatives(own, program, "gradients", graphs=True)
        if method is Method.REDUCE:
            check_writable(own, treedef, program)
        last_weight = checked_weight(weight)
    step.begin(Contributions(own, last_weight), own, earlier=sums)
    return own, treedef


def begin_shards(step: Step, shards: Any) -> TreeDef:
    """Pass this rank's shards to an all-gather. Return the structure of the tree."""
    check_no_transform(Method.ALL_GATHER.text)
    own, treedef = matched_shards(shards, step.program)
    check_no_derivatives(own, step.program, "shards", graphs=False)
    step.begin(Contributions(own, 1.0), own)
    return treedef


def _check_method(method: Method, schedule: Schedule) -> None:
    """Check that a method fits the schedule; see `check_fit`."""
    if method in (Method.REDUCE_SCATTER, Method.ALL_GATHER):
        check_fit(method.text, "sharded_mean", Method.CALL.text, schedule)
    else:
        check_fit(method.text, "replicated_mean", Method.REDUCE_SCATTER.text, schedule)


def check_fit(call: str, result: Result, instead: str, schedule: Schedule) -> None:
    """Check that a call fits the schedule, and that no `torch.func` transform is active."""
    check_no_transform(call)
    if schedule.result != result:
        raise ValueError(
            f"{call} needs a GradSync whose schedule gives a {result}; this one's gives a "
            f"{schedule.result}: use {instead}, or build it with another algorithm"
        )


def _written(own: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Write results into the caller's tensors. Return these, and results for missing ones."""
    pairs = list(zip(own, results, strict=True))
    with torch.no_grad():
        for target, result in pairs:
            if target is not None and result is not None:
                target.copy_(result)
    return [result if target is None or result is None else target for target, result in pairs]
