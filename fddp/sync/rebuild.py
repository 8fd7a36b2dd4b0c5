"""Rebuild of an engine on another group, after a failure or with new ranks.

After a failed step some ranks may have its result and others not. All ranks therefore use the plan
and the step number of the rank that has finished the most steps, the lowest of these. Plans may
differ only by the order that rank 0 measured in a step that only some ranks have finished; any
other difference is an error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fddp.collectives.replicas.chunked_broadcast import broadcast_text
from fddp.collectives.replicas.reconcile import reconciled
from fddp.core.plan.defaults import timeout_error
from fddp.core.plan.leaf import LeafSpec
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import Schema
from fddp.core.schedule.topology import Topology
from fddp.core.schedule.virtual import VirtualRanks
from fddp.errors import ClosedError, InternalError, PlanMismatchError, ReentryError, error_text
from fddp.hooks.hook import Hook
from fddp.native.torch_private import current_graph_task_id
from fddp.runtime.agreement import SyncConfig, check_no_failure, exchange
from fddp.sync.engine import Engine
from fddp.sync.request import accelerators
from fddp.sync.terms_codec import merge_plan, remap_topology, terms_from_json, terms_to_json
from fddp.transport import Transport, TransportName
from fddp.transport.mesh import GroupAndTopology
from fddp.tree.describe import leaf_specs
from fddp.tree.foreign import holds_foreign
from fddp.tree.pytree import flatten

if TYPE_CHECKING:
    import torch


class Progress(NamedTuple):
    """Progress of a rank.

    Attributes:
        finished: one more than the number of the last successful step; -1 for a new rank.
        step: number of the next step.
        digest: digest of the configuration.
        length: length of the configuration's JSON text.
        with_state: True if the rank takes part in the choice of the newest state.
    """

    finished: int
    step: int
    digest: str
    length: int
    with_state: bool


_PROGRESS: Schema = (str, int, int, str, int, bool)
"""Schema of a rank's error text and `Progress`."""

ABSENT: Final = object()
"""Default of `state`, in place of None, which stands for a rank that has none."""


@dataclass
class RebuildSpec:
    """Request for an engine that continues from other engines; see `EngineSpec`.

    Attributes:
        old: this rank's engine; None on a new rank.
        hook: the communication hook of a new rank.
        params: tree of a new rank; None if it has passed none.
        leaves: description of its leaves.
        problem: error of a new rank's arguments.
        state: this rank's state; `ABSENT` if none is to be chosen, on all ranks alike.
        newest: progress of the newest rank, once it is known.
    """

    span: GroupAndTopology
    transport: TransportName
    timeout_s: float | None
    is_foreign: bool
    old: Engine | None = None
    hook: Hook[Any] | None = None
    params: Any = None
    leaves: tuple[LeafSpec, ...] | None = None
    problem: Exception | None = None
    state: Any = ABSENT
    newest: Progress | None = field(default=None, init=False)

    title = "GradSync"

    def devices(self, plan: BucketPlan) -> dict[str, torch.device]:
        """Return the accelerators of the old engine, or of the tree of a new rank."""
        if self.old is not None:
            return dict(self.old.devices)
        return {} if self.params is None else accelerators(plan, flatten(self.params)[0])

    def terms(self, transport: Transport) -> SyncConfig:
        """Return the configuration, with the plan of the newest rank; a collective call.

        Raises:
            PlanMismatchError: no rank has an engine, or another rank has an error.
            ValueError, TypeError: the error of this rank.
        """
        own, problem = None, self.problem or self.span.problem
        if problem is None and self.old is not None:
            try:
                own = _terms_over(self.old, self.span.topology, transport)
            except Exception as error:
                problem = error
        text = "" if own is None else terms_to_json(own)
        progress = _progress(self.old, own, text, self.state is not ABSENT)
        message = [error_text(problem) if problem else "", *progress]
        received = exchange(transport, message, _PROGRESS, "progress")
        check_no_failure([text for text, *_ in received], "can't go on", problem)
        known = [Progress(*theirs[1:]) for theirs in received]
        passed = ["passed" if theirs.with_state else "left out" for theirs in known]
        check_equal("state", passed, "pass state= to rebuild and join on all ranks, or on none")
        return self._agreed(transport, own, text, known)

    def _agreed(
        self, transport: Transport, own: SyncConfig | None, text: str, received: list[Progress]
    ) -> SyncConfig:
        finished = [progress.finished for progress in received]
        source = finished.index(max(finished))
        self.newest = newest = received[source]
        if newest.finished < 0:
            raise PlanMismatchError(
                f"none of the {len(received)} ranks has a GradSync to go on with; build one on "
                f"each: fddp.GradSync(params)"
            )
        if all(progress.digest == newest.digest for progress in received):
            if own is None:
                raise InternalError("a rank without a configuration has the newest digest")
            return own
        text = broadcast_text(transport, text, newest.length, source, "the plan of the newest rank")
        if own is None:
            return terms_from_json(text, self.span.topology, transport, self.hook, self.leaves)
        return merge_plan(own, text)


