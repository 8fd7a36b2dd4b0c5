"""Peak memory of a step: `python -m benchmarks.memory`.

Each contestant runs in a launch of its own, so that nothing of another's is left in its processes.
Two measures, both above what the process had before it made its model:

- PSS, the proportional set size: a page that several processes share counts once over all of them.
  Read from `smaps_rollup` while steps run, again and again, and at the end of each step.
- RSS, the resident set: a shared page counts in each of its processes. Its high-water mark is kept
  by the kernel, from the first step on.

Ranks run with glibc's MALLOC_MMAP_THRESHOLD_ at 1 MiB, so that what is freed goes back to the
system at once: else holes that glibc keeps in its heap, up to two sets of gradients, hide what is
in use.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.bounds import Figure, at_most
from benchmarks.competitors import (
    DONATED,
    FDDP,
    LOCAL_FUNCTION,
    LOCAL_MODULE,
    OVER_GLOO,
    Make,
    donating,
    makers,
    twin,
)
from benchmarks.measure import Ratio
from benchmarks.models import WORKLOADS, Workload, stack
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.core.text import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

MIB = 1 << 20

#: gradients that stand out from what torch allocates anyway
MODELS = {
    "mlp": stack("MLP, 8 layers of 2048x2048", layers=8, width=2048, rows=32),
    "layers": stack("400 layers of 160x160", layers=400, width=160, rows=32),
    "transformer": WORKLOADS["transformer"],
    "conv": WORKLOADS["conv"],
}
_STEPS = 8
_DDP = "DDP default"
_MODES = (_DDP, "DDP view")


class Peak(NamedTuple):
    """One process's bytes above what it had before it made its model."""

    pss: int  # over all steps
    settled: int  # PSS, over the later half of them
    rss: int


@dataclass(frozen=True)
class Entry:
    """A contestant's peak, the mean over ranks.

    Attributes:
        name: of the contestant.
        transport: transport of its gradients.
        pss: bytes, over all steps.
        settled: PSS over the later half, when plans have been rebuilt.
        rss: bytes.
    """

    name: str
    transport: str
    pss: float
    settled: float
    rss: float


@dataclass(frozen=True)
class Result:
    """One model.

    Attributes:
        name: for the command line.
        title: in words.
        grads_bytes: one set of gradients.
        entries: one for each contestant.
    """

    name: str
    title: str
    grads_bytes: int
    entries: tuple[Entry, ...]

    def entry(self, name: str | None) -> Entry:
        """The contestant of that name."""
        return next(entry for entry in self.entries if entry.name == name)


class PeakPss:
    """Watches this process's PSS while its block runs; a context manager.

    Example:
        >>> before = pss_bytes()
        >>> with PeakPss() as peak:
        ...     memory = b"x" * (256 * MIB)
        ...     peak.look()
        ...     del memory
        >>> peak.highest - before > 64 * MIB  # another process may share pages meanwhile
        True
    """

    def __init__(self) -> None:
        self.highest = pss_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fddp-bench-pss", daemon=True)

    def look(self) -> None:
        """Takes note of what there is now."""
        self.highest = max(self.highest, pss_bytes())

    def _watch(self) -> None:
        while not self._ended.wait(1e-3):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def pss_bytes() -> int:
    """This process's proportional set size."""
    return _kib(Path("/proc/self/smaps_rollup"), "Pss:") * 1024


def highest_rss_bytes() -> int:
    """The high-water mark of this process's resident set."""
    return _kib(Path("/proc/self/status"), "VmHWM:") * 1024


def forget_highest_rss() -> None:
    """Sets the high-water mark to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _kib(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise OSError(f"{path} has no line {field!r}; it takes Linux 4.14 or later")


def main() -> None:
    """Measures and prints; about five seconds for each contestant of a model."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # read by the ranks as they start
    results = [_model(name, MODELS[name], args.ranks) for name in args.models]
    publish(map(_table, results), figures(results), _values(results), args.json)


def _model(name: str, workload: Workload, ranks: int) -> Result:
    chosen = [contestant for contestant in _makers(workload) if _is_wanted(contestant)]
    entries = []
    with Stages(shown=True) as stages:
        stages.begin(f"memory, {workload.title}", len(chosen))
        for contestant in chosen:
            peaks = launch(ranks, run_rank, name, contestant)
            mean = [statistics.fmean(peak) for peak in zip(*(p for p, _ in peaks), strict=True)]
            entries.append(Entry(contestant, peaks[0][1], *mean))
            stages.advance()
    grads_bytes = sum(p.nbytes for p in workload.build().parameters())
    return Result(name, workload.title, grads_bytes, tuple(entries))


