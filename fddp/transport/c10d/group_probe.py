"""Members of a process group that have left it, as its own backend shows.

Before ranks have opened their first transport on a group, they know nothing of each other's
processes. The group itself is connected: shared memory shows the state of each member, and gloo
refuses operations with a rank whose connection has ended.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from fddp.native import extension
from fddp.transport.group_backend import backend_of
from fddp.transport.liveness.interrupts import from_user_code

_CPU = torch.device("cpu")
_TAG = 2**31 - 1  # of messages that are never sent
_RANKS_AT_ONCE = 64  # at most, in one look
_LONGEST_PAUSE_S = 4.0  # between two looks; each leaves some bytes in gloo


class GroupProbe:
    """Looks for members that have left a process group or whose process has ended."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        has_cpu = _CPU in group._device_types
        self._backend = backend_of(group, _CPU) if has_cpu else None
        self._next = [(self._rank + place) % size for place in range(1, size)]
        self._look_s, self._pause_s = 0.0, 0.25

    def lost(self) -> tuple[int, ...]:
        """Return ranks that have left the group; none if its backend does not show this."""
        if isinstance(self._backend, extension.compiled.ShmBackend):
            states = enumerate(self._backend.states)
            return tuple(rank for rank, state in states if state in ("left", "ended"))
        if not isinstance(self._backend, dist.ProcessGroupGloo):
            return ()
        now_s = time.perf_counter()
        if now_s < self._look_s:
            return ()
        self._look_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        ranks, rest = self._next[:_RANKS_AT_ONCE], self._next[_RANKS_AT_ONCE:]
        self._next = rest + ranks
        return tuple(sorted(rank for rank in ranks if not _is_connected(self._backend, rank)))


def _is_connected(backend: Any, rank: int) -> bool:
    try:
        # Not waited for: dropping the work cancels it, and other operations are unaffected.
        backend.recv([torch.empty(0)], rank, _TAG)
    except RuntimeError as error:
        if from_user_code(error):
            raise
        return False
    return True
