"""The handle of a collective in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING

from fddp.telemetry.waits import LEAST_S, note_wait

if TYPE_CHECKING:
    from torch import Tensor


class Work(ABC):
    """A collective in flight."""

    _results: tuple[Tensor, ...] = ()

    def wait(self, what: str) -> None:
        """Block until the operation has finished; a second call does nothing, or raises again.

        On an accelerator whose backend orders its work by streams (NCCL), the current stream waits
        and the host does not block.

        Args:
            what: description of the operation ("bucket 3 of step 17") for error texts.

        Raises:
            RankLostError: a rank died or closed its connection. The transport is closed.
            SyncTimeoutError: some rank did not take part within `timeout_s`. The transport is
                closed.
            DesyncError: ranks issued different operations, on backends that can detect it.
            ClosedError: the transport was closed before the operation had finished.
        """
        start_s = perf_counter()
        self._wait(what)
        end_s = perf_counter()
        if end_s - start_s > LEAST_S:
            note_wait(start_s, end_s)

    @abstractmethod
    def _wait(self, what: str) -> None:
        """Implement `wait`, which measures its duration; see [Note: time spent waiting]."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if `wait` would not block on other ranks. Never blocks or raises.

        Either all data of other ranks has arrived (read the tensor only after `wait`), or `wait`
        raises at once.
        """

    @property
    @abstractmethod
    def done_s(self) -> float | None:
        """Completion time in `time.perf_counter()` seconds, valid after `wait`.

        None if the operation was started without `record_time`.
        """

    @property
    def results(self) -> list[Tensor]:
        """Results of an `all_gather` by rank, as views of one buffer, valid after `wait`.

        Empty for other operations.
        """
        return list(self._results)
