"""Arguments of a `GradSync`, and the configuration that they give on this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch

from fddp.core.plan.defaults import CAP_MB, FIRST_MB, timeout_error
from fddp.core.plan.plan import BucketPlan
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.schedule.virtual import VirtualRanks
from fddp.core.text import choice_text, counted, leaf_text
from fddp.errors import NoGradientError
from fddp.hooks.hook import Hook
from fddp.runtime.agreement import Rebuild, ReportTime, SyncConfig
from fddp.runtime.nonfinite import Policy
from fddp.transport import Transport, TransportName
from fddp.transport.mesh import GroupAndTopology, transport_error
from fddp.tree.foreign import aligned, holds_foreign
from fddp.tree.planner import plan_buckets
from fddp.tree.pytree import flatten

Reduction = Literal["all_reduce", "hierarchical", "reduce_scatter"]

NoiseGroups: TypeAlias = "Callable[[str], str] | Literal[True] | None"
"""Groups of leaves whose squared norms are measured: by path, or True for a single one."""

ALL_LEAVES = "all"
"""Name of the single group."""


class EngineSpec(Protocol):
    """Request that an engine is made from.

    Attributes:
        span: group and axes of the ranks.
        title: purpose of the engine, which must be the same on all ranks.
        transport: name of the transport.
        timeout_s: limit of each operation; may be invalid, which `terms` reports.
        is_foreign: True if this rank's trees have arrays of another library than torch.
    """

    @property
    def span(self) -> GroupAndTopology: ...
    @property
    def title(self) -> str: ...
    @property
    def transport(self) -> TransportName: ...
    @property
    def timeout_s(self) -> float | None: ...
    @property
    def is_foreign(self) -> bool: ...

    def terms(self, transport: Transport) -> SyncConfig:
        """Return the configuration, which ranks compare; raises this rank's errors."""

    def devices(self, plan: BucketPlan) -> dict[str, torch.device]:
        """Return the accelerators of this rank's leaves by their label in the agreed plan, as far
        as they are known."""


