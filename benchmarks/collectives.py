"""Collectives of `torch.distributed` over the backend "fddp" and over gloo:
`python -m benchmarks.collectives`.

Blocking calls through torch's dispatcher, on tensors in ordinary memory and ranks of one thread
each, in turn. The size is that of the larger of input and output. Started by Open MPI, it also
measures its collectives in the same turns; see `benchmarks.mpi`. The column "dispatcher" has the
same calls over torch's fake backend, which returns at once: the least time of any backend.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from rich.table import Table
from torch.distributed import distributed_c10d as c10d

import fddp  # noqa: F401 - registers the backend
from benchmarks import mpi
from benchmarks.bounds import Figure, at_least, at_most
from benchmarks.measure import Ratio, Series, medians_in_turns, ratio, spread, timed
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.progress import Stages
from fddp.core.text import counted, size_text

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 4 * KIB, 64 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
FDDP, GLOO, DISPATCHER = "fddp", "gloo", "dispatcher"
_BACKENDS = {FDDP: "fddp", GLOO: "gloo", DISPATCHER: dist.Backend.FAKE}
SMALLEST_US = 15.0  # bound of a small all-reduce

_TURN_S = 0.03  # about how long a turn of gloo's takes
_GLOO_S = 3e-4  # about what a call of gloo's takes, and a byte of it: sets the number of calls
_GLOO_BYTE_S = 1e-9
_MOST_CALLS = 100
_FEWEST_CALLS = 3

Group = dist.ProcessGroup


def _all_reduce(group: Group, nbytes: int) -> Callable[[], object]:
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(group: Group, nbytes: int) -> Callable[[], object]:
    output = torch.zeros(_divided(group, nbytes) * group.size())
    own = torch.zeros(_divided(group, nbytes))
    gather_options = c10d.AllgatherOptions()
    gather_options.asyncOp = False
    return lambda: group._allgather_base(output, own, gather_options).wait()


def _reduce_scatter(group: Group, nbytes: int) -> Callable[[], object]:
    given = torch.zeros(_divided(group, nbytes) * group.size())
    output = torch.zeros(_divided(group, nbytes))
    scatter_options = c10d.ReduceScatterOptions()
    scatter_options.asyncOp = False
    return lambda: group._reduce_scatter_base(output, given, scatter_options).wait()


def _broadcast(group: Group, nbytes: int) -> Callable[[], object]:
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.broadcast(tensor, 0, group)


def _all_to_all(group: Group, nbytes: int) -> Callable[[], object]:
    given = torch.zeros(_divided(group, nbytes) * group.size())
    output = torch.zeros_like(given)
    return lambda: dist.all_to_all_single(output, given, group=group)


def _there_and_back(group: Group, nbytes: int) -> Callable[[], object]:
    """Ranks 0 and 1 send a tensor to each other, one after the other."""
    tensor = torch.zeros(nbytes // 4)
    rank = dist.get_rank()

    def run() -> None:
        if rank == 0:
            dist.send(tensor, 1, group)
            dist.recv(tensor, 1, group)
        elif rank == 1:
            dist.recv(tensor, 0, group)
            dist.send(tensor, 0, group)

    return run


COLLECTIVES: dict[str, Callable[[Group, int], Callable[[], object]]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all-to-all": _all_to_all,
    "there and back": _there_and_back,
}
BOUNDED = ("all-reduce", "all-gather", "reduce-scatter")


@dataclass(frozen=True)
class Case:
    """One collective and size.

    Attributes:
        series: by backend, MPI's, and the dispatcher's alone; a round is the median of a turn's
            calls, on the slower rank.
    """

    collective: str
    nbytes: int
    series: dict[str, Series]


def main() -> None:
    """Measures and prints; about a minute."""
    parser = options(__doc__, rounds=7)
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    args = parser.parse_args()
    measured = mpi.run_ranks(args.ranks, run_rank, tuple(args.sizes), args.rounds)
    if measured is None:
        return
    ranks, cases = measured
    values = [{**vars(case), "series": _rounds(case)} for case in cases]
    published = {"torch": torch.__version__, "ranks": ranks, "cases": values}
    publish([_table(cases, ranks)], figures(cases), published, args.json)


def run_rank(sizes: tuple[int, ...], rounds: int) -> tuple[int, list[Case]]:
    """Number of ranks, and all collectives and sizes; a collective call. The same on all ranks."""
    torch.set_num_threads(1)
    groups: dict[str, Any] = {
        name: dist.new_group(backend=backend) for name, backend in _BACKENDS.items()
    }
    cases = []
    with ExitStack() as stack:
        stages = stack.enter_context(Stages(shown=dist.get_rank() == 0))
        for collective, prepare in COLLECTIVES.items():
            stages.begin(collective, rounds * len(sizes))
            for nbytes in sizes:
                calls = {name: prepare(group, nbytes) for name, group in groups.items()}
                if mpi.STARTED_BY_MPI:
                    calls[mpi.NAME] = mpi.prepare(collective, nbytes)
                series = _measure(calls, nbytes, rounds, stages.advance)
                cases.append(Case(collective, nbytes, series))
    for group in groups.values():
        dist.destroy_process_group(group)
    return dist.get_world_size(), cases


def figures(cases: list[Case]) -> list[Figure]:
    """Figures with a bound."""
    found = []
    for case in cases:
        name = f"{case.collective}, {size_text(case.nbytes)}"
        if case.collective == "all-reduce" and case.nbytes == 4:
            small_us = spread(seconds * 1e6 for seconds in case.series[FDDP].rounds_s)
            found.append(at_most(SMALLEST_US, "dist.all_reduce, us", name, small_us))
        if case.collective in BOUNDED:
            bound = 5.0 if case.nbytes > 4 * MIB else 10.0
            found.append(at_least(bound, f"{GLOO} / {FDDP}", name, _times_ours(case, GLOO)))
        if mpi.NAME in case.series:
            found.append(at_least(1.0, f"{mpi.NAME} / {FDDP}", name, _times_ours(case, mpi.NAME)))
    return found


def _times_ours(case: Case, other: str) -> Ratio:
    return ratio(case.series[other], case.series[FDDP])


def _divided(group: Group, nbytes: int) -> int:
    """Elements of one rank's part; at least one."""
    return max(1, nbytes // 4 // group.size())


def _measure(
    calls: dict[str, Callable[[], object]],
    nbytes: int,
    rounds: int,
    after_round: Callable[[], None],
) -> dict[str, Series]:
    count = round(_TURN_S / (_GLOO_S + nbytes * _GLOO_BYTE_S))
    count = min(max(count, _FEWEST_CALLS), _MOST_CALLS)

    def median_s(name: str) -> float:
        calls[name]()
        return statistics.median(timed(calls[name]) for _ in range(count))

    return medians_in_turns(list(calls), rounds, median_s, after_round)


def _table(cases: list[Case], ranks: int) -> Table:
    others = [name for name in (GLOO, mpi.NAME) if name in cases[0].series]
    table = numbers_table(
        f"Collectives of torch.distributed, {counted(ranks, 'rank')}",
        ("size", FDDP, *others, DISPATCHER, *(f"{other} / {FDDP}" for other in others)),
        caption="us: median of rounds; ratios round by round (lowest-highest)",
    )
    for case in cases:
        table.add_row(
            case.collective,
            size_text(case.nbytes),
            *(f"{case.series[name].median_s * 1e6:.1f}" for name in (FDDP, *others, DISPATCHER)),
            *(_times_ours(case, other).text(1 + (other == mpi.NAME)) for other in others),
        )
    return table


def _rounds(case: Case) -> dict[str, tuple[float, ...]]:
    return {name: series.rounds_s for name, series in case.series.items()}


if __name__ == "__main__":
    main()
