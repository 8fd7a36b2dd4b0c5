"""Streaming DiLoCo: bandwidth that a utilisation of the compute needs.

A. Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free
Lunch", arXiv 2501.18512, Table 4: Gbit/s to reach a compute utilisation (the time of the compute
divided by the time of training), from the authors' simulator, which is not published. H is 100
steps, and a fragment has 3 layers. As in their Figures 2 and 3, layers are strided over the
fragments, and each layer has a forward, a backward and a reduction of its own.

`fddp.simulate` simulates one step. These methods reduce a fragment of the layers in some steps
only, and `stall_s` turns one simulated step into the delay of a later one: each layer of the
fragment is sent when its backward is done, and is needed by its forward in the next step, or
`delay` steps later if communication overlaps with compute. All messages of a fragment have arrived
before the next fragment is sent, so the delays of a period add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.literature.models import BACKWARD_SHARE
from benchmarks.literature.tables import Result, Row
from fddp.core.plan.leaf import ITEM_BYTES, LeafSpec
from fddp.core.plan.plan import plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.schedule import Schedule
from fddp.core.sim.cost import CostModel
from fddp.core.sim.simulator import simulate

RANKS = 2
"""Number of ranks. An all-reduce between two moves the bytes of the buffer once each way, as the
paper's Table 1 implies: 109 hours at 1 Gbit/s are 16.2 s for each of the 0.67 h / 0.1 s steps, and
10**9 parameters have 16 Gbit in bfloat16."""

GRID_GBIT_S = np.logspace(-1.0, 3.0, 50)
"""Bandwidths of the published table, read off it: each of its values is within 0.06 Gbit/s of one
of these, whose steps are a factor of 1.207."""

UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)

_PERIOD = 100  # steps, H in the paper
_LAYERS_IN_FRAGMENT = 3
_BISECTIONS = 20  # of four decades: relative precision 1e-5
_GRID_PRECISION = 0.002  # a bandwidth so little above a point of the grid counts as that point
_SOURCE = "arXiv 2501.18512, Table 4"


@dataclass(frozen=True)
class Model:
    """A row group of the table.

    Attributes:
        name: number of parameters, as text.
        parameters: number of parameters, alike in all layers.
        layers: number of layers.
        step_s: seconds of compute of a step; two thirds are backward.
    """

    name: str
    parameters: float
    layers: int
    step_s: float


@dataclass(frozen=True)
class Method:
    """A method that averages over the ranks.

    Attributes:
        name: as in the table.
        period: every fragment is averaged once in this many steps.
        layers_in_fragment: number of layers that are averaged together; 0 for all.
        delay: number of steps by which the averages may arrive later.
        bits: of a parameter on the wire.
    """

    name: str
    period: int
    layers_in_fragment: int = 0
    delay: int = 0
    bits: int = 16


MODELS = (Model("1B", 1e9, 24, 0.1), Model("10B", 1e10, 48, 0.8), Model("100B", 1e11, 108, 4.9))

DATA_PARALLEL = Method("data-parallel", 1)
METHODS = (
    DATA_PARALLEL,
    Method("DiLoCo", _PERIOD),
    Method("streaming", _PERIOD, _LAYERS_IN_FRAGMENT),
    Method("streaming, overlap", _PERIOD, _LAYERS_IN_FRAGMENT, delay=1),
    Method("streaming, overlap, 4 bits", _PERIOD, _LAYERS_IN_FRAGMENT, delay=1, bits=4),
)
"""Overlap is with one inner step: Table 1 allows "communication to be as long as a full compute
step"."""

PUBLISHED_GBIT_S = {
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}
"""Table 4 by model: a row for each of `METHODS`, a column for each of `UTILISATIONS`."""


@dataclass(frozen=True)
class Fragment:
    """Layers that are averaged in one step.

    Attributes:
        schedule: all-reduces of its layers, each in a bucket, in the order of backward.
        ready_s: seconds from the start of the step to the gradient of each layer.
        needed_s: seconds from the same start to the forward that uses the average.
    """

    schedule: Schedule
    ready_s: tuple[float, ...]
    needed_s: tuple[float, ...]


def fragments(model: Model, method: Method) -> list[Fragment]:
    """Return the fragments of a model.

    Raises:
        ValueError: fragments would be sent before the one before has arrived.

    Example:
        >>> found = fragments(Model("small", 4e6, 4, 1.2), Method("x", 10, 2, delay=1))
        >>> [[f"{time_s:.1f}" for time_s in one.ready_s] for one in found]
        [['1.2', '0.8'], ['1.0', '0.6']]
        >>> [[f"{time_s:.1f}" for time_s in one.needed_s] for one in found]
        [['2.4', '2.6'], ['2.5', '2.7']]
    """
    count = model.layers // (method.layers_in_fragment or model.layers)
    if method.period // count < 1 + method.delay:
        raise ValueError(f"{count} fragments in {method.period} steps, with a delay, would overlap")
    return [_fragment(model, method, range(first, model.layers, count)) for first in range(count)]


