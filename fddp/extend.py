"""Parts for packages that build on fddp, as `fddp.watch` and `fddp.testing` do.

These names are public, and may change between minor versions.

    Group, Mesh, LoopbackGroup, resolve, resolve_mesh
                                groups of ranks, and the arguments that name them
    mirrored, mirrored_process_group, result_of_two, Operation, Rendezvous
                                a group of one thread, which sees each collective
    in_turns                    ranks as threads of which one computes at a time
    VirtualRanks                virtual ranks of each rank
    communicator_of, GroupRegistry, run_operator, Reduction, SUMMABLE_DTYPES
                                communicators, objects of groups, and a reduction of leaves
    call_site, Site             a line of the caller's code
    entrance                    a public function, whose errors have short tracebacks
    to_array, to_tensor         conversion of JAX arrays
    exchange, Schema, MappingOf, optional, check_equal
                                values of all ranks, validated and compared
    tree_flatten, check_paths, is_dtensor
                                leaves of a tree, their paths, and one of which ranks have parts
    LeafSpec, plan_leaves, dense_strides, summary, optimal_plan, Target
                                plans of leaves, without a tree
    Op, Region, Algorithm, Chain, Chains, Scaling, replay, is_collective
                                schedules, and the rule by which they are launched
    Cost, LinkAlgorithm, ReadyTimes, preset_or_model, ready_seconds
                                arguments of `fddp.simulate`
    StepHandle                  result of `GradSync.start`
    StepTimes, BucketTimes, Interval, waits_since, Timeline, Span, COMPUTE
                                times of a step, and waits of this thread
    Flight, find_divergences    dumps of flight recorders, compared
    counted, leaf_text, suggestion, size_text, unit_of, MIB, rank_names, plain_table, html_table
                                texts of reports
"""

from fddp.collectives.communicator import communicator_of
from fddp.collectives.compiled_calls import Reduction, run_operator
from fddp.collectives.exchange import exchange
from fddp.collectives.group_registry import GroupRegistry
from fddp.core.entrance import entrance
from fddp.core.plan.defaults import MIB
from fddp.core.plan.leaf import LeafSpec, dense_strides
from fddp.core.plan.plan import plan_leaves, summary
from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.launch import replay
from fddp.core.protocol.messages import MappingOf, Schema, optional
from fddp.core.schedule.builder import Algorithm, Chain, Chains
from fddp.core.schedule.op import Op, Region, is_collective
from fddp.core.schedule.schedule import Scaling
from fddp.core.schedule.virtual import VirtualRanks
from fddp.core.sim.cost import LinkAlgorithm, preset_or_model
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import Cost, ReadyTimes, ready_seconds
from fddp.core.tables import html_table, plain_table
from fddp.core.text import counted, leaf_text, size_text, suggestion, unit_of
from fddp.core.timeline import COMPUTE, BucketTimes, Interval, Span, StepTimes, Timeline
from fddp.native.memory import is_dtensor
from fddp.sync.step_handle import StepHandle
from fddp.telemetry.call_site import Site, call_site
from fddp.telemetry.flight.divergence import find_divergences
from fddp.telemetry.flight.log import Flight, rank_names
from fddp.telemetry.waits import waits_since
from fddp.transport import Group, LoopbackGroup, resolve
from fddp.transport.loopback import Rendezvous
from fddp.transport.mesh import Mesh, resolve_mesh
from fddp.transport.mirror import mirrored, result_of_two
from fddp.transport.mirror_c10d import mirrored_process_group
from fddp.transport.operation import SUMMABLE_DTYPES, Operation
from fddp.transport.turns import in_turns
from fddp.tree.foreign import to_array, to_tensor
from fddp.tree.pytree import check_paths
from fddp.tree.pytree import flatten as tree_flatten

__all__ = [
    "COMPUTE", "MIB", "SUMMABLE_DTYPES", "Algorithm", "BucketTimes", "Chain", "Chains", "Cost",
    "Flight", "Group", "GroupRegistry", "Interval", "LeafSpec", "LinkAlgorithm", "LoopbackGroup",
    "MappingOf", "Mesh", "Op", "Operation", "ReadyTimes", "Reduction", "Region", "Rendezvous",
    "Scaling", "Schema", "Site", "Span", "StepHandle", "StepTimes", "Target", "Timeline",
    "VirtualRanks", "call_site", "check_equal", "check_paths", "communicator_of", "counted",
    "dense_strides", "entrance", "exchange", "find_divergences", "html_table", "in_turns",
    "is_collective", "is_dtensor", "leaf_text", "mirrored", "mirrored_process_group",
    "optimal_plan", "optional", "plain_table", "plan_leaves", "preset_or_model", "rank_names",
    "ready_seconds", "replay", "resolve", "resolve_mesh", "result_of_two", "run_operator",
    "size_text", "suggestion", "summary", "to_array", "to_tensor",
    "tree_flatten", "unit_of", "waits_since",
]  # fmt: skip