def _makers(workload: Workload) -> dict[str, Make]:
    has_buffers = any(True for _ in workload.build().buffers())
    return {DONATED: donating, **makers(has_buffers)}


def _is_wanted(contestant: str) -> bool:
    """Return True if a figure needs the contestant."""
    needed = (LOCAL_MODULE, LOCAL_FUNCTION, FDDP, FDDP + OVER_GLOO, DONATED, *_MODES)
    return contestant in needed or twin(contestant) in _MODES


def run_rank(model: str, contestant: str) -> tuple[Peak, str]:
    """One contestant's peak in some steps, and its transport."""
    workload = MODELS[model]
    _warm_up()
    forget_highest_rss()
    pss, rss = pss_bytes(), highest_rss_bytes()
    batch = workload.batch(dist.get_rank())
    made = _makers(workload)[contestant](workload, batch)
    forget_highest_rss()
    steps = []
    for _ in range(_STEPS):
        with PeakPss() as peak:
            made.step()
            peak.look()
        steps.append(peak.highest - pss)
        dist.barrier()
    found = Peak(max(steps), max(steps[_STEPS // 2 :]), highest_rss_bytes() - rss)
    made.close()
    return found, made.transport


def _warm_up() -> None:
    """Has torch load and allocate what it needs but once, and gloo as well."""
    layer = torch.nn.Linear(64, 64)
    layer(torch.zeros(64, 64)).sum().backward()
    dist.all_reduce(torch.zeros(1024))
    time.sleep(0.1)


def figures(results: Sequence[Result]) -> list[Figure]:
    """Figures with a bound."""
    wrapped, functional = [], []
    for result in results:
        for entry in result.entries:
            mode = twin(entry.name)
            case = f"{result.name}, {entry.name}, {entry.transport}"
            if mode is not None:
                other = result.entry(mode)
                value = _both(entry.pss / other.pss, entry.rss / other.rss)
                wrapped.append(at_most(1.05, "peak memory, wrapper / DDP", case, value))
            elif entry.name.startswith(FDDP):
                other = result.entry(_DDP)
                more = (entry.pss - other.pss, entry.rss - other.rss)
                value = _both(*(bytes_ / result.grads_bytes for bytes_ in more))
                what = "peak memory, function less DDP default, in sets of gradients"
                functional.append(at_most(1.0, what, case, value))
    return wrapped + functional


def _both(pss: float, rss: float) -> Ratio:
    """PSS is what is held against the bound; RSS goes along as the other end of the spread."""
    return Ratio(pss, min(pss, rss), max(pss, rss))


def _table(result: Result) -> Table:
    grads = result.grads_bytes
    table = numbers_table(
        f"Peak memory a rank: {result.title} ({size_text(grads)} of gradients)",
        ("via", "PSS", "sets", "settled", "RSS", "PSS / DDP", "settled", "RSS / DDP"),
        caption="above what a process has before it makes its model; PSS in MiB, the rest in sets "
        "of gradients; settled: from the fifth step on",
    )
    for entry in result.entries:
        mode = twin(entry.name)
        other = result.entry(mode) if mode is not None else result.entry(_DDP)
        table.add_row(
            entry.name,
            entry.transport,
            f"{entry.pss / MIB:.0f}",
            f"{entry.pss / grads:.2f}",
            f"{entry.settled / grads:.2f}",
            f"{entry.rss / grads:.2f}",
            f"{entry.pss / other.pss:.2f}",
            f"{entry.settled / other.settled:.2f}",
            f"{entry.rss / other.rss:.2f}",
        )
    return table


def _values(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "models": {
            result.name: {
                "title": result.title,
                "grads_bytes": result.grads_bytes,
                "contestants": {
                    entry.name: {
                        "transport": entry.transport,
                        "pss_bytes": entry.pss,
                        "settled_pss_bytes": entry.settled,
                        "rss_bytes": entry.rss,
                    }
                    for entry in result.entries
                },
            }
            for result in results
        },
    }


if __name__ == "__main__":
    main()
