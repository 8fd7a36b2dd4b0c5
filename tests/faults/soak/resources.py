"""Resources of a process, and their growth over a run."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIB = 1 << 20


class Usage(NamedTuple):
    """Resources of a process at one moment, after a garbage collection.

    Attributes:
        rss_bytes: resident set.
        pss_bytes: the same, a page that several processes share counted in parts.
        heap_bytes: what the C library has handed out and not got back.
        shared_bytes: pages of anonymous files that this process has open.
        descriptors: open file descriptors.
        files: anonymous files among them.
        threads: threads.
        mappings: mappings of its address space.
        objects: containers that Python's collector follows.
    """

    rss_bytes: float
    pss_bytes: float
    heap_bytes: float
    shared_bytes: float
    descriptors: float
    files: float
    threads: float
    mappings: float
    objects: float


FLOORS: Mapping[str, float] = MappingProxyType(
    {
        "rss_bytes": 3 * MIB,
        # Pages of libraries count for more where other processes that use them end.
        "pss_bytes": 8 * MIB,
        # torch keeps 1 to 2 KiB of each process group of gloo that there was, and a third of a run
        # of 20,000 turns makes some 850.
        "heap_bytes": 1.5 * MIB,
        "shared_bytes": 4 * MIB,
        "descriptors": 1,
        "files": 0,
        "threads": 1,
        "mappings": 8,
        "objects": 400,
    }
)
"""Growth that is let pass: what allocators keep back, and threads and files of the moment."""


class Growth(NamedTuple):
    """One resource over a run.

    Attributes:
        name: of the resource.
        middle: median of the middle third of the run.
        last: median of the last third.
        limit: the most by which the last may be above the middle one.
    """

    name: str
    middle: float
    last: float
    limit: float

    @property
    def is_flat(self) -> bool:
        """True if it has not grown."""
        return self.last - self.middle <= self.limit


def growths(samples: Sequence[Usage]) -> list[Growth]:
    """Holds the last third of a run against its middle third.

    The first third is left out: it is when caches, pools and plans come to be. The median must not
    rise by more than the floor of the resource, or three times the noise from one sample to the
    next (the median step between neighbours, times 1.05, which is the standard deviation where
    samples are normal), whichever is more. Steps between neighbours are small where something grows
    slowly, so that growth does not count as noise.

    >>> steady = [Usage(*[100.0 + i % 2] * 9) for i in range(30)]
    >>> all(growth.is_flat for growth in growths(steady))
    True
    >>> leaking = [usage._replace(files=100.0 + i) for i, usage in enumerate(steady)]
    >>> [growth.name for growth in growths(leaking) if not growth.is_flat]
    ['files']
    """
    third = len(samples) // 3
    if third < 4:
        raise ValueError(f"{len(samples)} samples are too few to compare thirds of a run")
    found = []
    for place, name in enumerate(Usage._fields):
        values = [sample[place] for sample in samples[third:]]
        noise = 1.05 * statistics.median(abs(b - a) for a, b in pairwise(values))
        limit = max(FLOORS[name], 3 * noise)
        middle, last = statistics.median(values[:third]), statistics.median(values[third:])
        found.append(Growth(name, middle, last, limit))
    return found


def usage() -> Usage:
    """This process's, once garbage was collected and the heap gave back what it can."""
    gc.collect()
    _libc().malloc_trim(0)
    memory = _fields(Path("/proc/self/smaps_rollup"))
    files = _anonymous_files()
    return Usage(
        rss_bytes=memory["Rss"],
        pss_bytes=memory["Pss"],
        heap_bytes=_heap_bytes(),
        shared_bytes=sum(files),
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # of the directory itself
        files=len(files),
        threads=len(os.listdir("/proc/self/task")),
        mappings=Path("/proc/self/maps").read_bytes().count(b"\n"),
        objects=len(gc.get_objects()),
    )


def _anonymous_files() -> list[int]:
    """Bytes of the pages of each."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:"):
                found.append(os.stat(path).st_blocks * 512)
        except FileNotFoundError:  # the descriptor of the listing
            continue
    return found


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


class _Mallinfo(ctypes.Structure):
    _fields_ = (("sizes", ctypes.c_size_t * 10),)  # hblkhd is the fifth, uordblks the eighth


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _heap_bytes() -> float:
    asking = _libc().mallinfo2  # of glibc 2.33
    asking.restype = _Mallinfo
    info = asking()
    return float(info.sizes[7] + info.sizes[4])
