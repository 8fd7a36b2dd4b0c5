"""Shared memory within a host and gloo across, on two hosts made of namespaces.

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.core.sim.cost import factors
from fddp.core.sim.simulator import collective_bytes
from tests.support.digests import digest
from tests.support.hosts import crossed_bytes
from tests.support.models import rand

if TYPE_CHECKING:
    from fddp.core.schedule.schedule import Schedule
    from fddp.sync.request import Reduction
    from fddp.transport import Group, TransportName
    from tests.support.hosts import Hosts

SQUARE = fddp.Topology(host=2, local=2)
STEPS = 3
# What stands around the payload of a segment: Ethernet 14, IPv4 20, TCP 32 with timestamps. As the
# interface segments nothing, an acknowledgement of 66 bytes may answer each segment of 1448.
PER_SEGMENT = 1 + (66 + 66) / 1448
PER_OPERATION = 6_000  # of gloo's own messages, per operation: 40 to 80 of some 100 bytes each


def params() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(1200, 700), "bias": torch.zeros(700)}


def expected_bytes(schedule: Schedule) -> tuple[float, int]:
    """Return the bytes that `schedule` sends across hosts in both directions, and the number of
    operations."""
    total, operations = 0.0, 0
    for op in schedule.ops:
        moves = op.kind in ("all_reduce", "reduce_scatter", "all_gather") and op.when == "always"
        if moves and "host" in op.axes:
            n = schedule.topology.size(op.axes)
            share = factors(op.kind, n, "ring").share
            total += collective_bytes(schedule, op) * share * schedule.topology.world_size
            operations += 1
    return total, operations


class Run(NamedTuple):
    """Observations of one rank over some steps."""

    transport: str
    reason: str
    crossed: float  # bytes a step through the link, both ways
    expected: float
    operations: int


RUNS: dict[str, tuple[Reduction, TransportName]] = {
    "hierarchical": ("hierarchical", "auto"),
    "over c10d": ("hierarchical", "c10d"),
    "flat": ("all_reduce", "auto"),
}


def runs_on_rank(rank: int, world_size: int) -> dict[str, Run]:
    return {name: run_of(rank, *chosen) for name, chosen in RUNS.items()}


def run_of(rank: int, algorithm: Reduction, transport: TransportName) -> Run:
    sync = fddp.GradSync(
        params(),
        mesh=SQUARE,
        algorithm=algorithm,
        bucket_cap_mb=1,
        transport=transport,
        timeout_s=30.0,
    )
    grads = {name: torch.full_like(p, 1.0 + rank) for name, p in params().items()}
    _, info = sync(grads, with_info=True)
    mean, crossed = measured_steps(sync, grads)
    assert torch.equal(mean["weight"], torch.full((1200, 700), 2.5))
    assert torch.equal(mean["bias"], torch.full((700,), 2.5))
    expected, operations = expected_bytes(sync.schedule)
    sync.close()
    return Run(info.transport, info.transport_reason, crossed, expected, operations)


def measured_steps(sync: fddp.GradSync, grads: Any) -> tuple[Any, float]:
    """The mean, and the bytes that cross in a step."""
    dist.barrier()
    before = crossed_bytes()
    dist.barrier()
    for _ in range(STEPS):
        mean = sync(grads)
    dist.barrier()
    return mean, (crossed_bytes() - before) / STEPS


@pytest.fixture(scope="module")
def runs(hosts: Hosts) -> list[dict[str, Run]]:
    """Of each rank."""
    return hosts.run(4, runs_on_rank)


@pytest.mark.parametrize("name", ["hierarchical", "over c10d"])
def test_only_scheduled_bytes_cross_hosts(runs: list[dict[str, Run]], name: str) -> None:
    """It is the schedule that saves what crosses, whatever carries it."""
    for run in (of_rank[name] for of_rank in runs):
        print(f"{name}: {run.crossed:.0f} bytes crossed a step, schedule: {run.expected:.0f}")
        assert run.expected == 2 * 4 * (1200 * 700 + 700), "half of it, both ways, by two pairs"
        most = run.expected * PER_SEGMENT + PER_OPERATION * (run.operations + 1)
        assert run.expected < run.crossed < most


def test_memory_is_shared_within_hosts_and_not_across(runs: list[dict[str, Run]]) -> None:
    reason = "the ranks are on 2 hosts or parts of them (0-1, 2-3)"
    for of_rank in runs:
        within, flat = of_rank["hierarchical"], of_rank["flat"]
        assert within.transport == "shm+c10d"
        assert within.reason == f"{reason}; shm within a host, c10d across"
        assert of_rank["over c10d"].transport == "c10d"
        print(f"flat: {flat.crossed:.0f} bytes crossed a step")
        assert (flat.transport, flat.reason) == ("c10d", reason)
        assert flat.crossed > 1.4 * within.crossed


class VirtualRun(NamedTuple):
    """Observations of one rank of steps over virtual ranks."""

    transport: str
    crossed: float  # bytes a step through the link, both ways
    left: tuple[int, ...]  # sums that each host sends
    operations: int
    found: str


COUNTS = (4, 5, 11)


def summand(number: int) -> dict[str, torch.Tensor]:
    return {name: (10.0 ** rand(*p.shape, seed=number)).to(p.dtype) for name, p in params().items()}


def over_virtual_ranks(group: Group | None, count: int, measured: bool) -> VirtualRun:
    options = {"mesh": SQUARE, "algorithm": "hierarchical"} if measured else {}
    with fddp.GradSync(
        params(), group=group, virtual_ranks=count, bucket_cap_mb=1, **options
    ) as sync:
        trees = sync.virtual_batches(summand)
        mean, crossed = sync(trees), 0.0
        if measured:
            mean, crossed = measured_steps(sync, trees)
        virtual = sync.schedule.virtual
        assert virtual is not None
        left = tuple(map(len, virtual.roots(2))) if measured else ()
        _, operations = expected_bytes(sync.schedule) if measured else (0.0, 0)
        return VirtualRun(sync.transport, crossed, left, operations, digest(mean))


def virtual_on_rank(rank: int, world_size: int) -> list[VirtualRun]:
    return [over_virtual_ranks(None, count, True) for count in COUNTS]


@pytest.mark.nightly
def test_sums_that_are_left_cross_hosts(hosts: Hosts) -> None:
    """A quarter of each sum on each rank, and a quarter of the mean, with the bits of one rank."""
    whole = 4 * (1200 * 700 + 700)
    found = hosts.run(4, virtual_on_rank)
    for place, count in enumerate(COUNTS):
        (alone,) = fddp.loopback(1, over_virtual_ranks, count, False)
        for run in (of_rank[place] for of_rank in found):
            expected = whole * (sum(run.left) / 2 + 1)
            print(f"{count} virtual ranks: {run.crossed:.0f} bytes crossed, of {expected:.0f}")
            assert run.transport == "shm+c10d"
            assert run.found == alone.found
            most = expected * PER_SEGMENT + PER_OPERATION * (run.operations + 1)
            assert expected < run.crossed < most
    assert [of_count.left for of_count in found[0]] == [(1, 1), (1, 2), (2, 3)]