def _fragment(model: Model, method: Method, layers: Sequence[int]) -> Fragment:
    forward_s = (1.0 - BACKWARD_SHARE) * model.step_s / model.layers
    backward_s = BACKWARD_SHARE * model.step_s / model.layers
    nbytes = method.bits * model.parameters / model.layers / 8
    shape = (round(nbytes / ITEM_BYTES["bfloat16"]),)
    leaves = [LeafSpec(f"layer{layer}", shape, "bfloat16") for layer in layers]
    plan = plan_leaves(leaves, order=range(len(leaves))[::-1], caps_bytes=[1])
    return Fragment(
        make_schedule(plan, RANKS),
        tuple(model.step_s - layer * backward_s for layer in layers),
        tuple((1 + method.delay) * model.step_s + layer * forward_s for layer in layers),
    )


def stall_s(fragment: Fragment, gbit_s: float) -> float:
    """Return the seconds that forward passes wait for the averages of a fragment.

    Args:
        fragment: the fragment, sent in some step.
        gbit_s: bandwidth of a rank in Gbit/s, one way; a message has no latency.
    """
    cost = CostModel(0.0, 8e-9 / gbit_s)
    timeline = simulate(fragment.schedule, cost, fragment.ready_s)
    ends_s = {span.bucket: span.end_s for span in timeline.spans if span.kind == "all_reduce"}
    buckets = fragment.schedule.plan.bucket_of
    waits_s = [ends_s[buckets[leaf]] - needed_s for leaf, needed_s in enumerate(fragment.needed_s)]
    return max(0.0, *waits_s)


def utilisation(found: Sequence[Fragment], model: Model, method: Method, gbit_s: float) -> float:
    """Return the share of the compute in the time of a period."""
    compute_s = method.period * model.step_s
    return compute_s / (compute_s + sum(stall_s(fragment, gbit_s) for fragment in found))


def bandwidth_gbit_s(model: Model, method: Method, target: float) -> float:
    """Return the least bandwidth at which the utilisation is at least `target`."""
    found = fragments(model, method)
    low, high = 0.1, 1000.0
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        if utilisation(found, model, method, middle) < target:
            low = middle
        else:
            high = middle
    return high


def rows(model: Model) -> list[Row]:
    """Return the numbers of one model; those that are off by more than a step of the grid are
    missed."""
    found = []
    for method, published in zip(METHODS, PUBLISHED_GBIT_S[model.name], strict=True):
        for target, gbit_s in zip(UTILISATIONS, published, strict=True):
            ours = bandwidth_gbit_s(model, method, target)
            name = f"{model.name}, {method.name}, {target:.0%}: Gbit/s"
            missed = abs(grid_steps(ours, gbit_s)) > 1
            found.append(Row(name, gbit_s, ours, _SOURCE, missed=missed))
    return found


def grid_steps(ours: float, published: float) -> int:
    """Return the steps of the grid from the published bandwidth to the first that is at least ours.

    Example:
        >>> grid_steps(97.6, 86.8), grid_steps(16.02, 16.0), grid_steps(2.07, 1.7)
        (1, 0, 2)
    """
    first = np.searchsorted(GRID_GBIT_S, ours * (1.0 - _GRID_PRECISION))
    nearest = np.abs(np.log(GRID_GBIT_S / published)).argmin()
    return int(first - nearest)


def result() -> Result:
    """Compare all 75 numbers."""
    found = [row for model in MODELS for row in rows(model)]
    missed = [row.number.removesuffix(": Gbit/s") for row in found if row.missed]
    high = sum(row.deviation > 0.0 for row in found)
    notes = (
        "Inputs: parameters, layers and seconds of a step of the table; bfloat16; one step of "
        "overlap; strided fragments.",
        "Ours is the least bandwidth, theirs one of a grid with steps of a factor of 1.207. A "
        "number is missed if the next bandwidth of the grid is further than a step away.",
        f"{len(found) - len(missed)} of {len(found)} numbers are within a step of the grid; ours "
        f"is higher in {high}.",
        f"Missed: {'; '.join(missed) or 'none'}.",
    )
    return Result("Streaming DiLoCo (arXiv 2501.18512)", found, notes)
