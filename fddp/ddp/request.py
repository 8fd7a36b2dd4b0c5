"""Engine specification of a wrapped module: DDP's bucket plan for its parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.schedule.topology import Topology
from fddp.core.schedule.virtual import VirtualRanks
from fddp.ddp.arguments import Options
from fddp.ddp.parameter_watch import ParameterWatch
from fddp.runtime.agreement import Rebuild, SyncConfig
from fddp.sync.request import accelerators, check_noise, groups_of_leaves
from fddp.transport import LoopbackGroup, Transport, TransportName
from fddp.transport.mesh import GroupAndTopology, transport_error
from fddp.tree.planner import plan_buckets
from fddp.tree.pytree import flatten


@dataclass(frozen=True)
class ModuleRequest:
    """Parameters of a module, and their bucketing.

    Attributes:
        params: parameters to synchronise, by name, in the order of their registration.
        options: settings of the wrapper.
        span: group of the ranks.
        last_is_small: True if the first cap belongs to the bucket that is launched last, also after
            the plan has been rebuilt (`DDP_SET_LAST_BUCKET_CAP`).
    """

    params: Mapping[str, Tensor]
    options: Options
    span: GroupAndTopology
    last_is_small: bool = False

    timeout_s = None  # the group's own
    is_foreign = False
    title = "DistributedDataParallel"

    def devices(self, plan: BucketPlan) -> dict[str, torch.device]:
        """Return the accelerators of the parameters."""
        return accelerators(plan, flatten(dict(self.params))[0])

    @property
    def transport(self) -> TransportName:
        """Name of the transport."""
        return self.options.arguments.transport

    def terms(self, transport: Transport) -> SyncConfig:
        """Return the configuration that ranks must have in common.

        As in DDP, the first plan counts caps from the parameters registered first, whose gradients
        arrive last, and launches the bucket with the earliest registered parameter last. The
        rebuilt plan counts caps in the order in which gradients arrive.

        Raises:
            ValueError: the transport is not of the requested kind, or noise can't be measured.
            TypeError: `noise` is of another type.
        """
        problem = transport_error(self.transport, transport)
        if problem is not None:
            raise problem
        arguments = self.options.arguments
        if arguments.virtual_ranks is not None:
            VirtualRanks.over(arguments.virtual_ranks, transport.world_size)  # raises its errors
        check_noise(arguments.noise, report=arguments.report, hook=None)
        plan = plan_buckets(dict(self.params), sparse=self.options.sparse & self.params.keys())
        first = plan_leaves(
            plan.leaves,
            order=plan.order,
            caps_bytes=self.options.initial_caps_bytes,
            from_back=True,
        )
        position = {leaf: number for number, leaf in enumerate(plan.order)}  # registered last: 0
        buckets = sorted(first.buckets, key=lambda bucket: max(position[i] for i in bucket.leaves))
        return SyncConfig(
            plan=replace(first, buckets=tuple(buckets)),
            given=False,
            transport=self.transport,
            reduce_dtype=None,
            algorithm="all_reduce",
            topology=Topology(world=transport.world_size),
            schedule=None,
            rebuild=Rebuild(self.options.rebuilt_caps_bytes, self.last_is_small),
            skips_unused=arguments.skip_all_reduce_unused_params,
            deterministic=arguments.virtual_ranks is not None,
            virtual_ranks=arguments.virtual_ranks,
            nonfinite=arguments.nonfinite,
            report=arguments.report,
            noise=groups_of_leaves(arguments.noise, plan),
        )


@dataclass(frozen=True)
class FailedRequest:
    """Request of a rank that can't make its wrapper, and reports the reason to the others.

    Attributes:
        problem: the reason.
        span: group of the ranks.
        transport: name of the transport.
    """

    problem: Exception
    span: GroupAndTopology
    transport: TransportName

    timeout_s = None  # the group's own
    is_foreign = False
    title = ModuleRequest.title

    def terms(self, transport: Transport) -> SyncConfig:
        """Raise the problem."""
        raise self.problem

    def devices(self, plan: BucketPlan) -> dict[str, torch.device]:
        """Return none: there are no parameters."""
        return {}


def current_request(
    watch: ParameterWatch, options: Options, group: dist.ProcessGroup | LoopbackGroup
) -> ModuleRequest:
    """Return the request for the current parameters of a module."""
    return ModuleRequest(
        params=watch.find_replaced(),
        options=options,
        span=GroupAndTopology(group, None),
        last_is_small=os.environ.get("DDP_SET_LAST_BUCKET_CAP", "0") == "1",
    )
