"""Ranks compare what they are about to do before they do it.

Backends answer mismatched sizes by hanging or by ending the process, so whatever must be alike is
compared when a `GradSync` is built, as bytes of any length, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fddp.core.plan.leaf import LeafSpec
from fddp.core.plan.plan import BucketPlan, plan_leaves, rebucket
from fddp.core.protocol.messages import (
    AnyOf,
    Schema,
    decode,
    decode_all,
    malformed_message_error,
    optional,
)
from fddp.core.schedule.builder import Algorithm, make_schedule
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.errors import InternalError, PlanMismatchError, error_text
from fddp.hooks.hook import Hook
from fddp.runtime.nonfinite import Policy
from fddp.transport.base import Transport

LEAF_DETAILS: Schema = [(str, [int], str, optional([int]), str, bool)]
"""What `leaf_details` gives, as ranks tell it."""

_SUMMARY: Schema = AnyOf(
    (
        {"failure": str},
        {
            "given": bool,
            "transport": str,
            "reduce_dtype": optional(str),
            "algorithm": str,
            "mesh": str,
            "schedule": optional(str),
            "caps": [int],
            "hook": optional(str),
            "rebuild": optional(str),
            "skips_unused": bool,
            "deterministic": bool,
            "nonfinite": str,
            "leaves": str,
            "plan": str,
        },
    )
)

_WAY_OUT = {
    "given": "pass a plan on every rank or on none",
    "transport": "pass the same transport on every rank",
    "reduce_dtype": "pass the same reduce_dtype on every rank",
    "algorithm": "pass the same algorithm on every rank",
    "mesh": "pass the same mesh on every rank",
    "schedule": "pass the same schedule on every rank, or none",
    "caps": "pass the same bucket_cap_mb and first_bucket_mb on every rank",
    "hook": "pass the same hook, with the same parameters, on every rank",
    "rebuild": "pass the same options of bucket caps on every rank",
    "skips_unused": "pass the same skip_all_reduce_unused_params on every rank",
    "deterministic": "pass the same deterministic on every rank",
    "nonfinite": "pass the same nonfinite on every rank",
}


@dataclass(frozen=True)
class Rebuild:
    """How a plan is rebuilt, once, in the order in which gradients arrived.

    Attributes:
        caps_bytes: caps of the rebuilt buckets.
        from_back: as for `plan_leaves`.
    """

    caps_bytes: tuple[int, ...]
    from_back: bool = False


@dataclass(frozen=True)
class SyncConfig:
    """What ranks must have in common.

    Attributes:
        plan: the bucket plan.
        given: whether the caller passed the plan (it is then never rebuilt).
        transport: the transport that the caller asked for.
        reduce_dtype: dtype of reduction for 16-bit gradients.
        algorithm: how buckets are reduced.
        topology: the axes of the ranks.
        schedule: the schedule that the caller passed, if any.
        rebuild: how the plan is rebuilt; None where it stays as it is.
        hook: the communication hook, if any.
        skips_unused: whether buckets that no rank used in one step are left out of the next, until
            a rank uses them.
        deterministic: whether sums have the one association that follows from the topology.
        nonfinite: what becomes of a step with a number that is not finite.
    """

    plan: BucketPlan
    given: bool
    transport: str
    reduce_dtype: str | None
    algorithm: Algorithm
    topology: Topology
    schedule: Schedule | None
    rebuild: Rebuild | None
    hook: Hook[Any] | None = None
    skips_unused: bool = False
    deterministic: bool = False
    nonfinite: Policy = "propagate"

    def rebuilt(self, plan: BucketPlan, ready_order: Sequence[int]) -> BucketPlan:
        """The plan for a measured order of gradients."""
        if self.rebuild is None:
            raise InternalError("a plan was to be rebuilt that stays as it is")
        return rebucket(
            plan,
            ready_order,
            caps_bytes=self.rebuild.caps_bytes,
            from_back=self.rebuild.from_back,
        )

    def schedule_of(self, plan: BucketPlan) -> Schedule:
        """The schedule to carry out: the caller's, or one that is made for this plan."""
        if self.schedule is not None:
            return self.schedule
        return make_schedule(
            plan,
            self.topology,
            algorithm=self.algorithm,
            reduce_dtype=self.reduce_dtype,
            deterministic=self.deterministic,
        )

    def summary(self) -> dict[str, object]:
        """Short values that decide whether ranks agree."""
        leaves = json.dumps(self.leaves())
        return {
            "given": self.given,
            "transport": self.transport,
            "reduce_dtype": self.reduce_dtype,
            "algorithm": self.algorithm,
            "mesh": str(self.topology),
            "schedule": None if self.schedule is None else self.schedule.shared_digest[:12],
            "caps": list(self.plan.caps_bytes),
            "hook": _hook_name(self.hook),
            "rebuild": None if self.rebuild is None else str(self.rebuild),
            "skips_unused": self.skips_unused,
            "deterministic": self.deterministic,
            "nonfinite": self.nonfinite,
            "leaves": hashlib.sha256(leaves.encode()).hexdigest(),
            "plan": self.plan.shared_digest,
        }

    def leaves(self) -> list[list[object]]:
        """The reduced leaves in full."""
        return leaf_details([self.plan.leaves[i] for i in self.plan.reduced])


