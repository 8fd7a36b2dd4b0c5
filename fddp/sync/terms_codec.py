"""JSON of a `SyncConfig`, and its adaption to other groups and ranks."""

from __future__ import annotations

import json
from dataclasses import astuple, fields, replace
from typing import Any, get_args

from fddp.core.plan.leaf import ITEM_BYTES, MAX_COUNT, LeafSpec
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.messages import AnyOf, Schema, decode, optional
from fddp.core.schedule.builder import Algorithm
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.text import counted, leaf_text
from fddp.errors import PlanMismatchError
from fddp.hooks.hook import Hook
from fddp.runtime.agreement import Rebuild, ReportTime, SyncConfig
from fddp.runtime.nonfinite import Policy
from fddp.transport import Transport, TransportName

_NOT_PLAIN = frozenset({"plan", "topology", "schedule", "rebuild", "hook"})
_TERMS: Schema = {
    "given": bool,
    "transport": AnyOf(get_args(TransportName)),
    "reduce_dtype": optional(AnyOf(tuple(ITEM_BYTES))),
    "algorithm": AnyOf(get_args(Algorithm)),
    "skips_unused": bool,
    "deterministic": bool,
    "virtual_ranks": optional(int),
    "nonfinite": AnyOf(get_args(Policy)),
    "report": AnyOf(get_args(ReportTime)),
    "noise": [str],
    "plan": str,
    "topology": [(str, int)],
    "schedule": optional(str),
    "rebuild": optional(([int], bool)),
}


def remap_topology(before: Topology, axes: Topology | None, world_size: int) -> Topology:
    """Return the axes of a new group: `axes`, or those of the previous group if they fit."""
    if axes is not None:
        found = axes
    elif len(before.axes) == 1:
        found = Topology(**{before.names[0]: world_size})
    else:
        found = before
    if found.world_size != world_size:
        raise ValueError(
            f"the mesh {found} has {counted(found.world_size, 'rank')}, and the group "
            f"{world_size}; pass mesh= with the axes of the new group"
        )
    return found


def merge_plan(own: SyncConfig, text: str) -> SyncConfig:
    """Return this rank's configuration with the plan of the newest rank, if plans may differ.
    Ranks compare the results afterwards.

    Raises:
        ValueError: the text is no result of `terms_to_json`.
    """
    document = decode(text, _TERMS)
    theirs = BucketPlan.from_json(document["plan"])
    may_differ = not own.given and own.schedule is None and own.algorithm != "reduce_scatter"
    if not may_differ or own.leaves != [theirs.leaves[i] for i in theirs.reduced]:
        return own
    return replace(
        own, plan=plan_on_leaves(theirs, own.plan.leaves), rebuild=_rebuild(document["rebuild"])
    )


def plan_on_leaves(plan: BucketPlan, leaves: tuple[LeafSpec, ...]) -> BucketPlan:
    """Return another rank's plan for the leaves of this rank, which may differ in leaves not
    reduced.

    Raises:
        PlanMismatchError: a reduced leaf differs.
    """
    if plan.leaves == leaves:
        return plan
    known = {leaf.path: position for position, leaf in enumerate(leaves)}
    for wanted in (plan.leaves[i] for i in plan.order):
        own = leaves[known[wanted.path]] if wanted.path in known else None
        if own != wanted:
            found = "no such leaf" if own is None else f"one of {own.shape}, {own.dtype}"
            raise PlanMismatchError(
                f"the plan of the other ranks has {leaf_text(wanted.path)} of shape "
                f"{wanted.shape}, {wanted.dtype}, and params has {found}; pass equal parameters, "
                f"or none"
            )
    moved = {i: known[plan.leaves[i].path] for i in plan.order}
    return BucketPlan(
        leaves=leaves,
        buckets=tuple(
            replace(bucket, leaves=tuple(moved[i] for i in bucket.leaves))
            for bucket in plan.buckets
        ),
        caps_bytes=plan.caps_bytes,
        order=tuple(moved[i] for i in plan.order),
    )


def terms_to_json(terms: SyncConfig, *, plan: str | None = None) -> str:
    """Return the configuration without the hook as ASCII text; `plan` replaces the plan's JSON."""
    plain = {f.name: getattr(terms, f.name) for f in fields(SyncConfig) if f.name not in _NOT_PLAIN}
    document = {
        **plain,
        "plan": terms.plan.to_json() if plan is None else plan,
        "topology": terms.topology.axes,
        "schedule": None if terms.schedule is None else terms.schedule.to_json(),
        "rebuild": None if terms.rebuild is None else astuple(terms.rebuild),
    }
    return json.dumps(document, separators=(",", ":"))


def terms_from_json(
    text: str,
    axes: Topology | None,
    transport: Transport,
    hook: Hook[Any] | None,
    leaves: tuple[LeafSpec, ...] | None,
) -> SyncConfig:
    """Return the configuration of another rank, for a new rank.

    Raises:
        ValueError: the text is no result of `terms_to_json`, or does not fit the group.
        PlanMismatchError: the plan does not fit `leaves`.
    """
    document = decode(text, _TERMS)
    plan, schedule = BucketPlan.from_json(document.pop("plan")), document.pop("schedule")
    theirs = _topology(document.pop("topology"))
    return SyncConfig(
        plan=plan if leaves is None else plan_on_leaves(plan, leaves),
        topology=remap_topology(theirs, axes, transport.world_size),
        schedule=None if schedule is None else Schedule.from_json(schedule),
        rebuild=_rebuild(document.pop("rebuild")),
        hook=hook,
        noise=tuple(document.pop("noise")),
        **document,
    )


def _topology(axes: list[list[Any]]) -> Topology:
    found: dict[str, int] = dict(axes)
    if len(found) < len(axes):
        raise ValueError(f"two of the axes {axes} have one name")
    return Topology(**found)


def _rebuild(document: Any) -> Rebuild | None:
    if document is None:
        return None
    caps_bytes, from_back = document
    if not caps_bytes or not all(1 <= cap <= MAX_COUNT for cap in caps_bytes):
        raise ValueError(f"the plan is to be rebuilt with the caps {caps_bytes!r:.80}")
    return Rebuild(tuple(caps_bytes), from_back)
