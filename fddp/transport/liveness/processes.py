"""Which ranks of this host have ended, told by the system.

Ranks that wait for one to open a transport have no connection to it yet, by whose end they could
tell. So each leaves in the store of the job, once, where it runs: a name for what numbers its
processes, its process's number and when that began. Those with which it shares that name look for
the process where they would wait.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_MOST_CHARS = 200  # of one line; what is longer is nonsense
_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat behind the name of the program


class Process(NamedTuple):
    """A process of this host.

    Attributes:
        pid: its number.
        began: when it began, in ticks of the system's clock.
    """

    pid: int
    began: int


def own_line(rank: int) -> str:
    """What a rank tells of its own process.

    >>> ranks = parsed("3 17 900\\nnonsense\\n" + own_line(5))
    >>> ranks[3], ranks[5].pid == os.getpid()
    (Process(pid=17, began=900), True)
    """
    found = _state_and_beginning(os.getpid())
    return f"{rank} {os.getpid()} {0 if found is None else found[1]}\n"


def parsed(text: str) -> dict[int, Process]:
    """Processes by rank, the newest of each, of what ranks have told; other lines are left out."""
    found: dict[int, Process] = {}
    for line in text.splitlines():
        words = line.split(" ")
        if len(line) < _MOST_CHARS and len(words) == 3 and all(w.isdecimal() for w in words):
            rank, pid, began = map(int, words)
            found[rank] = Process(pid, began)
    return found


def has_ended(process: Process) -> bool:
    """Whether a process is no more, also where its number is another's by now.

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
    except OSError:  # it is another user's
        return False
    found = _state_and_beginning(process.pid)
    if found is None or not process.began:
        return False  # it can't be told
    state, began = found
    return state in "ZX" or began != process.began


def is_stopped(process: Process) -> bool:
    """Whether a process runs no more for now: a signal or a debugger has stopped it.

    >>> is_stopped(parsed(own_line(0))[0])
    False
    """
    found = _state_and_beginning(process.pid) if process.pid > 0 else None
    return found is not None and found[0] in "Tt" and found[1] == process.began


def numbering() -> str:
    """A name for what numbers this process: the same for processes of one host that can look for
    each other, and for no others; empty where that can't be told."""
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
