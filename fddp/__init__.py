"""Functional data-parallel gradient synchronisation for PyTorch.

Training
    GradSync                                 average gradients over ranks; `value_and_grad`, `tune`
    uneven, EXHAUSTED                        loops over inputs of unequal length
    stop_on_signal                           a signal of one rank stops all at the same step
    VirtualSampler, virtual_rng              samples and random numbers of virtual ranks
    functionalize                            a module as a pure function of its parameters
    tree_map                                 map a function over the tensors of a tree
    as_transform                             a `GradSync` as an optax or torchopt transformation
    DistributedDataParallel                  the interface of torch's class
    numerics                                 loss scales and spikes of norms, as values
    averaging                                the parameters' mean every few steps: local SGD
    periodic                                 what averaging lacks: delays, outer optimizers, DiLoCo
    hooks                                    communication hooks that compress gradients

Operators and replicas
    pmean, psum, pmax, all_gather, reduce_scatter, all_to_all, broadcast_from
                                             collectives with derivatives
    sync_on_backward                         identity, whose backward averages
    Communicator                             ranks and caps of operators
    empty_shared                             tensors in memory that ranks share
    broadcast, check_replicas, reconcile     equal replicas: send, compare, repair; unlike
                                             broadcast_from, without derivatives

Plans and schedules
    plan_buckets, plan_optimal, rebucket     plan the buckets of a tree
    BucketPlan, Bucket                       plans as values
    make_schedule, check_schedule            the operations of a step; their proof
    Schedule, Topology                       schedules as values
    simulate, Jitter                         the time of a step without ranks
    CostModel, PRESETS, measure_cost         the time of collectives

Watching
    SyncInfo, GraphInfo                      statistics and timeline of one step; those in a graph
    watch                                    monitors: phases of steps on all ranks, and slow ranks
    flight, dump_flights                     the newest operations, for diagnosis

Tools
    loopback                                 ranks as threads of this process
    testing, viz, jax                        submodules with extras of their names
    integrations                             Accelerate, Lightning, Transformers and Ignite
    extend                                   parts for packages that build on fddp: Op, LeafSpec

Every error that is raised on purpose is in `errors` and derives from FddpError; each is also
a name of this module, such as `fddp.RankLostError`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fddp import errors, hooks
from fddp.collectives.communicator import Communicator
from fddp.collectives.operators import (
    all_gather,
    all_to_all,
    broadcast_from,
    pmax,
    pmean,
    psum,
    reduce_scatter,
    sync_on_backward,
)
from fddp.collectives.replicas.broadcast import broadcast
from fddp.collectives.replicas.check import check_replicas
from fddp.collectives.replicas.reconcile import reconcile
from fddp.core.check import check_schedule
from fddp.core.plan.plan import Bucket, BucketPlan, rebucket
from fddp.core.plan.plan import LeafSpec as LeafSpec
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.op import Op as Op
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import PRESETS, CostModel
from fddp.core.sim.simulator import Jitter, simulate
from fddp.ddp import DistributedDataParallel
from fddp.errors import *  # noqa: F403 - those of its __all__, for type checkers too
from fddp.sync.functional_module import functionalize
from fddp.sync.grad_sync import GradSync
from fddp.sync.measure import measure_cost
from fddp.sync.rounds import EXHAUSTED
from fddp.sync.stopping import stop_on_signal
from fddp.sync.transform import as_transform
from fddp.sync.uneven_inputs import uneven
from fddp.sync.virtual_random import virtual_rng
from fddp.sync.virtual_sampler import VirtualSampler
from fddp.telemetry.flight.dump import dump_flights
from fddp.telemetry.flight.recorder import flight
from fddp.telemetry.step_info import GraphInfo, SyncInfo
from fddp.transport import loopback
from fddp.transport.backend import registration
from fddp.transport.backend.shared_tensors import empty_shared
from fddp.tree.planner import plan_buckets, plan_optimal
from fddp.tree.pytree import tree_map

if TYPE_CHECKING:
    from fddp import (
        averaging as averaging,
    )
    from fddp import (
        extend as extend,
    )
    from fddp import (
        integrations as integrations,
    )
    from fddp import (
        jax as jax,
    )
    from fddp import (
        numerics as numerics,
    )
    from fddp import (
        periodic as periodic,
    )
    from fddp import (
        testing as testing,
    )
    from fddp import (
        viz as viz,
    )
    from fddp import (
        watch as watch,
    )

__version__ = "0.1.0"

__all__ = [
    "EXHAUSTED", "PRESETS", "Bucket", "BucketPlan", "Communicator", "CostModel",
    "DistributedDataParallel", "GradSync", "GraphInfo", "Jitter", "Schedule", "SyncInfo",
    "Topology", "VirtualSampler", "all_gather", "all_to_all", "as_transform", "broadcast",
    "broadcast_from", "check_replicas", "check_schedule", "dump_flights", "empty_shared", "errors",
    "flight", "functionalize", "hooks", "loopback", "make_schedule", "measure_cost",
    "plan_buckets", "plan_optimal", "pmax", "pmean", "psum", "rebucket", "reconcile",
    "reduce_scatter", "simulate", "stop_on_signal", "sync_on_backward", "tree_map", "uneven",
    "virtual_rng",
]  # fmt: skip

registration.register()

# They stand on the names above. Most need packages that fddp does not.
_ON_FIRST_USE = (
    *("averaging", "extend", "integrations", "jax", "numerics", "periodic", "testing", "viz"),
    "watch",
)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ON_FIRST_USE, "__version__"])


if not TYPE_CHECKING:  # a type checker would take any name for one of the module's

    def __getattr__(name: str) -> Any:
        if name in _ON_FIRST_USE:
            return importlib.import_module(f"fddp.{name}")
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
