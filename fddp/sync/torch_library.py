"""Steps in graphs: operators that send the buckets of a step, and one that finishes it.

[Note: steps in graphs]
A step in a graph is one call of the operator `start_gradients` for each bucket, in the order of the
schedule, and one of `finish_step`, which returns the means. When the graph runs, they take a step
of the `GradSync` with the plan, schedule, control word and errors of eager mode. Ranks that run a
graph and ranks that do not may meet in one step.

Operations are recorded in the order in which eager mode would run them, which has all gradients
before the first start. Each start is moved up, behind the operation that gives its last input.
Starts do not pass each other or other collectives, and nothing else is moved.

Where a plan is to be rebuilt, the first graph rebuilds it, in the order in which it gives the
gradients. Ranks do not communicate for this. If one of them has another order, it has another
schedule, which all ranks notice in their first step.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fddp.collectives.dynamo import example_of
from fddp.collectives.torch_library import (
    LIBRARY,
    new_token,
    record,
    record_start,
    register_kernels,
)
from fddp.core.entrance import entrance
from fddp.core.plan.leaf import LeafSpec
from fddp.core.protocol.calls import Method
from fddp.errors import ClosedError, InternalError, TreeMismatchError
from fddp.native.layout import contiguous_strides
from fddp.native.torch_private import node_of
from fddp.runtime.contributions import ArrivingContributions
from fddp.runtime.finish import send
from fddp.runtime.inputs import checked_weight, misfit, outside_inference_mode, outside_tracing
from fddp.runtime.step import Step
from fddp.runtime.step_info import make_info
from fddp.sync.engine import Engine
from fddp.tree.pytree import mismatch

_KNOWN_CALLS = 4096

_of_labels: weakref.WeakValueDictionary[str, GraphSteps] = weakref.WeakValueDictionary()
_of_engines: weakref.WeakKeyDictionary[Engine, GraphSteps] = weakref.WeakKeyDictionary()


class GraphSteps:
    """Steps of one engine that graphs take."""

    # The step under way, from its first bucket until it is finished; and its gradients, with the
    # time of the first ones.
    step: Step | None = None
    given: ArrivingContributions | None = None
    begun_s: float = 0.0

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
        """The engine, which the graph does not keep alive."""
        engine = self._engine()
        if engine is None:
            raise ClosedError("the GradSync of this graph is gone; compile the function anew")
        return engine

    def start(self, grads: Sequence[Tensor | None], weight: float, call: dict[str, Any]) -> None:
        """Send a bucket; the first one of a step opens it. Errors are raised by `finish`."""
        if call["position"] == 0:
            self._open(weight, call)
        step, given = self.step, self.given
        if step is None or given is None:
            raise InternalError(f"bucket {call['bucket']} of a graph was started in no step")
        bucket = step.program.schedule.sequence[call["position"]]
        members = step.program.plan.buckets[bucket].leaves
        given.give(members, grads)
        if not step.code.is_on_cpu:
            by_leaf = dict(zip(members, grads, strict=True))
            step.note_devices([*map(by_leaf.get, range(len(step.program.plan.leaves)))])
        step.executor(bucket)
        if call["position"] == len(step.program.schedule.sequence) - 1:
            send(step)
        given.own(members)

    def _open(self, weight: float, call: dict[str, Any]) -> None:
        engine, left = self.engine, self.step
        if left is not None:
            error = RuntimeError("a graph was interrupted between the buckets of a step")
            engine.end_interrupted(left.number, error)
        self.begun_s = time.perf_counter()
        step = engine.open(Method(call["method"]), with_stats=call["with_info"])
        count = len(step.program.plan.leaves)
        given = ArrivingContributions(count, 0.0)
        try:
            given = ArrivingContributions(count, checked_weight(weight))
            step.begin(given, [None] * count)  # each bucket brings its devices
        except Exception as error:
            engine.fail(step, error)
        step.prepare()
        self.step, self.given = step, given

    def finish(self, call: dict[str, Any]) -> list[Tensor]:
        """Finish the step. Return the means of its leaves, zeros for one that no rank has used."""
        step, self.step, self.given = self.step, None, None
        if step is None:
            raise InternalError("a graph finished a step that it had not begun")
        end_s = time.perf_counter()
        try:
            outcome = self.engine.finish(step)
        except BaseException as error:
            self.engine.end_interrupted(step.number, error)
            raise
        results: list[Tensor] = []
        for leaf, device in zip(call["leaves"], call["devices"], strict=True):
            result = outcome.leaves[leaf]
            if result is None:
                result = _empty(step.program.plan.leaves[leaf], device).zero_()
            results.append(result)
        if not step.record_time:
            return results
        info = make_info(outcome, (self.begun_s, end_s))
        self.engine.note_info(info)
        numbers = info.step, info.active, info.total_weight, info.grad_norm, info.all_finite
        return [*results, torch.tensor(numbers, dtype=torch.float64)]


def _empty(spec: LeafSpec, device: str) -> Tensor:
    """Memory for the mean of a leaf."""
    strides = spec.strides or contiguous_strides(spec.shape)
    dtype = getattr(torch, spec.dtype)
    return torch.empty_strided(spec.shape, strides, dtype=dtype, device=device)


@lru_cache(maxsize=_KNOWN_CALLS)
def _parsed(call: str) -> dict[str, Any]:
    """A call from its text, not to be changed."""
    parsed: dict[str, Any] = json.loads(call)
    return parsed


def steps_of(engine: Engine) -> GraphSteps:
    """Steps of an engine that graphs take, which they find by its label."""
    if engine not in _of_engines:
        _of_engines[engine] = GraphSteps(engine)
    found = _of_labels[engine.graph_label] = _of_engines[engine]
    return found


def _steps(label: str) -> GraphSteps:
    found = _of_labels.get(label)
    if found is None:
        raise ClosedError("the GradSync of this graph is gone; compile the function anew")
    if found.engine.graph_label != label:
        raise ClosedError(
            "the plan or hook of this GradSync was replaced after this graph was made; compile "
            "the function anew"
        )
    return found


# Recording


def emit(
    label: str,
    method: Method,
    paths: Sequence[str],
    leaves: Sequence[Tensor | None],
    weight: float,
    *,
    with_info: bool,
    site: str,
) -> list[Tensor | None]:
    """Record a step in the graph that is being traced.

    Args:
        label: label of the engine.
        method: the call that the step belongs to.
        paths, leaves: the tree of gradients, tensors of the tracer.
        weight: weight of this rank, which may be symbolic.
        with_info: True to also return the numbers of the info.
        site: the caller's line.

    Returns:
        The means by leaf; this rank's own gradients for leaves that are not reduced.

    Raises:
        TreeMismatchError: the tree does not match the plan; on all ranks.
    """
    engine = _steps(label).engine
    problem = _problem(engine, paths, leaves)
    if problem is not None:
        with outside_tracing():
            engine.fail_step(problem)  # raises it here, and a PeerError on the other ranks
    tracer = getattr(get_proxy_mode(), "tracer", None)
    if tracer is not None and engine.program.control.with_order:
        places = [(node_of(leaf, tracer), k) for k, leaf in enumerate(leaves) if leaf is not None]
        order = [leaf for _, leaf in sorted(places) if leaf in engine.program.plan.bucket_of]
        missing = [leaf for leaf in engine.program.plan.reduced if leaf not in order]
        with outside_tracing():
            engine.set_plan(engine.terms.rebuilt(engine.program.plan, [*order, *missing]))
    program = engine.program
    call = {"method": int(method), "with_info": with_info, "site": site}
    for position, bucket in enumerate(program.schedule.sequence):
        about = {"bucket": program.buckets[bucket].text, "position": position, **call}
        grads = [leaves[leaf] for leaf in program.plan.buckets[bucket].leaves]
        record_start("start_gradients", grads, label, weight, json.dumps(about))
    present = [leaf for leaf in program.plan.reduced if leaves[leaf] is not None]
    devices = [str(one.device) for k in present if (one := leaves[k]) is not None]
    about = {"leaves": present, "devices": devices, **call}
    found = record("finish_step", [], label, json.dumps(about))
    results: list[Tensor | None] = [*leaves]
    for leaf, result in zip(present, found, strict=False):
        results[leaf] = result
    return [*results, *found[len(present) :]]


def _problem(
    engine: Engine, paths: Sequence[str], leaves: Sequence[Tensor | None]
) -> Exception | None:
    """Return the error of gradients that do not match the plan."""
    program = engine.program
    plan = program.plan
    if tuple(paths) != plan.paths:
        return mismatch(tuple(paths), plan.paths, "gradients")
    examples = [*map(example_of, leaves)]
    position = program.leaf_types.first_mismatch(examples, False)
    if position >= 0:
        return TreeMismatchError(misfit(examples[position], plan.leaves[position], "gradients"))
    return None


# Registration


@entrance
def _start_gradients(
    leaves: Sequence[Tensor | None], after: Tensor | None, sync: str, weight: float, call: str
) -> list[Tensor]:
    with torch.no_grad(), outside_inference_mode():
        _steps(sync).start(leaves, weight, _parsed(call))
    return [new_token()]


@entrance
def _finish_step(
    leaves: Sequence[Tensor | None], after: Tensor | None, sync: str, call: str
) -> list[Tensor]:
    with torch.no_grad(), outside_inference_mode():
        return [*_steps(sync).finish(_parsed(call)), new_token()]


def _start_shapes(
    leaves: Sequence[Tensor | None], after: Tensor | None, sync: str, weight: float, call: str
) -> list[Tensor]:
    return [new_token()]


def _finish_shapes(
    leaves: Sequence[Tensor | None], after: Tensor | None, sync: str, call: str
) -> list[Tensor]:
    about, specs = _parsed(call), _steps(sync).engine.program.plan.leaves
    pairs = zip(about["leaves"], about["devices"], strict=True)
    numbers = [torch.empty(5, dtype=torch.float64)] if about["with_info"] else []
    return [*(_empty(specs[leaf], device) for leaf, device in pairs), *numbers, new_token()]


_OPERATORS: tuple[Any, ...] = (
    ("start_gradients", "Scalar weight, str call", _start_gradients, _start_shapes),
    ("finish_step", "str call", _finish_step, _finish_shapes),
)
for _name, _given, _run, _shapes in _OPERATORS:
    LIBRARY.define(f"{_name}(Tensor?[] leaves, Tensor? after, str sync, {_given}) -> Tensor[]")
    register_kernels(_name, _run, _shapes)
