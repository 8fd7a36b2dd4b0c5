"""All-reduces over shared memory, over gloo, and plain copies: `python -m benchmarks.transports`.

Blocking calls on ranks of one thread each, in turn. gloo's small all-reduces are bimodal, and which
mode they take depends on how the ranks come to meet: so gloo runs with one and with two threads of
its own, back to back and with a barrier before each call, and the fastest of these counts. A copy
is libc's `memcpy` of as many bytes, on all ranks at once.

Started by Open MPI, it also measures its all-reduce in the same turns; see `benchmarks.mpi`.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from benchmarks import mpi
from benchmarks.bounds import Figure, at_least, at_most, console
from benchmarks.measure import Series, medians_in_turns, ratio, timed
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.progress import Stages
from fddp.core.text import counted, size_text
from fddp.transport import Transport, open_transport

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 256, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LARGE = 256 * MIB

SHM = "shm"
SHM_BARRIER = "shm, barrier"
SHM_ORDINARY = "shm, ordinary memory"
COPY = "memcpy"
_GLOO = "gloo, {} thread{}"
_BARRIER = ", barrier"

_TURN_S = 0.03  # about how long a turn of gloo's takes
_GLOO_S = 3e-4  # about what a call of gloo's takes, and a byte of it: sets the number of calls
_GLOO_BYTE_S = 6e-10
_MOST_CALLS = 100
_FEWEST_CALLS = 3


class Call(NamedTuple):
    """Timed operation and its untimed preparation."""

    run: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Case:
    """One size.

    Attributes:
        nbytes: of the tensor, float32.
        series: by way; a round is the median of a turn's calls, on the slower rank.
    """

    nbytes: int
    series: dict[str, Series]

    @property
    def gloo(self) -> str:
        """gloo's fastest way."""
        ways = [way for way in self.series if way.startswith("gloo")]
        return min(ways, key=lambda way: self.series[way].median_s)


@dataclass(frozen=True)
class Result:
    """All sizes.

    Attributes:
        ranks: number of ranks.
        rounds: number of rounds.
        reason: why there is no shared memory; empty where there is.
        cases: by size.
    """

    ranks: int
    rounds: int
    reason: str
    cases: tuple[Case, ...]


def main() -> None:
    """Measures and prints; about a minute."""
    parser = options(__doc__, rounds=7)
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--large", action="store_true", help="256 MiB as well")
    args = parser.parse_args()
    sizes = (*args.sizes, *([LARGE] if args.large else []))
    result = mpi.run_ranks(args.ranks, run_rank, sizes, args.rounds)
    if result is None:
        return
    if result.reason:
        console().print(f"no shared memory: {result.reason}", markup=False)
    publish([_table(result)], figures(result), _values(result), args.json)


def run_rank(sizes: tuple[int, ...], rounds: int) -> Result:
    """All sizes; a collective call. The same on all ranks."""
    with ExitStack() as stack:
        shm: Transport | None = None
        reason = ""
        try:
            shm = stack.enter_context(open_transport(None, "shm"))
        except ValueError as error:
            reason = str(error)
        gloos = {threads: _gloo(threads) for threads in (1, 2)}
        stages = stack.enter_context(Stages(shown=dist.get_rank() == 0))
        cases = []
        for nbytes in sizes:
            stages.begin(size_text(nbytes), rounds)
            series = _measure(_calls(nbytes, shm, gloos), nbytes, rounds, stages.advance)
            cases.append(Case(nbytes, series))
    return Result(dist.get_world_size(), rounds, reason, tuple(cases))


