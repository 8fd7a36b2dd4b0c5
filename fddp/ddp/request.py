"""What the wrapper asks of the engine: DDP's bucket plan for a module's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fddp.core.plan.plan import plan_leaves
from fddp.core.schedule.topology import Topology
from fddp.ddp.arguments import Options
from fddp.runtime.agreement import Rebuild, SyncConfig
from fddp.runtime.nonfinite import Policy
from fddp.transport import Transport, TransportName
from fddp.transport.mesh import GroupAndTopology
from fddp.tree.planner import plan_buckets


@dataclass(frozen=True)
class ModuleRequest:
    """A module's parameters, and how they are to be bucketed.

    Attributes:
        params: those to synchronise, by name, in the order of their registration.
        options: has caps, and the names of parameters with sparse gradients.
        span: whom to communicate with.
        last_is_small: whether the first cap is that of the bucket which leaves last, also once the
            plan has been rebuilt (`DDP_SET_LAST_BUCKET_CAP`).
        transport: name of the transport.
        nonfinite: what becomes of a step with a number that is not finite.
    """

    params: Mapping[str, Tensor]
    options: Options
    span: GroupAndTopology
    last_is_small: bool = False
    transport: TransportName = "auto"
    nonfinite: Policy = "propagate"

    usable_timeout_s = None  # the group's own
    is_foreign = False
    title = "GradSync"

    def terms(self, transport: Transport) -> SyncConfig:
        """What ranks must have in common.

        Like DDP, the first plan counts caps from the parameters that were registered first, whose
        gradients come last; the rebuilt one counts them in the order in which gradients come.

        Raises:
            ValueError: the transport is not of the kind that was asked for.
        """
        if self.transport not in ("auto", transport.name):
            raise ValueError(
                f"transport={self.transport!r} does not fit this group; "
                f"pass 'auto' or {transport.name!r}"
            )
        plan = plan_buckets(dict(self.params), sparse=self.options.sparse & self.params.keys())
        first = plan_leaves(
            plan.leaves,
            order=plan.order,
            caps_bytes=self.options.initial_caps_bytes,
            from_back=True,
        )
        return SyncConfig(
            plan=first,
            given=False,
            transport=self.transport,
            reduce_dtype=None,
            algorithm="all_reduce",
            topology=Topology(world=transport.world_size),
            schedule=None,
            rebuild=Rebuild(self.options.rebuilt_caps_bytes, self.last_is_small),
            skips_unused=self.options.skip_all_reduce_unused_params,
            nonfinite=self.nonfinite,
        )
