"""Going on with a plan and its state on another group: after a failure, and with ranks that come
late.

Ranks that failed in one step may differ by it: some have its result, others do not. So all take the
plan, the unit of weight and the number of the next step from the rank that has finished the most
steps, the lowest of these. Plans that differ in anything but the order of arrival, which rank 0
measured in a step that only some have finished, are an error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fddp.collectives.replicas.chunked_broadcast import broadcast_text
from fddp.collectives.replicas.reconcile import reconciled
from fddp.core.plan.defaults import MAX_TIMEOUT_S
from fddp.core.plan.leaf import LeafSpec
from fddp.core.protocol.messages import Schema
from fddp.core.schedule.topology import Topology
from fddp.errors import ClosedError, InternalError, PlanMismatchError, ReentryError, error_text
from fddp.hooks.hook import Hook
from fddp.runtime.agreement import SyncConfig, exchange
from fddp.sync.engine import Engine
from fddp.sync.hook_states import checked_states, init_states
from fddp.sync.terms_codec import merge_plan, remap_topology, terms_from_json, terms_to_json
from fddp.transport import Transport, TransportName
from fddp.transport.mesh import GroupAndTopology
from fddp.tree.describe import leaf_specs
from fddp.tree.foreign import holds_foreign
from fddp.tree.pytree import flatten


class Progress(NamedTuple):
    """How far a rank is; plain values.

    Attributes:
        finished: the number after that of the last step that went through; -1 for a rank that has
            just come.
        step: number of the next step.
        unit: the agreed unit of weight.
        keeps_state: whether the engine itself carries hook state.
        digest: of the terms, in short.
        length: of the terms as text.
    """

    finished: int
    step: int
    unit: float
    keeps_state: bool
    digest: str
    length: int


_PROGRESS: Schema = (str, int, int, float, bool, str, int)
"""What is wrong on a rank, and its `Standing`, as ranks tell them."""


@dataclass
class RebuildSpec:
    """What an engine is made from that goes on where others, or one of this rank's, stopped.

    Attributes:
        span: the ranks to go on with.
        transport: name of the transport.
        usable_timeout_s: seconds that any operation may take.
        is_foreign: whether this rank's trees hold arrays of another library.
        old: this rank's own engine; None for a rank that has just come.
        hook: the communication hook of a rank that has just come.
        leaves: its leaves, where it has passed a tree.
        problem: what is wrong with its arguments.
        newest: how far the group is, once it is known.
        parted: whether ranks differ in that.
    """

    span: GroupAndTopology
    transport: TransportName
    usable_timeout_s: float | None
    is_foreign: bool
    old: Engine | None = None
    hook: Hook[Any] | None = None
    leaves: tuple[LeafSpec, ...] | None = None
    problem: Exception | None = None
    newest: Progress | None = field(default=None, init=False)
    parted: bool = field(default=False, init=False)

    title = "GradSync"

    def terms(self, transport: Transport) -> SyncConfig:
        """What ranks must have in common, mostly from the newest of them; a collective call.

        Raises:
            PlanMismatchError: no rank has anything to go on with, or another rank can't.
            ValueError, TypeError: what is wrong on this rank.
        """
        own, problem = None, self.problem or self.span.problem
        if problem is None and self.old is not None:
            try:
                own = _terms_over(self.old, self.span.topology, transport)
            except Exception as error:
                problem = error
        text = "" if own is None else terms_to_json(own)
        mine = _standing(self.old, own, text)
        own_account = [error_text(problem) if problem else "", *mine]
        received = exchange(transport, own_account, _PROGRESS, "standing")
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(received):
            if theirs[0]:
                raise PlanMismatchError(f"rank {rank} can't go on: {theirs[0]}")
        return self._settled(transport, own, text, [Progress(*theirs[1:]) for theirs in received])

    def _settled(
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
        self.parted = len(set(finished)) > 1
        if all(progress.digest == newest.digest for progress in received):
            if own is None:
                raise InternalError("ranks without terms have those of a rank that has some")
            return own
        text = broadcast_text(transport, text, newest.length, source, "the plan of the newest rank")
        if own is None:
            return terms_from_json(text, self.span.topology, transport, self.hook, self.leaves)
        return merge_plan(own, text)


def rebuild_engine(old: Engine, span: GroupAndTopology) -> Engine:
    """An engine that goes on where this one stopped, on other ranks; a collective call.

    The old one is closed once the new one works.

    Raises:
        ClosedError: another goes on in its place already.
        ReentryError: one of its steps runs, whose transport would be closed.
        Exception: as from making an engine.
    """
    if old.running:
        part = "backward" if old.in_backward else "the loss function"
        raise ReentryError(
            f"rebuild was called while {part} of a step runs; call it between steps, when the step "
            f"has returned or raised"
        )
    if old.lifecycle.superseded:
        raise ClosedError(f"rebuild was called a second time: {old.lifecycle.closed_text}")
    name: Any = old.terms.transport
    engine = _opened(RebuildSpec(span, name, old.timeout_s, old.program.foreign, old))
    old.supersede(
        "rebuild() goes on with another in its place",
        "take steps with the one that it returned: sync = sync.rebuild(group), and "
        "step = sync.value_and_grad(loss_fn) anew",
    )
    return engine


def join_engine(
    span: GroupAndTopology,
    params: Any,
    hook: Hook[Any] | None,
    transport: TransportName,
    timeout_s: float | None,
) -> Engine:
    """An engine on a rank that has none, from those of the others; a collective call."""
    problem: Exception | None = None
    leaves, is_foreign = None, False
    try:
        if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S} seconds, got {timeout_s!r}"
            )
        if params is not None:
            own, treedef = flatten(params)
            leaves, is_foreign = tuple(leaf_specs(treedef.paths, own)), holds_foreign(own)
    except Exception as error:
        problem, timeout_s = error, None
    return _opened(
        RebuildSpec(
            span, transport, timeout_s, is_foreign, hook=hook, leaves=leaves, problem=problem
        )
    )


def _opened(continuation: RebuildSpec) -> Engine:
    engine = Engine(continuation)
    newest, old = continuation.newest, continuation.old
    if newest is None:
        raise InternalError("ranks went on without telling how far they are")
    try:
        states = _states(engine, old, newest, continuation.parted)
        engine.restore(
            step=newest.step,
            finished=newest.finished,
            unit=newest.unit,
            arrivals=None if old is None else old.arrivals,
            hook_states=states,
        )
    except BaseException:
        engine.close("it could not take up the state of the hook")
        raise
    return engine


def _states(
    engine: Engine, old: Engine | None, newest: Progress, parted: bool
) -> tuple[Any, ...] | None:
    """The hook's state that engines carry; a collective call where there is some. Ranks that are
    behind take that of one that is not: parts of it must be alike on all ranks."""
    if not newest.keeps_state:
        return None
    own = old.hook_states if old is not None and old.finished == newest.finished else None
    states: Any = own
    if parted:
        behind = own is None
        others, _ = reconciled(
            engine.transport, init_states(engine) if behind else own, 0 if behind else 1
        )
        states = others if behind else own
    problem: Exception | None = None
    try:
        checked_states(engine, states, "the GradSync before")
    except Exception as error:
        problem = error
    received = exchange(engine.transport, error_text(problem) if problem else "", str, "hook state")
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(received):
        if theirs:
            raise PlanMismatchError(f"rank {rank} can't go on: {theirs}")
    return tuple(states)


def _standing(old: Engine | None, own: SyncConfig | None, text: str) -> Progress:
    if old is None or own is None:
        return Progress(-1, -1, 1.0, False, "", 0)
    digest = hashlib.sha256(terms_to_json(own, plan=own.plan.shared_digest).encode()).hexdigest()
    keeps_state = old.hook_states is not None
    return Progress(old.finished, old.step, old.scale.unit, keeps_state, digest, len(text))


def _terms_over(old: Engine, axes: Topology | None, transport: Transport) -> SyncConfig:
    """This rank's own terms over another group.

    Raises:
        ValueError: they can't hold there.
    """
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
    is_moved = topology != before or transport.rank != old.transport.rank
    if old.terms.schedule is not None and topology != before:
        raise ValueError(
            f"the GradSync carries out a schedule that was passed in, for {before}, and the group "
            f"has {topology}; make a schedule for that of the same plan, and build a GradSync of it"
        )
    if old.schedule.result != "replicated_mean" and is_moved:
        raise ValueError(
            f"rank {old.transport.rank} of {before} would be rank {transport.rank} of {topology}, "
            f"which owns other shards; build a new one, "
            f"GradSync(sync.plan, algorithm={old.terms.algorithm!r}, group=group), and cut what "
            f"is kept in shards anew from whole leaves: sync.shard(tree)"
        )
    return replace(
        old.terms,
        plan=old.program.plan,
        topology=topology,
        rebuild=old.terms.rebuild if old.program.control.with_order else None,
        hook=old.hook,
    )