def _calls(nbytes: int, shm: Transport | None, gloos: dict[int, Any]) -> dict[str, Call]:
    calls = {}
    ordinary = torch.zeros(nbytes // 4)
    if shm is not None:
        own = shm.empty(nbytes // 4, torch.float32, torch.device("cpu")).zero_()
        calls[SHM] = Call(_shm(shm, own))
        calls[SHM_BARRIER] = Call(_shm(shm, own), dist.barrier)
        calls[SHM_ORDINARY] = Call(_shm(shm, ordinary))
    for threads, gloo in gloos.items():
        name = _GLOO.format(threads, "s" * (threads > 1))
        calls[name] = Call(_all_reduce(gloo, ordinary))
        calls[name + _BARRIER] = Call(_all_reduce(gloo, ordinary), dist.barrier)
    if mpi.STARTED_BY_MPI:
        calls[mpi.NAME] = Call(mpi.prepare("all-reduce", nbytes))
    source, target = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    calls[COPY] = Call(_copy(target, source))
    return calls


def _shm(transport: Transport, tensor: Tensor) -> Callable[[], object]:
    return lambda: transport.all_reduce(tensor, wait_soon=True).wait("an all-reduce")


def _all_reduce(gloo: Any, tensor: Tensor) -> Callable[[], object]:
    tensors, options = [tensor], dist.AllreduceOptions()
    return lambda: gloo.allreduce(tensors, options).wait()


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    to, start, nbytes = target.data_ptr(), source.data_ptr(), source.nbytes

    def copy() -> object:
        assert target is not source  # keeps both alive
        return ctypes.memmove(to, start, nbytes)

    return copy


def _gloo(threads: int) -> Any:
    """gloo as torch.distributed has it, with another number of threads."""
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_default_device()]
    options._threads = threads
    options._timeout = timedelta(minutes=5)
    store = dist.PrefixStore(f"gloo of {counted(threads, 'thread')}", c10d._get_default_store())
    return backend(store, dist.get_rank(), dist.get_world_size(), options)


def _measure(
    calls: dict[str, Call], nbytes: int, rounds: int, after_round: Callable[[], None]
) -> dict[str, Series]:
    """As `benchmarks.measure.measure`, but what comes before a call is not timed."""
    count = round(_TURN_S / (_GLOO_S + nbytes * _GLOO_BYTE_S))
    count = min(max(count, _FEWEST_CALLS), _MOST_CALLS)

    def median_s(name: str) -> float:
        calls[name].run()
        return statistics.median(_timed(calls[name]) for _ in range(count))

    return medians_in_turns(list(calls), rounds, median_s, after_round)


def _timed(call: Call) -> float:
    if call.before is not None:
        call.before()
    return timed(call.run)


def figures(result: Result) -> list[Figure]:
    """Figures with a bound; none without shared memory."""
    faster, copies = [], []
    for case in result.cases:
        shm = case.series.get(SHM)
        if shm is None:
            continue
        name = size_text(case.nbytes)
        bound = {4 * MIB: 12.0, 64 * MIB: 5.0}.get(case.nbytes, 10.0)
        if case.nbytes <= 256 * KIB or case.nbytes in (4 * MIB, 64 * MIB):
            speedup = ratio(case.series[case.gloo], shm)
            faster.append(at_least(bound, "all-reduce, gloo / shm", name, speedup))
        if case.nbytes == 64 * MIB:
            in_copies = ratio(shm, case.series[COPY])
            copies.append(at_most(1.2, "all-reduce, shm / memcpy", name, in_copies))
    return faster + copies


def _table(result: Result) -> Table:
    headings = ("shm", "after barrier", "ordinary", "gloo", "as", "gloo / shm", "memcpy")
    has_mpi = any(mpi.NAME in case.series for case in result.cases)
    table = numbers_table(
        f"Blocking all-reduces, {counted(result.ranks, 'rank')}",
        (*headings, "shm / memcpy", *((mpi.NAME, f"shm / {mpi.NAME}") if has_mpi else ())),
        caption="us: median of rounds; barrier: shm with a barrier before each call; ordinary: shm "
        "with tensors elsewhere; ratios round by round (lowest-highest)",
    )
    for case in result.cases:
        series, gloo, copy = case.series, case.series[case.gloo], case.series[COPY]
        shm = series.get(SHM)
        table.add_row(
            size_text(case.nbytes),
            *(_us(series.get(way)) for way in (SHM, SHM_BARRIER, SHM_ORDINARY)),
            _us(gloo),
            case.gloo.removeprefix("gloo, "),
            _spread(gloo, shm),
            _us(copy),
            _spread(shm, copy) if case.nbytes >= MIB else "",
            *_mpi_cells(series) if has_mpi else (),
        )
    return table


def _mpi_cells(series: dict[str, Series]) -> tuple[str, str]:
    over_mpi = series.get(mpi.NAME)
    return _us(over_mpi), _spread(series.get(SHM), over_mpi)


def _values(result: Result) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "ranks": result.ranks,
        "rounds": result.rounds,
        "reason": result.reason,
        "sizes": [
            {
                "nbytes": case.nbytes,
                "fastest_gloo": case.gloo,
                "rounds_s": {way: series.rounds_s for way, series in case.series.items()},
            }
            for case in result.cases
        ],
    }


def _us(series: Series | None) -> str:
    return (
        "" if series is None else f"{series.median_s * 1e6:.{1 if series.median_s < 1e-4 else 0}f}"
    )


def _spread(ours: Series | None, theirs: Series | None) -> str:
    if ours is None or theirs is None:
        return ""
    value = ratio(ours, theirs)
    return value.text(1 if value.high >= 10 else 2)


if __name__ == "__main__":
    main()
