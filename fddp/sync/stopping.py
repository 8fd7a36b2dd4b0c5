"""Requests to stop by signals; see `fddp.runtime.stopping`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from fddp.core.entrance import entrance


class Stoppable(Protocol):
    """Object that takes steps and can be asked to stop: `GradSync`, `DistributedDataParallel`,
    `periodic.PeriodicSync`, and `Communicator`, also in programs of JAX."""

    @property
    def stopping(self) -> bool: ...

    def request_stop(self) -> None: ...


@entrance
@contextmanager
def stop_on_signal(
    *syncs: Stoppable, signals: Sequence[signal.Signals] = (signal.SIGTERM,)
) -> Iterator[None]:
    """Ask all ranks to stop when this one gets a signal, within the block.

    A scheduler's SIGTERM reaches ranks at different steps, or only some of them. Here it calls
    `request_stop`, and all ranks see `stopping` after the same step. A handler that was installed
    before runs as well, if it is a function; afterwards it is installed again. Python runs handlers
    in the main thread, between instructions: a rank that waits for others notes the signal once its
    wait is over.

    Args:
        syncs: what takes the steps of the loop.
        signals: signals of which each is a request; SIGTERM by default. With SIGINT, an interrupt
            from the keyboard no longer raises KeyboardInterrupt.

    Raises:
        ValueError: it is not called in the main thread of the process.

    Example:
        >>> import fddp, os, signal, torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> grads = {"w": torch.ones(2)}
        >>> with fddp.GradSync(grads) as sync, fddp.stop_on_signal(sync):
        ...     for step in range(100):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...         mean = sync(grads)
        ...         if sync.stopping:
        ...             break  # and save a checkpoint, on all ranks
        >>> step
        3
        >>> dist.destroy_process_group()
    """

    def ask(number: int, frame: FrameType | None) -> None:
        for sync in syncs:
            sync.request_stop()
        earlier = previous[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "signal handlers can be installed in the main thread alone; enter stop_on_signal "
            "there, or call request_stop() where the signal is noticed"
        )
    previous: dict[int, Any] = {}
    try:
        for own in signals:
            previous[own] = signal.getsignal(own)
            signal.signal(own, ask)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
