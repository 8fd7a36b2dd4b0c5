"""Completion times of works on an accelerator, by the clock of the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist


# Events give the time since the origin in milliseconds, as a float32: after a minute a number is
# 4 us from the next, after an hour 250.
_LASTS_S = 60.0


class DeviceClock:
    """Completion times in `time.perf_counter()` seconds, of works that streams order.

    Making one waits for a stream of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = torch.Event(device, enable_timing=True)
        self._origin.record(torch.Stream(device))
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    @property
    def is_old(self) -> bool:
        """True if a new clock is more precise."""
        return time.perf_counter() - self._origin_s > _LASTS_S

    def end_of(self, works: Sequence[dist.Work]) -> Callable[[], float | None]:
        """Return a function that returns the completion time of all works, and waits for it.

        The futures of the works record it, on streams of their own. To wait for a work on a side
        stream would release what it keeps alive until the first wait: its input could be
        overwritten before it is read.
        """
        ends: list[torch.Event] = []

        def record(_: Any) -> None:
            end = torch.Event(self._device, enable_timing=True)
            end.record()  # on the stream of the future, after the work
            ends.append(end)

        for work in works:
            work.get_future().add_done_callback(record)

        def done_s() -> float | None:
            if len(ends) < len(works):
                return None
            for end in ends:
                if not end.query():
                    end.synchronize()
            return self._origin_s + max(map(self._origin.elapsed_time, ends)) / 1e3

        return done_s
