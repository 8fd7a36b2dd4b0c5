"""Resources that this process holds; Linux only."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


class Resources(NamedTuple):
    """Numbers of threads, open files and mappings of shared memory."""

    threads: int
    files: int
    mappings: int


def open_files() -> set[int]:
    """Return the numbers of this process's open files."""
    return {int(name) for name in os.listdir("/proc/self/fd")}


def open_file_count() -> int:
    """Return how many files this process has open."""
    return len(open_files())


def arena_mappings() -> int:
    """Return how many anonymous files of fddp's are mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:fddp")


def resources() -> Resources:
    """Return what is held after a garbage collection."""
    gc.collect()
    threads = len(os.listdir("/proc/self/task")) + threading.active_count()
    return Resources(threads, open_file_count(), arena_mappings())


def growth(before: Resources, within_s: float = 60.0) -> Resources:
    """Return what is held beyond `before`.

    Threads end some time after they are asked to, those of earlier tests as well: a fall counts as
    zero, and a rise only if it lasts for `within_s` seconds.
    """
    deadline_s = time.perf_counter() + within_s
    while True:
        pairs = zip(before, resources(), strict=True)
        beyond = Resources(*(max(0, now - then) for then, now in pairs))
        if not any(beyond) or time.perf_counter() > deadline_s:
            return beyond
        time.sleep(0.05)


def is_shared(tensor: Tensor) -> bool:
    """Return True if a tensor's memory is mapped from an anonymous file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= tensor.data_ptr() < int(end, 16):
            return "memfd:" in line
    raise AssertionError("memory that is not mapped")
