"""Engine specification of a wrapped module: DDP's bucket plan for its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fddp.core.plan.plan import plan_leaves
from fddp.core.schedule.topology import Topology
from fddp.core.schedule.virtual import VirtualRanks
from fddp.ddp.arguments import Options
from fddp.runtime.agreement import Rebuild, SyncConfig
from fddp.runtime.nonfinite import Policy
from fddp.transport import Transport, TransportName
from fddp.transport.mesh import GroupAndTopology, transport_error
from fddp.tree.planner import plan_buckets


@dataclass(frozen=True)
class ModuleRequest:
    """Parameters of a module, and their bucketing.

    Attributes:
        params: parameters to synchronise, by name, in the order of their registration.
        options: caps, and the names of parameters with sparse gradients.
        virtual_ranks: number of virtual ranks, or None.
        last_is_small: True if the first cap belongs to the bucket that is launched last, also after
            the plan has been rebuilt (`DDP_SET_LAST_BUCKET_CAP`).
    """

    params: Mapping[str, Tensor]
    options: Options
    span: GroupAndTopology
    last_is_small: bool = False
    transport: TransportName = "auto"
    nonfinite: Policy = "propagate"
    virtual_ranks: int | None = None

    timeout_s = None  # the group's own
    is_foreign = False
    title = "DistributedDataParallel"

    def terms(self, transport: Transport) -> SyncConfig:
        """Return the configuration that ranks must have in common.

        As in DDP, the first plan counts caps from the parameters registered first, whose gradients
        arrive last, and launches the bucket with the earliest registered parameter last. The
        rebuilt plan counts caps in the order in which gradients arrive.

        Raises:
            ValueError: the transport is not of the requested kind.
        """
        problem = transport_error(self.transport, transport)
        if problem is not None:
            raise problem
        if self.virtual_ranks is not None:
            VirtualRanks.over(self.virtual_ranks, transport.world_size)  # raises its errors
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
            skips_unused=self.options.arguments.skip_all_reduce_unused_params,
            deterministic=self.virtual_ranks is not None,
            virtual_ranks=self.virtual_ranks,
            nonfinite=self.nonfinite,
        )