@dataclass(frozen=True)
class Request:
    """Unchecked arguments of a `GradSync`, with its names except for these.

    Attributes:
        source: a tree, a plan or a schedule.
        span: group and axes of the ranks.
        title: purpose of the engine.
    """

    source: Any
    bucket_cap_mb: float | Sequence[float]
    first_bucket_mb: float
    sparse: Collection[str]
    select: Callable[[str], bool] | None
    reduce_dtype: torch.dtype | None
    algorithm: Reduction
    span: GroupAndTopology
    transport: TransportName
    timeout_s: float | None
    hook: Hook[Any] | None
    deterministic: bool = False
    virtual_ranks: int | None = None
    nonfinite: Policy = "propagate"
    report: ReportTime = "now"
    noise: NoiseGroups = None
    title: str = "GradSync"

    @property
    def is_foreign(self) -> bool:
        """True if this rank's trees have arrays of another library; False for plans."""
        if isinstance(self.source, (BucketPlan, Schedule)):
            return False
        try:
            return holds_foreign(flatten(self.source)[0])
        except Exception:  # `terms` raises it for all ranks
            return False

    def devices(self, plan: BucketPlan) -> dict[str, torch.device]:
        """Return the accelerators of the leaves; none for plans."""
        if isinstance(self.source, (BucketPlan, Schedule)):
            return {}
        return accelerators(plan, flatten(self.source)[0])

    def terms(self, transport: Transport) -> SyncConfig:
        """Return the configuration, which ranks compare.

        Raises:
            NoGradientError: there is nothing to reduce.
            ValueError, TypeError: an invalid argument.
        """
        problem = timeout_error(self.timeout_s) or transport_error(self.transport, transport)
        if problem is not None:
            raise problem
        if callable(self.algorithm):
            raise TypeError(
                "algorithm must be a name, got a function; pass GradSync(fddp.make_schedule("
                "fddp.plan_buckets(tree), topology, algorithm=function))"
            )
        options = ("algorithm", Reduction), ("nonfinite", Policy), ("report", ReportTime)
        for name, choices in options:
            if getattr(self, name) not in get_args(choices):
                raise ValueError(choice_text(name, getattr(self, name), get_args(choices)))
        if self.hook is not None and not isinstance(self.hook, Hook):
            raise TypeError(
                f"hook must be a fddp.hooks.Hook or 'auto', got a {type(self.hook).__name__}; "
                f"fddp.hooks.TorchHook(state, hook) adapts a hook of torch's "
                f"DistributedDataParallel"
            )
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"deterministic must be True or False, got {self.deterministic!r}")
        virtual_ranks = self._virtual_ranks(transport.world_size)
        is_deterministic = (
            self.deterministic
            or virtual_ranks is not None
            or (isinstance(self.source, Schedule) and self.source.deterministic)
        )
        if is_deterministic and self.hook is not None:
            raise ValueError(deterministic_hook_error(self.hook))
        check_report(self.report, hook=self.hook)
        check_noise(self.noise, report=self.report, hook=self.hook)
        if self.span.problem is not None:
            raise self.span.problem
        plan = self._plan()
        topology = self._topology(transport.world_size)
        sharded = isinstance(self.source, Schedule) and self.source.result == "sharded_mean"
        if self.noise is not None and (sharded or self.algorithm == "reduce_scatter"):
            raise ValueError(
                "noise needs the norm of the whole mean, and with shards each rank has that of its "
                "own; leave out noise, or choose an algorithm whose result is the whole mean"
            )
        given = isinstance(self.source, (BucketPlan, Schedule))
        # A rebuild would change shards.
        rebuilds = not given and self.algorithm != "reduce_scatter"
        return SyncConfig(
            plan=plan,
            given=given,
            transport=self.transport,
            reduce_dtype=_dtype_name(self.reduce_dtype),
            algorithm=self.algorithm,
            topology=topology,
            schedule=self.source if isinstance(self.source, Schedule) else None,
            rebuild=Rebuild(plan.caps_bytes) if rebuilds else None,
            hook=self.hook,
            deterministic=is_deterministic,
            virtual_ranks=virtual_ranks,
            nonfinite=self.nonfinite,
            report=self.report,
            noise=groups_of_leaves(self.noise, plan),
        )

    def _virtual_ranks(self, world_size: int) -> int | None:
        """Return the number of virtual ranks, if it suits the group and the schedule."""
        number = self.virtual_ranks
        if isinstance(self.source, Schedule):
            virtual = self.source.virtual
            found = None if virtual is None else virtual.count
            if number not in (None, found):
                raise ValueError(
                    f"a schedule that is passed in can't be changed, and this one has "
                    f"{'no' if found is None else found} virtual ranks; pass "
                    f"virtual_ranks={number} to make_schedule instead"
                )
            return found
        if number is not None:
            VirtualRanks.over(number, world_size)  # raises its errors for all ranks
        return number

    def _plan(self) -> BucketPlan:
        if not isinstance(self.source, (BucketPlan, Schedule)):
            plan = plan_buckets(
                self.source,
                bucket_cap_mb=self.bucket_cap_mb,
                first_bucket_mb=self.first_bucket_mb,
                sparse=self.sparse,
                select=self.select,
            )
            return aligned(plan) if self.is_foreign else plan
        plan = self.source.plan if isinstance(self.source, Schedule) else self.source
        if not plan.buckets:
            raise NoGradientError(
                f"the plan has {counted(len(plan.leaves), 'leaf')} and no bucket, so nothing "
                f"would be averaged; pass a plan with buckets"
            )
        options = (self.bucket_cap_mb, self.first_bucket_mb, len(self.sparse), self.select)
        if options != (CAP_MB, FIRST_MB, 0, None):
            raise ValueError(
                "a plan that is passed in can't be changed; pass bucket_cap_mb, first_bucket_mb, "
                "sparse and select to plan_buckets instead"
            )
        return plan

    def _topology(self, world_size: int) -> Topology:
        if isinstance(self.source, Schedule):
            return self._schedule_topology(self.source, world_size)
        topology = self.span.topology or Topology(world=world_size)
        if topology.world_size != world_size:
            raise ValueError(
                f"the mesh {topology} has {counted(topology.world_size, 'rank')}, and the group "
                f"{world_size}; pass a mesh with as many ranks as the group"
            )
        if self.algorithm == "hierarchical" and len(topology.axes) < 2:
            raise ValueError(
                f"algorithm='hierarchical' needs a mesh of at least two axes, such as "
                f"mesh=fddp.Topology(host=4, local=8) for 32 ranks, got {topology}"
            )
        return topology

    def _schedule_topology(self, schedule: Schedule, world_size: int) -> Topology:
        if self.deterministic and not schedule.deterministic:
            raise ValueError(
                "a schedule that is passed in can't be changed, and this one is not "
                "deterministic; pass deterministic=True to make_schedule instead"
            )
        if (self.algorithm, self.reduce_dtype) != ("all_reduce", None):
            raise ValueError(
                "a schedule that is passed in can't be changed; pass algorithm and reduce_dtype "
                "to make_schedule instead"
            )
        if schedule.result == "replicated":
            raise ValueError(
                "the schedule's result is 'replicated', which reduces nothing; pass one whose "
                "result is 'replicated_mean' or 'sharded_mean'"
            )
        topology = schedule.topology
        if topology != (self.span.topology or topology) or topology.world_size != world_size:
            raise ValueError(
                f"the schedule is for {topology}, and the group has {counted(world_size, 'rank')}"
                + (f" in {self.span.topology}" if self.span.topology else "")
                + "; make a schedule for the group's topology"
            )
        return topology


