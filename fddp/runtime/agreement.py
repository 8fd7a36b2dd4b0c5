"""Comparison of plans and options over ranks, when a `GradSync` is built.

Backends hang or abort when ranks pass different sizes. Everything that must be equal is therefore
compared first, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
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
"""Schema of `leaf_details`."""

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
    """Options of the one rebuild of a plan, in the order in which gradients arrived.

    Attributes:
        caps_bytes: caps of the rebuilt buckets, in bytes.
        from_back: as for `plan_leaves`.
    """

    caps_bytes: tuple[int, ...]
    from_back: bool = False


@dataclass(frozen=True)
class SyncConfig:
    """Plan and options, which must be equal on all ranks.

    Attributes:
        plan: the bucket plan.
        given: True if the caller passed the plan, which is then never rebuilt.
        transport: the requested transport.
        reduce_dtype: dtype of reduction for 16-bit gradients.
        algorithm: algorithm of the reductions.
        topology: axes of the ranks.
        schedule: schedule passed by the caller, if any.
        rebuild: options of the plan's rebuild; None if it is not rebuilt.
        hook: the communication hook, if any.
        skips_unused: True to leave buckets that no rank used in a step out of the next one, until
            a rank uses them.
        deterministic: True if the topology alone determines the association of sums.
        nonfinite: policy for steps with non-finite numbers.
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
        """Return the plan for a measured order of gradients."""
        if self.rebuild is None:
            raise InternalError("rebuild of a plan that is never rebuilt")
        return rebucket(
            plan, ready_order, caps_bytes=self.rebuild.caps_bytes, from_back=self.rebuild.from_back
        )

    def schedule_of(self, plan: BucketPlan) -> Schedule:
        """Return the caller's schedule, or else one made for this plan."""
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
        """Short values that ranks compare; leaves and plan as digests."""
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
        """Details of the reduced leaves."""
        return leaf_details([self.plan.leaves[i] for i in self.plan.reduced])


def leaf_details(specs: Sequence[LeafSpec]) -> list[list[object]]:
    """Properties of leaves that must be equal on all ranks, as JSON values."""
    return [
        [leaf.path, leaf.shape, leaf.dtype, leaf.strides, leaf.device, leaf.sparse]
        for leaf in specs
    ]


def validate_across_ranks(
    transport: Transport, terms: SyncConfig | None, failure: Exception | None
) -> SyncConfig:
    """Compare plans and options over ranks; a collective call.

    Dicts that were filled in different orders give plans that differ only in the order of their
    leaves. All ranks then use the order of rank 0.

    Args:
        transport: a fresh transport of the group.
        terms: this rank's configuration; None if it failed to make one.
        failure: its error in this case.

    Returns:
        The configuration to use.

    Raises:
        PlanMismatchError: on every rank, if any two differ or a rank has none.
        Exception: `failure`, on the rank that has it.
    """
    if terms is None:
        summary: dict[str, object] = {"failure": error_text(failure) if failure else "unknown"}
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
        raise InternalError("a rank has neither a configuration nor a failure")
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
    """Compare hooks over ranks; a collective call.

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
    transport: Transport,
    value: object,
    schema: Schema,
    topic: str = "terms",
    on_malformed: Callable[[bytes], object] | None = None,
) -> list[Any]:
    """Return the values of all ranks, by rank; a collective call.

    Args:
        transport: transport of the group.
        value: this rank's value, of JSON types.
        schema: schema of every rank's value.
        topic: as for `Transport.exchange`.
        on_malformed: returns the value to use for a malformed message, instead of an error.

    Raises:
        DesyncError: a rank sent a value that does not fit the schema, on every rank; or as
            `Transport.exchange`.
    """

    def decoder(text: bytes) -> object:
        try:
            return decode(text, schema)
        except ValueError:
            if on_malformed is None:
                raise
            return on_malformed(text)

    return decode_all(transport.exchange(json.dumps(value).encode(), topic), decoder, topic)


def _reordered(plan: BucketPlan, slots: list[int]) -> BucketPlan:
    reduced = plan.reduced
    if sorted(slots) != [*range(len(reduced))]:
        problem = ValueError(f"the order is no permutation of {len(reduced)} leaves")
        raise malformed_message_error(0, "terms", problem)
    return plan_leaves(plan.leaves, order=[reduced[s] for s in slots], caps_bytes=plan.caps_bytes)


def _difference(rank: int, received: list[Any], details: list[Any]) -> str:
    mine, theirs = received[0], received[rank]
    for name, way_out in _WAY_OUT.items():
        if mine[name] != theirs[name]:
            return f"{name} is {mine[name]} on rank 0 and {theirs[name]} on rank {rank}; {way_out}"
    return leaf_difference(rank, details[0], details[rank])


def leaf_difference(rank: int, mine: list[Any], theirs: list[Any]) -> str:
    """Describe the first difference between the `leaf_details` of rank 0 and of `rank`."""
    advice = (
        "build every rank's parameters alike, or leave it out on every rank: select= of a "
        "GradSync, _set_params_and_buffers_to_ignore_for_model of a wrapped module"
    )
    for ours, others in zip(mine, theirs, strict=False):
        if ours != others:
            return f"rank 0 has {_leaf(ours)} where rank {rank} has {_leaf(others)}; {advice}"
    if len(mine) != len(theirs):
        longer, owner = (mine, 0) if len(mine) > len(theirs) else (theirs, rank)
        extra = longer[min(len(mine), len(theirs))]
        return (
            f"rank 0 has {len(mine)} leaves and rank {rank} has {len(theirs)}; "
            f"only rank {owner} has {_leaf(extra)}; {advice}"
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
