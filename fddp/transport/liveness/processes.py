"""Detection of ended processes of ranks on this host.

While a transport is being opened there is no connection whose end would reveal that a rank has
died. Each rank therefore publishes once, in the store of the job, its PID namespace, PID and start
time. Ranks in the same PID namespace check this process while they wait, then and in later waits
that take long.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_MAX_LINE_CHARS = 200  # longer lines are malformed
_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat after the name of the program


class Process(NamedTuple):
    """A process of this host."""

    pid: int
    began: int  # start time in ticks of the system's clock; 0 if unknown


def own_line(rank: int) -> str:
    """Return the line that a rank publishes about its own process.

    >>> ranks = parsed("3 17 900\\nnonsense\\n" + own_line(5))
    >>> ranks[3], ranks[5].pid == os.getpid()
    (Process(pid=17, began=900), True)
    """
    found = _state_and_beginning(os.getpid())
    return f"{rank} {os.getpid()} {0 if found is None else found[1]}\n"


def parsed(text: str) -> dict[int, Process]:
    """Parse published lines: the newest process of each rank. Malformed lines are skipped."""
    found: dict[int, Process] = {}
    for line in text.splitlines():
        words = line.split(" ")
        if len(line) < _MAX_LINE_CHARS and len(words) == 3 and all(w.isdecimal() for w in words):
            rank, pid, began = map(int, words)
            found[rank] = Process(pid, began)
    return found


def has_ended(process: Process) -> bool:
    """Return True if a process has ended, also if its PID was reused.

    >>> pid = os.getpid()
    >>> [has_ended(parsed(own_line(0))[0]), has_ended(Process(pid, 1)), has_ended(Process(0, 1))]
    [False, True, False]
    """
    if not 0 < process.pid < 2**31:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        return False
    found = _state_and_beginning(process.pid)
    if found is None or not process.began:
        return False  # unknown
    state, began = found
    return state in "ZX" or began != process.began


def is_stopped(process: Process) -> bool:
    """Return True if a signal or a debugger has stopped a process.

    >>> is_stopped(parsed(own_line(0))[0])
    False
    """
    found = _state_and_beginning(process.pid) if process.pid > 0 else None
    return found is not None and found[0] in "Tt" and found[1] == process.began


def pid_namespace() -> str:
    """Return an identifier of this host and PID namespace; empty if it can't be determined."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state_and_beginning(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return fields[_STATE], int(fields[_BEGAN])
    except (OSError, ValueError, IndexError):
        return None
