"""Steps in graphs: operators that send the buckets of a step, and one that finishes it.

[Note: steps in graphs]
A step in a graph is one call of the operator `start_gradients` for each bucket, in the order of the
schedule, and one of `finish_step`, which returns the means. When the graph runs, they take a step
of the `GradSync` with the plan, schedule, control word and errors of eager mode. Ranks that run a
graph and ranks that do not may meet in one step.

Operations are recorded in the order in which eager mode would run them, which has all gradients
before the first start. Each start is moved up, behind the operation that gives its last input.
Starts do not pass each other or other collectives, and nothing else is moved.

Where a plan is to be rebuilt, the graph is made for the plan that would follow from the order in
which it gives the gradients. Its first step has the plan before, as in eager mode: a bucket is sent
once its last gradient was given, and the report has rank 0's order, from which all ranks rebuild
the plan. On a rank whose graph has another order, buckets are sent later from then on.
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
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.calls import Method
from fddp.errors import ClosedError, InternalError, TreeMismatchError
from fddp.native.layout import contiguous_strides
from fddp.native.torch_private import node_of
from fddp.runtime.contributions import ArrivingContributions
from fddp.runtime.finish import send
from fddp.runtime.inputs import checked_weight, misfit, outside_inference_mode
from fddp.runtime.results import Devices
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
    # Buckets of the step that are not complete, in the order of the schedule.
    pending: list[int]

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
            self.engine.check_usable()  # it may have been closed since the bucket before
            raise InternalError(f"start {call['position']} of a graph was in no step")
        if "problem" in call:
            return
        leaves, buckets = call["leaves"], step.program.plan.buckets
        given.give(leaves, grads)
        if not step.code.is_on_cpu:
            by_leaf = dict(zip(leaves, grads, strict=True))
            step.note_devices([*map(by_leaf.get, range(len(step.program.plan.leaves)))])
        while self.pending and given.has(buckets[self.pending[0]].leaves):
            step.executor(self.pending.pop(0))
        if not self.pending:
            send(step)
        given.own(leaves)

    def _open(self, weight: float, call: dict[str, Any]) -> None:
        engine = self.engine
        self.begun_s = time.perf_counter()
        step = engine.open(Method(call["method"]), with_stats=call["with_info"])
        engine.note_in_flight(self._end_interrupted)  # until `finish`
        count = len(step.program.plan.leaves)
        self.step, self.given = step, ArrivingContributions(count, 0.0)
        try:
            if "problem" in call:
                raise TreeMismatchError(call["problem"])
            self.given = ArrivingContributions(count, checked_weight(weight), call["order"])
            step.begin(self.given, [None] * count)  # each bucket brings its devices
        except Exception as error:
            engine.fail(step, error)
        step.prepare()
        self.pending = [*step.program.schedule.sequence]

    def _end_interrupted(self) -> None:
        """End a step that an error has left between its buckets, before anything else is done."""
        step = self._taken()
        if step is not None:
            error = RuntimeError("a graph was interrupted between the buckets of a step")
            self.engine.end_interrupted(step.number, error)

    def _taken(self) -> Step | None:
        """Return the step under way, which there is no longer."""
        step, self.step, self.given = self.step, None, None
        self.engine.note_in_flight(None)
        return step

    def finish(self, call: dict[str, Any]) -> list[Tensor]:
        """Finish the step. Return the means of its leaves, zeros for one that no rank has used."""
        step = self._taken()
        if step is None:
            self.engine.check_usable()
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
        The means by leaf; this rank's own gradients for leaves that are not reduced. Of a tree that
        does not match the plan, which is an error on all ranks when the graph runs, the leaves.
    """
    engine = _steps(label).engine
    call = {"method": int(method), "with_info": with_info, "site": site}
    problem = _problem(engine, paths, leaves)
    if problem is not None:
        # Raised when the graph runs: an error now could be a graph break, and the step be repeated.
        about = {"problem": problem, "position": 0, **call}
        record("start_gradients", [], label, weight, json.dumps(about))
        info = record("finish_step", [], label, json.dumps({"leaves": [], "devices": [], **call}))
        missing = torch.zeros(())  # of any shape, for the operations that follow
        reduced = engine.program.plan.reduced
        shown = [
            missing if leaf is None and k in reduced else leaf for k, leaf in enumerate(leaves)
        ]
        return [*shown, *info]
    tracer = getattr(get_proxy_mode(), "tracer", None)
    plan, schedule = engine.program.plan, engine.program.schedule
    order: list[int] = []
    if tracer is not None and engine.program.control.with_order:
        places = [(node_of(leaf, tracer), k) for k, leaf in enumerate(leaves) if leaf is not None]
        order = [leaf for _, leaf in sorted(places) if leaf in plan.bucket_of]
        plan = engine.terms.rebuilt(plan, order)
        schedule = engine.schedule_of(plan, engine.hook)
    for position, bucket in enumerate(schedule.sequence):
        members = plan.buckets[bucket].leaves
        about = {"leaves": members, "position": position, "order": order, **call}
        grads = [leaves[leaf] for leaf in members]
        record_start("start_gradients", grads, label, weight, json.dumps(about))
    reduced = plan.reduced
    known = Devices(engine.devices)
    devices = [_device(plan, leaves, leaf, known) for leaf in reduced]
    about = {"leaves": reduced, "devices": devices, **call}
    found = record("finish_step", [], label, json.dumps(about))
    results: list[Tensor | None] = [*leaves]
    for leaf, result in zip(reduced, found, strict=False):
        results[leaf] = result
    return [*results, *found[len(reduced) :]]


def _device(plan: BucketPlan, leaves: Sequence[Tensor | None], leaf: int, known: Devices) -> str:
    """Device of the mean of a leaf: its own, or else that of another leaf of its bucket."""
    bucket = plan.buckets[plan.bucket_of[leaf]]
    found = [one.device for k in (leaf, *bucket.leaves) if (one := leaves[k]) is not None]
    return str(found[0] if found else known[bucket.device])


def _problem(engine: Engine, paths: Sequence[str], leaves: Sequence[Tensor | None]) -> str | None:
    """Return the error text of gradients that do not match the plan."""
    program = engine.program
    plan = program.plan
    if tuple(paths) != plan.paths:
        return str(mismatch(tuple(paths), plan.paths, "gradients"))
    examples = [*map(example_of, leaves)]
    position = program.leaf_types.first_mismatch(examples, False)
    if position >= 0:
        return misfit(examples[position], plan.leaves[position], "gradients")
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