def rebuild_engine(old: Engine, span: GroupAndTopology, state: Any) -> tuple[Engine, Any]:
    """Return an engine on another group that continues from `old`, and the newest rank's `state`; a
    collective call.

    The old engine is closed on success.

    Args:
        old: the engine.
        span: group and axes; without a group, those of the ranks that are left.
        state: this rank's state; `ABSENT` for none on any rank.

    Raises:
        ClosedError: the old engine was rebuilt before.
        ReentryError: a step of the old engine runs.
        Exception: as for `Engine`.
    """
    check_between_steps(old)
    if old.departure == "own" and old.is_closed:
        raise ClosedError(
            f"rebuild was called on a rank that has left: {old.closed_by}; the others go on "
            f"without it"
        )
    if old.superseded:
        raise ClosedError(f"rebuild was called a second time: {old.closed_text}")
    if span.group is None:
        span = span._replace(group=old.transport.group_left())
    name: Any = old.terms.transport
    spec = RebuildSpec(span, name, old.timeout_s, old.program.foreign, old, state=state)
    engine, newest = _opened(spec, old.finished)
    old.supersede(
        "rebuild() has replaced it",
        "use the new one: sync = sync.rebuild(group), and make a new "
        "step = sync.value_and_grad(loss_fn)",
    )
    return engine, newest


def check_between_steps(engine: Engine) -> None:
    """Raise if a step of an engine runs, and read the report of the last one, if it is open."""
    in_backward = current_graph_task_id() >= 0
    if engine.is_in_step or in_backward:
        part = "backward" if in_backward or engine.in_backward else "the loss function"
        raise ReentryError(
            f"rebuild was called while {part} of a step runs; call it between steps, after the "
            f"step has returned or raised"
        )
    if not engine.is_closed:
        engine.check()


def join_engine(
    span: GroupAndTopology,
    params: Any,
    hook: Hook[Any] | None,
    transport: TransportName,
    timeout_s: float | None,
    state: Any,
) -> tuple[Engine, Any]:
    """Return an engine on a new rank that continues from the others' engines, and the newest rank's
    `state`; a collective call."""
    problem: Exception | None = timeout_error(timeout_s)
    leaves, is_foreign = None, False
    try:
        if params is not None:
            own, treedef = flatten(params)
            leaves, is_foreign = tuple(leaf_specs(treedef.paths, own)), holds_foreign(own)
    except Exception as error:
        problem = problem or error
    spec = RebuildSpec(
        span,
        transport,
        timeout_s,
        is_foreign,
        hook=hook,
        params=params,
        leaves=leaves,
        problem=problem,
        state=state,
    )
    return _opened(spec, None)


def _opened(spec: RebuildSpec, finished: int | None) -> tuple[Engine, Any]:
    engine = Engine(spec)
    newest = spec.newest
    if newest is None:
        raise InternalError("an engine was rebuilt without the progress of the ranks")
    engine.continue_from(newest.step, newest.finished)
    if spec.old is not None:
        engine.arrivals = spec.old.arrivals
        engine.stopping.take_over(spec.old.stopping)
    if spec.state is ABSENT:
        return engine, None
    try:
        return engine, reconciled(engine.transport, spec.state, finished)[0]
    except BaseException as error:
        engine.close(error_text(error))
        raise


def _progress(old: Engine | None, own: SyncConfig | None, text: str, with_state: bool) -> Progress:
    if old is None or own is None:
        return Progress(-1, -1, "", 0, with_state)
    digest = hashlib.sha256(terms_to_json(own, plan=own.plan.shared_digest).encode()).hexdigest()
    return Progress(old.finished, old.step, digest, len(text), with_state)


def _terms_over(old: Engine, axes: Topology | None, transport: Transport) -> SyncConfig:
    """Return this rank's configuration for another group; `ValueError` if it does not fit."""
    if old.terms.transport not in ("auto", transport.name):
        raise ValueError(
            f"transport={old.terms.transport!r} does not fit this group, which has "
            f"{transport.name!r}; build a new GradSync there"
        )
    before = old.schedule.topology
    topology = remap_topology(before, axes, transport.world_size)
    if old.terms.algorithm == "hierarchical" and len(topology.axes) < 2:
        raise ValueError(
            f"algorithm='hierarchical' needs a mesh of at least two axes, got {topology}"
        )
    if old.terms.virtual_ranks is not None:
        VirtualRanks.over(old.terms.virtual_ranks, topology.world_size)  # raises its errors
    is_moved = topology != before or transport.rank != old.transport.rank
    if old.terms.schedule is not None and topology != before:
        raise ValueError(
            f"the schedule was passed in for {before}, and the group has {topology}; make a "
            f"schedule of the same plan for {topology}, and build a GradSync with it"
        )
    if old.schedule.result != "replicated_mean" and is_moved:
        raise ValueError(
            f"rank {old.transport.rank} of {before} would be rank {transport.rank} of {topology}, "
            f"which owns other shards; build a new one, "
            f"GradSync(sync.plan, algorithm={old.terms.algorithm!r}, group=group), and make new "
            f"shards from whole leaves: sync.shard(tree)"
        )
    return replace(
        old.terms,
        plan=old.program.plan,
        topology=topology,
        rebuild=old.terms.rebuild if old.program.control.with_order else None,
        hook=old.hook,
    )
