"""Detection of ended processes of ranks on this host.

While a transport is being opened there is no connection whose end would reveal that a rank has
died, and a connection stays open while a forked process holds it. Ranks of one host therefore look
at each other's processes while they wait.

[Note: proof of a shared host] A PID means something only to a process of the same host that sees
the same PID namespace. Neither can be read off: machines that were cloned from one snapshot have
the same boot id and the same numbers of namespaces, and start times are shifted in another time
namespace. Each rank therefore listens at an abstract socket of a random name while a transport is
being opened, and publishes this name. A rank that can connect to it shares the host, and the kernel
itself tells it the listener's PID, in its own PID namespace (SO_PEERCRED; 0 if the process is not
visible there). It then reads start time and stack on its own. Not messages with SCM_CREDENTIALS:
they would need an answer of the other rank, which may be busy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from fddp.transport.shm.fd_passing import connect

_MAX_LINE_CHARS = 200  # longer lines are malformed
_STATE, _FLAGS, _BEGAN, _STACK = 0, 6, 19, 25  # fields of /proc/PID/stat after the program's name
_EXITING = 0x4  # a flag: the kernel frees its memory, which takes longer than the rest of its end


class Process(NamedTuple):
    """A living process of this host, as this rank saw it."""

    pid: int
    began: int = 0  # start time in ticks of the system's clock; 0 if unknown
    stack: int = 0  # address of the stack, another one once it runs another program; 0 if unknown


class Look(NamedTuple):
    """State of the PID of a process as this rank sees it now."""

    exists: bool
    state: str = ""  # "" if unknown, as are the others
    began: int = 0
    stack: int = 0
    exiting: bool = False


def has_ended(seen: Process, now: Look) -> bool:
    """Return True if a process has ended or runs another program, also if its PID was reused.

    >>> seen = Process(17, 900, 77)
    >>> alive = Look(True, "S", 900, 77)
    >>> [has_ended(seen, now) for now in (alive, Look(False), alive._replace(state="Z"))]
    [False, True, True]
    >>> [has_ended(seen, alive._replace(**now)) for now in ({"began": 5}, {"stack": 5})]
    [True, True]
    >>> has_ended(seen, alive._replace(exiting=True))
    True
    >>> has_ended(seen, Look(True)), has_ended(Process(17), alive)
    (False, False)
    """
    if not now.exists:
        return True
    if not (seen.began and now.began):
        return False  # unknown
    is_replaced = 0 not in (now.stack, seen.stack) and now.stack != seen.stack
    return now.exiting or now.state in "ZX" or now.began != seen.began or is_replaced


def is_stopped(seen: Process, now: Look) -> bool:
    """Return True if a signal or a debugger has stopped a process.

    >>> is_stopped(Process(17, 900), Look(True, "T", 900))
    True
    """
    return now.exists and now.state in ("T", "t") and now.began == seen.began


def look_at(process: Process) -> Look:
    """Look at the PID of a process.

    >>> own = Process(os.getpid())
    >>> look_at(own).exists, has_ended(own, look_at(own))
    (True, False)
    """
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return Look(False)
    except OSError:  # another user's process
        return Look(True)
    try:
        # Otherwise /proc is that of another PID namespace.
        if os.readlink("/proc/self") != str(os.getpid()):
            return Look(True)
        text = Path(f"/proc/{process.pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        exiting = bool(int(fields[_FLAGS]) & _EXITING)
        return Look(True, fields[_STATE], int(fields[_BEGAN]), int(fields[_STACK]), exiting)
    except (OSError, ValueError, IndexError):
        return Look(True)


def process_behind(name: str) -> Process | None:
    """Return the process that listens at a socket of this name; None if it has not proved to share
    this host and PID namespace. See [Note: proof of a shared host]."""
    try:
        connection = connect(name)
    except OSError:  # another user's, or it does not accept connections
        return None
    if connection is None:
        return None
    pid = connection.process
    connection.close()
    if pid <= 0:
        return None
    now = look_at(Process(pid))
    return Process(pid, now.began, now.stack) if now.exists else None


def line_of(rank: int, name: str) -> str:
    """Return the line that a rank publishes about its socket.

    >>> names_in("3 ab12\\nnonsense\\n" + line_of(5, "0c"))
    {3: 'ab12', 5: '0c'}
    """
    return f"{rank} {name}\n"


def names_in(text: str) -> dict[int, str]:
    """Parse published lines: the newest name of each rank. Malformed lines are skipped."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        rank, _, name = line.partition(" ")
        if len(line) < _MAX_LINE_CHARS and rank.isdecimal() and name.isalnum() and name.isascii():
            found[int(rank)] = name
    return found


def boot_id() -> str:
    """Return an identifier that differs between most hosts; empty if it can't be determined."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
