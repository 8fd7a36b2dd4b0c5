"""Measurement of the cost of collectives, as samples for `CostModel.fit`.

A measurement issues several collectives at once, as a step does, and divides the time until the
last has finished by their number. In *busy* measurements the issuing thread computes meanwhile, as
during backward; on gloo, which runs on the same cores, both are slower then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple, overload

import torch

from fddp.core.entrance import entrance
from fddp.core.protocol.differences import check_equal
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import CollectiveKind, Sample
from fddp.runtime.agreement import exchange
from fddp.runtime.operations import start
from fddp.transport import Group, Transport, TransportName, open_transport
from fddp.transport.mesh import Mesh, resolve_mesh

DEFAULT_SIZES_BYTES = tuple(2**power for power in range(10, 26, 3))  # 1 KiB to 32 MiB

_REPEATS = 9
_BURST_BYTES = 2**20  # small collectives are issued together, up to this much
_BURST = 16  # and up to this many, which is enough to measure the throughput of a backend
_ITEM_BYTES = 4  # of float32
_SIDE = 256  # of the matrices that busy ranks multiply, in about a millisecond on one core


@overload
def measure_cost(
    group: Group | None = None,
    *,
    mesh: None = None,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = _REPEATS,
    device: torch.device | str | None = None,
    transport: TransportName = "auto",
    timeout_s: float | None = None,
) -> tuple[Sample, ...]: ...


@overload
def measure_cost(
    group: Group | None = None,
    *,
    mesh: Mesh,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = _REPEATS,
    device: torch.device | str | None = None,
    transport: TransportName = "auto",
    timeout_s: float | None = None,
) -> dict[str, tuple[Sample, ...]]: ...


@entrance
def measure_cost(
    group: Group | None = None,
    *,
    mesh: Mesh | None = None,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = _REPEATS,
    device: torch.device | str | None = None,
    transport: TransportName = "auto",
    timeout_s: float | None = None,
) -> tuple[Sample, ...] | dict[str, tuple[Sample, ...]]:
    """Time collectives over a group; a collective call, with the same result on all ranks.

    Times are those of the slowest rank. By default a call takes about three seconds for each axis,
    and more on slow links.

    Args:
        group: as for `GradSync`; the default group if None.
        mesh: as for `GradSync`; with it, each axis of more than one place is measured separately.
        sizes_bytes: sizes of the buffers, at least two for a fit, each rounded to a multiple that
            divides evenly over the ranks.
        repeats: number of samples of each kind and size.
        device: device of the buffers; None for the group's device for control words, "cpu" if the
            group supports it.
        transport, timeout_s: as for `GradSync`.

    Returns:
        Samples of all-reduces, idle and busy. With `mesh`, a dict of such tuples by axis; for more
        than one axis with idle samples of the reduce-scatters and all-gathers of hierarchical
        schedules.

    Raises:
        ValueError: fewer than 2 ranks, or sizes or repeats that are no positive ints.
        PlanMismatchError: ranks passed different arguments.
        FddpError: an error of the transport.

    Example:
        >>> import fddp
        >>> samples, same = fddp.loopback(
        ...     2, lambda group: measure_cost(group, sizes_bytes=(1024, 65536), repeats=3))
        >>> samples == same, len(samples)
        (True, 12)
        >>> from fddp.core.sim.cost import CostModel
        >>> CostModel.fit(samples).algorithm
        'ring'
    """
    span = resolve_mesh(group, mesh)
    if span.problem is not None:
        raise span.problem
    with open_transport(span.group, transport, timeout_s) as opened:
        if opened.world_size < 2:
            raise ValueError("a group of one rank has nothing to measure; it needs at least 2")
        topology = span.topology or Topology(world=opened.world_size)
        by_axis = measure_axes(
            opened, topology, sizes_bytes=sizes_bytes, repeats=repeats, device=device
        )
    return by_axis if span.topology is not None else by_axis["world"]


def measure_axes(
    transport: Transport,
    topology: Topology,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = _REPEATS,
    device: torch.device | str | None = None,
) -> dict[str, tuple[Sample, ...]]:
    """Return the samples of `measure_cost` by axis, on an open transport. The transport's subgroups
    of the same topology stay open."""
    device = torch.device(device) if device is not None else transport.control_device
    _check(transport, sizes_bytes, repeats, device)
    axes = [name for name, size in topology.axes if size > 1]
    transport.open_subgroups(topology, [(axis,) for axis in axes])
    kinds: list[CollectiveKind] = ["all_reduce"]
    if len(axes) > 1:
        kinds += ["reduce_scatter", "all_gather"]
    by_axis = {}
    for axis in axes:
        link = _Link(transport, axis, topology.size((axis,)), device)
        probes = [_Probe(kind, size, False) for kind in kinds for size in sizes_bytes]
        probes += [_Probe("all_reduce", size, True) for size in sizes_bytes]
        by_axis[axis] = _measure(link, probes, repeats)
    return by_axis


def largest(transport: Transport, values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over ranks, NaN if all are NaN; a collective call."""
    own = torch.tensor(values, dtype=torch.float64, device=transport.control_device)
    work = transport.all_gather(own)
    work.wait("the exchange of times")
    rows = torch.stack([row.cpu() for row in work.results])
    most = rows.nan_to_num(nan=-math.inf).amax(dim=0)
    return torch.where(most.isinf(), math.nan, most).tolist()


