"""Detection of ended processes of ranks on this host.

While a transport is being opened there is no connection whose end would reveal that a rank has
died. Each rank therefore publishes once, in the store of the job, its PID namespace, PID, start
time and the address of its stack, which is another one once the process runs another program. Ranks
in the same PID namespace check this process while they wait, then and in later waits that take
long.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_MAX_LINE_CHARS = 200  # longer lines are malformed
_STATE, _BEGAN, _STACK = 0, 19, 25  # fields of /proc/PID/stat after the name of the program


class Process(NamedTuple):
    """A process of this host."""

    pid: int
    began: int  # start time in ticks of the system's clock; 0 if unknown
    stack: int  # address of the stack; 0 if unknown


def own_line(rank: int) -> str:
    """Return the line that a rank publishes about its own process.

    >>> ranks = parsed("3 17 900 77\\nnonsense\\n" + own_line(5))
    >>> ranks[3], ranks[5].pid == os.getpid()
    (Process(pid=17, began=900, stack=77), True)
    """
    _, began, stack = _read(os.getpid()) or ("", 0, 0)
    return f"{rank} {os.getpid()} {began} {stack}\n"


def parsed(text: str) -> dict[int, Process]:
    """Parse published lines: the newest process of each rank. Malformed lines are skipped."""
    found: dict[int, Process] = {}
    for line in text.splitlines():
        words = line.split(" ")
        if len(line) < _MAX_LINE_CHARS and len(words) == 4 and all(w.isdecimal() for w in words):
            rank, *process = map(int, words)
            found[rank] = Process(*process)
    return found


def has_ended(process: Process) -> bool:
    """Return True if a process has ended or runs another program, also if its PID was reused.

    >>> own = parsed(own_line(0))[0]
    >>> [has_ended(own), has_ended(own._replace(began=1)), has_ended(own._replace(stack=1))]
    [False, True, True]
    >>> has_ended(Process(0, 1, 1))
    False
    """
    if not 0 < process.pid < 2**31:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        return False
    found = _read(process.pid)
    if found is None or not process.began:
        return False  # unknown
    state, began, stack = found
    is_replaced = 0 not in (stack, process.stack) and stack != process.stack
    return state in "ZX" or began != process.began or is_replaced


def is_stopped(process: Process) -> bool:
    """Return True if a signal or a debugger has stopped a process.

    >>> is_stopped(parsed(own_line(0))[0])
    False
    """
    found = _read(process.pid) if process.pid > 0 else None
    return found is not None and found[0] in "Tt" and found[1] == process.began


def pid_namespace() -> str:
    """Return an identifier of this host and PID namespace; empty if it can't be determined."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _read(pid: int) -> tuple[str, int, int] | None:
    """Return the state, start time and address of the stack of a process; None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return fields[_STATE], int(fields[_BEGAN]), int(fields[_STACK])
    except (OSError, ValueError, IndexError):
        return None