def check_report(report: ReportTime, *, hook: Hook[Any] | None) -> None:
    """Raise a ValueError if a hook needs the report before results are used."""
    if report == "next" and hook is not None:
        raise ValueError(
            f"{hook.name} may fail on one rank, which the report has to say before results are "
            f"used; leave out the hook, or report='next'"
        )


def check_noise(noise: NoiseGroups, *, report: ReportTime = "now", hook: Hook[Any] | None) -> None:
    """Raise a ValueError if squared norms can't be measured in every step."""
    if noise is None:
        return
    if report == "next":
        raise ValueError(
            "noise and report='next' can't be combined: squared norms of all ranks are part of the "
            "report, which is to be read after the step; leave out one of the two"
        )
    if hook is not None and hook.raw:
        raise ValueError(
            f"noise and {hook.name} can't be combined: its results need not be the mean of "
            f"gradients; use a hook of fddp.hooks, or leave out noise"
        )


def groups_of_leaves(noise: NoiseGroups, plan: BucketPlan) -> tuple[str, ...]:
    """Return the group of each reduced leaf whose squared norms are measured; () for none.

    Raises:
        ValueError: a leaf is sparse.
        TypeError: `noise` is of another type, or returned no text.
    """
    if noise is None:
        return ()
    if noise is not True and not callable(noise):
        raise TypeError(
            f"noise must be True, or a function from the path of a leaf to the name of its group, "
            f"or None, got {noise!r}"
        )
    paths = [plan.paths[leaf] for leaf in plan.reduced]
    for bucket in plan.buckets:
        if bucket.sparse:
            raise ValueError(
                f"noise can't be measured of {leaf_text(plan.paths[bucket.leaves[0]])}, whose "
                f"gradients are sparse: they are summed after the report; make them dense, or "
                f"leave out noise"
            )
    names = [ALL_LEAVES if noise is True else noise(path) for path in paths]
    for path, name in zip(paths, names, strict=True):
        if not isinstance(name, str):
            raise TypeError(
                f"noise must return the name of a group for each leaf, got {name!r} for "
                f"{leaf_text(path)}"
            )
    return tuple(names)


def accelerators(plan: BucketPlan, leaves: Sequence[Any]) -> dict[str, torch.device]:
    """Return the accelerators of a tree's tensors, by their label in its plan."""
    found: dict[str, torch.device] = {}
    for spec, leaf in zip(plan.leaves, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta"):
            found.setdefault(spec.device, leaf.device)
    return found


def deterministic_hook_error(hook: Hook[Any]) -> str:
    """Text of the error for a hook with deterministic sums."""
    return (
        f"{hook.name} sums in its own order, which deterministic=True does not allow; leave out "
        f"one of the two"
    )


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"reduce_dtype must be torch.float32 or torch.float64, got {dtype}")
    return None if dtype is None else str(dtype).removeprefix("torch.")
