"""Comparison of plans and options over ranks, when a `GradSync` is built.

Backends hang or abort when ranks pass different sizes. Everything that must be equal is therefore
compared first, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from fddp.core.plan.leaf import LeafSpec
from fddp.core.plan.plan import BucketPlan, plan_leaves, rebucket
from fddp.core.protocol.differences import LEAVES, check_equal, leaf_difference
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
from fddp.core.text import counted
from fddp.errors import InternalError, PlanMismatchError, error_text
from fddp.hooks.hook import Hook
from fddp.runtime.nonfinite import Policy
from fddp.transport.base import Transport

ReportTime: TypeAlias = Literal["now", "next"]
"""When the report of a step is read: before its results are used, or before the next step."""

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
            "virtual_ranks": optional(int),
            "nonfinite": str,
            "report": str,
            "noise": optional(str),
            "leaves": str,
            "plan": str,
        },
    )
)

# Of fields that a caller does not pass under their name.
_WAY_OUT = {
    "given": "pass a plan on every rank or on none",
    "schedule": "pass the same schedule on every rank, or none",
    "caps": "pass the same bucket_cap_mb and first_bucket_mb on every rank",
    "hook": "pass the same hook, with the same parameters, on every rank",
    "rebuild": "pass the same options of bucket caps on every rank",
    "noise": "pass the same noise on every rank, which gives each leaf the same group",
    "skips_unused": "pass the same skip_all_reduce_unused_params on every rank",
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
        virtual_ranks: number of virtual ranks, which then alone determines it; None for none.
        nonfinite: policy for steps with non-finite numbers.
        report: when the report of a step is read.
        noise: for each reduced leaf, the group whose squared norms are measured; () for none.
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
    virtual_ranks: int | None = None
    nonfinite: Policy = "propagate"
    report: ReportTime = "now"
    noise: tuple[str, ...] = ()

    def rebuilt(self, plan: BucketPlan, ready_order: Sequence[int]) -> BucketPlan:
        """Return the plan for a measured order of gradients."""
        if self.rebuild is None:
            raise InternalError("rebuild of a plan that is never rebuilt")
        return rebucket(
            plan, ready_order, caps_bytes=self.rebuild.caps_bytes, from_back=self.rebuild.from_back
        )

    def schedule_of(self, plan: BucketPlan, *, averages: bool) -> Schedule:
        """Return the caller's schedule, or else one made for this plan.

        Args:
            plan: the plan.
            averages: True if collectives may divide their sums, unless these are along a tree.
        """
        if self.schedule is not None:
            return self.schedule
        is_along_tree = self.deterministic or self.virtual_ranks is not None
        return make_schedule(
            plan,
            self.topology,
            algorithm=self.algorithm,
            scaling="average" if averages and not is_along_tree else "before",
            reduce_dtype=self.reduce_dtype,
            deterministic=self.deterministic,
            virtual_ranks=self.virtual_ranks,
        )

    def summary(self) -> dict[str, object]:
        """Short values that ranks compare; leaves and plan as digests."""
        leaves = json.dumps(self.leaves)
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
            "virtual_ranks": self.virtual_ranks,
            "nonfinite": self.nonfinite,
            "report": self.report,
            "noise": _groups_text(self.noise),
            "leaves": hashlib.sha256(leaves.encode()).hexdigest(),
            "plan": self.plan.shared_digest,
        }

    @property
    def leaves(self) -> list[LeafSpec]:
        """Reduced leaves, which must be equal on all ranks."""
        return [self.plan.leaves[i] for i in self.plan.reduced]


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
    problems = [other.get("failure", "") for other in received]
    check_no_failure(problems, "could not build its plan", failure)
    if terms is None:
        raise InternalError("a rank has neither a configuration nor a failure")
    if all(other == received[0] for other in received):
        return terms
    plans_only = all({**other, "plan": None} == {**received[0], "plan": None} for other in received)
    if plans_only and not terms.given:
        slots = {leaf: slot for slot, leaf in enumerate(terms.plan.reduced)}
        orders = exchange(transport, [slots[leaf] for leaf in terms.plan.order], [int])
        return replace(terms, plan=_reordered(terms.plan, orders[0]))
    for name in [name for name in summary if name not in ("leaves", "plan")]:
        way_out = _WAY_OUT.get(name, f"pass the same {name} on every rank")
        check_equal(name, [other[name] for other in received], way_out)
    check_equal_leaves(exchange(transport, terms.leaves, LEAVES))
    rank = next(rank for rank, other in enumerate(received) if other != received[0])
    raise PlanMismatchError(
        f"ranks 0 and {rank} have the same leaves but other buckets or order; pass the same plan "
        f"on every rank (BucketPlan.to_json carries one over)"
    )


def agree_on_hook(transport: Transport, hook: Hook[Any] | None) -> None:
    """Compare hooks over ranks; a collective call.

    Raises:
        PlanMismatchError: on every rank, if any two differ.
    """
    names = exchange(transport, _hook_name(hook), optional(str), "hooks")
    check_equal("the hook", names, _WAY_OUT["hook"])


def _groups_text(noise: Sequence[str]) -> str | None:
    """Text of the groups of leaves, which differs if any leaf is in another group."""
    if not noise:
        return None
    digest = hashlib.sha256(json.dumps(noise).encode()).hexdigest()
    groups = (f"{name}: {counted(count, 'leaf')}" for name, count in Counter(noise).items())
    return f"{', '.join(groups)} ({digest[:8]})"


def _hook_name(hook: Hook[Any] | None) -> str | None:
    return None if hook is None else hook.name


def check_no_failure(problems: Sequence[str], what: str, own: Exception | None) -> None:
    """Raise an error if a rank reported one.

    Args:
        problems: error text of each rank, by rank; empty for none.
        what: the failed action, for the error.
        own: this rank's error.

    Raises:
        Exception: `own`, on the rank that has it.
        PlanMismatchError: another rank has an error; names it.
    """
    if own is not None:
        raise own
    for rank, problem in enumerate(problems):
        if problem:
            raise PlanMismatchError(f"rank {rank} {what}: {problem}")


def check_equal_leaves(received: Sequence[Sequence[Any]]) -> None:
    """Raise `PlanMismatchError` if a rank's leaves, as `LEAVES`, differ from those of rank 0."""
    for rank, leaves in enumerate(received):
        difference = leaf_difference(0, received[0], rank, leaves)
        if difference is not None:
            raise PlanMismatchError(
                f"{difference}; build every rank's parameters alike, or leave it out on every "
                f"rank: select= of a GradSync, _set_params_and_buffers_to_ignore_for_model of a "
                f"wrapped module"
            )


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