def _check(
    transport: Transport, sizes_bytes: Sequence[int], repeats: int, device: torch.device
) -> None:
    sizes = [*sizes_bytes] if isinstance(sizes_bytes, Sequence) else sizes_bytes
    received = exchange(transport, f"{sizes!r}, {repeats!r} and {device.type}", str, "measurements")
    subject = f"measure_cost on rank {transport.rank}: the value of sizes_bytes, repeats and device"
    check_equal(subject, received, "pass the same on every rank")
    if not isinstance(sizes_bytes, Sequence) or isinstance(sizes_bytes, str):
        raise ValueError(f"sizes_bytes must be a sequence of ints, got {sizes_bytes!r}")
    for name, number in [("repeats", repeats), *(("sizes_bytes", size) for size in sizes_bytes)]:
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}: {number!r} is no int of at least 1")


class _Link(NamedTuple):
    transport: Transport
    axis: str
    ranks: int
    device: torch.device


class _Probe(NamedTuple):
    kind: CollectiveKind
    size_bytes: int
    busy: bool

    def numel(self, ranks: int) -> int:
        """Return the number of elements of the buffer, a multiple of `ranks`."""
        return max(1, self.size_bytes // _ITEM_BYTES // ranks) * ranks


def _measure(link: _Link, probes: Sequence[_Probe], repeats: int) -> tuple[Sample, ...]:
    own_s: list[float] = []
    for probe in probes:
        if not probe.busy:  # a warm-up, which connects and touches memory
            _time_s(link, probe)
    for _ in range(repeats):
        own_s.extend(_time_s(link, probe) for probe in probes)
    slowest_s = largest(link.transport, own_s)
    return tuple(
        Sample(probe.kind, probe.numel(link.ranks) * _ITEM_BYTES, link.ranks, time_s, probe.busy)
        for probe, time_s in zip([*probes] * repeats, slowest_s, strict=True)
    )


def _time_s(link: _Link, probe: _Probe) -> float:
    """Return the seconds per collective of a burst."""
    numel = probe.numel(link.ranks)
    burst = max(1, min(_BURST, _BURST_BYTES // (numel * _ITEM_BYTES)))
    memory = link.transport.empty(burst * numel, torch.float32, link.device).zero_()
    buffers = memory.view(burst, numel).unbind(0)
    matrix = torch.ones(_SIDE, _SIDE, device=link.device)
    what = f"measuring {probe.kind} of {numel * _ITEM_BYTES} bytes along {link.axis}"
    # A barrier.
    link.transport.all_reduce(torch.zeros(1, device=link.device)).wait(what)
    start_s = time.perf_counter()
    axes = (link.axis,)
    works = [
        start(link.transport, probe.kind, buffer, axes=axes, record_time=True) for buffer in buffers
    ]
    while probe.busy and not all(work.done for work in works):
        matrix @ matrix
    for work in works:
        work.wait(what)
    waited_s = time.perf_counter()
    done_s = max(work.done_s or start_s for work in works)
    # The wait of an idle rank includes the reduction. On a GPU the host does not wait.
    end_s = done_s if probe.busy else max(done_s, waited_s)
    return (end_s - start_s) / burst
