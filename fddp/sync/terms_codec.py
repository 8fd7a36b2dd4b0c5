"""What ranks have agreed on as text, and what becomes of it on another group and other ranks."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any, get_args

from fddp.core.plan.leaf import ITEM_BYTES, MAX_COUNT, LeafSpec
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.messages import AnyOf, Schema, decode, optional
from fddp.core.schedule.builder import Algorithm
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.errors import PlanMismatchError
from fddp.hooks.hook import Hook
from fddp.runtime.agreement import Rebuild, SyncConfig, leaf_details
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
    "nonfinite": AnyOf(get_args(Policy)),
    "plan": str,
    "topology": [(str, int)],
    "schedule": optional(str),
    "rebuild": optional(([int], bool)),
}


def remap_topology(before: Topology, axes: Topology | None, world_size: int) -> Topology:
    """The axes of the ranks of a group, for those of another group."""
    if axes is not None:
        found = axes
    elif len(before.axes) == 1:
        found = Topology(**{before.names[0]: world_size})
    else:
        found = before
    if found.world_size != world_size:
        raise ValueError(
            f"the mesh {found} has {found.world_size} ranks, and the group {world_size}; pass "
            f"mesh= with the axes of the ranks that are left"
        )
    return found


def merge_plan(own: SyncConfig, text: str) -> SyncConfig:
    """This rank's terms with the newest plan, if that may be another one; ranks compare them next,
    and say where they differ.

    Raises:
        ValueError: the text is none that `terms_to_json` writes.
    """
    document = decode(text, _TERMS)
    theirs = BucketPlan.from_json(document["plan"])
    mine = [own.plan.leaves[i] for i in own.plan.reduced]
    may_differ = not own.given and own.schedule is None and own.algorithm != "reduce_scatter"
    if not may_differ or leaf_details(mine) != leaf_details([*map(_leaf(theirs), theirs.reduced)]):
        return own
    return replace(
        own, plan=_on_leaves(theirs, own.plan.leaves), rebuild=_rebuild(document["rebuild"])
    )


def _leaf(plan: BucketPlan) -> Any:
    return plan.leaves.__getitem__


def _on_leaves(plan: BucketPlan, leaves: tuple[LeafSpec, ...]) -> BucketPlan:
    """The plan with other leaves than those that it reduces, where ranks differ in these."""
    if plan.leaves == leaves:
        return plan
    known = {leaf.path: position for position, leaf in enumerate(leaves)}
    for wanted in (plan.leaves[i] for i in plan.order):
        own = leaves[known[wanted.path]] if wanted.path in known else None
        if own != wanted:
            found = "no such leaf" if own is None else f"one of {own.shape}, {own.dtype}"
            raise PlanMismatchError(
                f"the plan of the others has the leaf {wanted.path!r} of shape {wanted.shape}, "
                f"{wanted.dtype}, and params has {found}; pass parameters like theirs, or none"
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
    """The terms as ASCII, all but the hook; with this text in place of the plan."""
    plain = {f.name: getattr(terms, f.name) for f in fields(SyncConfig) if f.name not in _NOT_PLAIN}
    document = {
        **plain,
        "plan": terms.plan.to_json() if plan is None else plan,
        "topology": terms.topology.axes,
        "schedule": None if terms.schedule is None else terms.schedule.to_json(),
        "rebuild": None
        if terms.rebuild is None
        else [terms.rebuild.caps_bytes, terms.rebuild.from_back],
    }
    return json.dumps(document, separators=(",", ":"))


def terms_from_json(
    text: str,
    axes: Topology | None,
    transport: Transport,
    hook: Hook[Any] | None,
    leaves: tuple[LeafSpec, ...] | None,
) -> SyncConfig:
    """The terms that another rank wrote, on a rank that has none.

    Raises:
        ValueError: the text is none that `terms_to_json` writes, or does not fit the group.
        PlanMismatchError: the plan does not fit `leaves`.
    """
    document = decode(text, _TERMS)
    plan, schedule = BucketPlan.from_json(document.pop("plan")), document.pop("schedule")
    theirs = _topology(document.pop("topology"))
    return SyncConfig(
        plan=plan if leaves is None else _on_leaves(plan, leaves),
        topology=remap_topology(theirs, axes, transport.world_size),
        schedule=None if schedule is None else Schedule.from_json(schedule),
        rebuild=_rebuild(document.pop("rebuild")),
        hook=hook,
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