def leaf_details(specs: Sequence[LeafSpec]) -> list[list[object]]:
    """All that ranks must have in common of their leaves, as JSON holds it."""
    return [
        [leaf.path, leaf.shape, leaf.dtype, leaf.strides, leaf.device, leaf.sparse]
        for leaf in specs
    ]


def validate_across_ranks(
    transport: Transport, terms: SyncConfig | None, failure: Exception | None
) -> SyncConfig:
    """Compares terms over ranks.

    Leaves are registered in another order on another rank when its dicts were filled in another
    order; of plans that differ in nothing else, all ranks take rank 0's.

    Args:
        transport: a fresh transport of the group.
        terms: this rank's, or None where it could not make any.
        failure: why it could not.

    Returns:
        The terms that hold on all ranks.

    Raises:
        PlanMismatchError: on every rank, if any two differ or a rank has none.
        Exception: `failure`, on the rank that has it.
    """
    if terms is None:
        summary: dict[str, object] = {"failure": error_text(failure) if failure else "it has none"}
    else:
        summary = terms.summary()
    received = exchange(transport, summary, _SUMMARY)
    if failure is not None:
        failure.args = (f"rank {transport.rank}: {failure}", *failure.args[1:])
        raise failure
    for rank, other in enumerate(received):
        if "failure" in other:
            raise PlanMismatchError(f"rank {rank} could not build its plan: {other['failure']}")
    if terms is None:
        raise InternalError("a rank has neither terms nor a failure")
    differing = [rank for rank, other in enumerate(received) if other != received[0]]
    if not differing:
        return terms
    plans_only = all({**other, "plan": None} == {**received[0], "plan": None} for other in received)
    if plans_only and not terms.given:
        slots = {leaf: slot for slot, leaf in enumerate(terms.plan.reduced)}
        orders = exchange(transport, [slots[leaf] for leaf in terms.plan.order], [int])
        return replace(terms, plan=_reordered(terms.plan, orders[0]))
    details = exchange(transport, terms.leaves(), LEAF_DETAILS)
    raise PlanMismatchError(_difference(differing[0], received, details))


def agree_on_hook(transport: Transport, hook: Hook[Any] | None) -> None:
    """Compares hooks over ranks.

    Raises:
        PlanMismatchError: on every rank, if any two differ.
    """
    names = exchange(transport, _hook_name(hook), optional(str), "hooks")
    for rank, other in enumerate(names):
        if other != names[0]:
            raise PlanMismatchError(
                f"the hook is {names[0]} on rank 0 and {other} on rank {rank}; {_WAY_OUT['hook']}"
            )


def _hook_name(hook: Hook[Any] | None) -> str | None:
    return None if hook is None else hook.name


def exchange(
    transport: Transport, value: object, schema: Schema, topic: str = "terms"
) -> list[Any]:
    """Every rank's value, by rank; a collective call.

    Args:
        transport: carries them.
        value: what JSON holds.
        schema: of every rank's.
        topic: as for `Transport.exchange`.

    Raises:
        DesyncError: what a rank says is of another form, on every rank; or as `Transport.exchange`.
    """
    return decode_all(
        transport.exchange(json.dumps(value).encode(), topic),
        lambda text: decode(text, schema),
        topic,
    )


def _reordered(plan: BucketPlan, slots: list[int]) -> BucketPlan:
    reduced = plan.reduced
    if sorted(slots) != [*range(len(reduced))]:
        problem = ValueError(f"its order does not have each of {len(reduced)} leaves once")
        raise malformed_message_error(0, "terms", problem)
    return plan_leaves(plan.leaves, order=[reduced[s] for s in slots], caps_bytes=plan.caps_bytes)


def _difference(rank: int, received: list[Any], details: list[Any]) -> str:
    mine, theirs = received[0], received[rank]
    for name, way_out in _WAY_OUT.items():
        if mine[name] != theirs[name]:
            return f"{name} is {mine[name]} on rank 0 and {theirs[name]} on rank {rank}; {way_out}"
    return leaf_difference(rank, details[0], details[rank])


def leaf_difference(rank: int, mine: list[Any], theirs: list[Any]) -> str:
    """Where rank 0's `leaf_details` and those of `rank` first differ, in words."""
    advice = "build every rank's parameters alike, or decline the leaf with select="
    for ours, others in zip(mine, theirs, strict=False):
        if ours != others:
            return f"rank 0 has {_leaf(ours)} where rank {rank} has {_leaf(others)}; {advice}"
    if len(mine) != len(theirs):
        longer, who = (mine, 0) if len(mine) > len(theirs) else (theirs, rank)
        extra = longer[min(len(mine), len(theirs))]
        return (
            f"rank 0 has {len(mine)} leaves and rank {rank} has {len(theirs)}; "
            f"only rank {who} has {_leaf(extra)}; {advice}"
        )
    return (
        f"ranks 0 and {rank} have the same leaves but other buckets or order; pass the same plan "
        f"on every rank (BucketPlan.to_json carries one over)"
    )


def _leaf(detail: list[Any]) -> str:
    path, shape, dtype, strides, device, sparse = detail
    if dtype == "none":
        return f"leaf {path!r}, which is None"
    text = f"leaf {path!r} of shape {tuple(shape)}, {dtype} on {device}"
    text += f" with strides {tuple(strides)}" if strides else ""
    return f"{text}, declared sparse" if sparse else text
