"""Communicator over gloo."""

from __future__ import annotations

import os
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fddp.native import extension
from fddp.transport.c10d.communicator import (
    Communicator,
    CommunicatorSpec,
    PendingWorks,
    bytes_of,
)
from fddp.transport.c10d.rendezvous import connect_with_abort
from fddp.transport.liveness.interrupts import DeadlineExceededError, from_user_code
from fddp.transport.liveness.membership import CHECK_INTERVAL_S
from fddp.transport.torch_private import gloo_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fddp.transport.operation import Operation

_LONGEST_PAUSE_S = 0.05  # between two polls for the end of a backend
_MAX_EXCHANGED_BYTES = 256 << 10  # from some 1 MiB on an all-reduce is as fast as an exchange


class GlooCommunicator(Communicator):
    """gloo, connected through the transport's part of the store.

    The constructor blocks while the ranks connect, see [Note: connecting].

    [Note: news of a failure] With gloo only the neighbours of a dead rank see an error, and its
    `abort` does nothing: the other ranks would wait for the whole timeout. A rank that detects a
    failure therefore reports it in the store, and `wait` polls the store.
    """

    _averages = True
    _is_owner = True

    def __init__(self, spec: CommunicatorSpec) -> None:
        timeout = timedelta(seconds=spec.timeout_s)
        size = len(spec.ranks)
        self._devices: _Devices | None
        self._devices = devices = _open_devices()

        def make(store: dist.Store) -> dist.ProcessGroupGloo:
            options = devices.options(timeout)
            return dist.ProcessGroupGloo(store, spec.place, size, options)

        backend, self._store = connect_with_abort(
            make, spec.store, spec.timeout_s, spec.check_peers
        )
        super().__init__(backend, spec.rank, spec.ranks)
        self.addresses = tuple(f"{spec.store_prefix}/{key}" for key in self._store.keys_set)
        self._timeout_s = spec.timeout_s
        self._scratch = _ScratchPool()
        self._spin = extension.compiled.WorkSpin()

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self._timeout_s = timeout_s

    def free(self, *, failed: bool, over: threading.Event) -> Callable[[], None]:
        freeing = extension.compiled.BackendRelease(self._backend)
        # Here, not on that thread: Python's lock is let go of meanwhile, see [Note: exits].
        self._backend = self._devices = None
        freeing.start()
        return partial(_await_end, freeing, over)

    def _all_reduce(self, operation: Operation) -> PendingWorks:
        # gloo's all-reduce takes two messages in turn. Two ranks that exchange their tensors, and
        # sum on their own, need one: 0.4 to 0.7 of the time, with the same bits.
        tensor = operation.tensor
        is_small = tensor.device.type == "cpu" and 0 < tensor.nbytes <= _MAX_EXCHANGED_BYTES
        if len(operation.ranks) != 2 or not is_small:
            return super()._all_reduce(operation)
        theirs = torch.empty_like(tensor)
        sizes = [0, tensor.nbytes] if self._place == 0 else [tensor.nbytes, 0]
        work = self._send_chunks(tensor, bytes_of(theirs), sizes, sizes)

        def finish() -> None:
            tensor.add_(theirs)
            if operation.average:
                tensor.div_(2)

        return PendingWorks((work,), finish)

    def _reduce_scatter(self, operation: Operation) -> PendingWorks:
        # gloo's own reduce-scatter is an all-reduce of a copy. An all-to-all followed by local sums
        # takes 0.4 to 0.7 of the time of an all-reduce in place (2 and 4 ranks, 1 to 32 MB; not
        # more for smaller buffers), and sums in rank order for all sizes.
        if operation.tensor.device.type != "cpu":
            return super()._reduce_scatter(operation)
        memory = self._scratch.acquire(operation.tensor.nbytes)
        exchange = self._exchange(operation, memory[: operation.tensor.nbytes])

        def finish() -> None:
            if exchange.finish is not None:
                exchange.finish()
            self._scratch.release(memory)

        return PendingWorks(exchange.works, finish)

    def _all_gather(self, operation: Operation) -> PendingWorks:
        # gloo's own all-gather copies from a new buffer. For large buffers it takes 2 to 4 times as
        # long as a broadcast from each rank into place, and for small ones as long. `fixed_size`
        # operations must not be matched with a broadcast: gloo ends the process if sizes differ.
        if operation.fixed_size:
            return super()._all_gather(operation)
        return PendingWorks(
            tuple(self._broadcast(c, place) for place, c in enumerate(operation.chunks))
        )

    def _await(self, works: Sequence[dist.Work], check_peers: Callable[[], None]) -> None:
        deadline_s = time.perf_counter() + self._timeout_s
        for work in works:
            self._spin.poll(work)
            while not _finishes(work, timedelta(seconds=CHECK_INTERVAL_S)):
                # [Note: news of a failure]
                check_peers()
                if time.perf_counter() > deadline_s:
                    raise DeadlineExceededError(f"timed out after {self._timeout_s} s")


class _Devices:
    """Listening sockets and the thread of gloo that watches connections. All communicators of this
    process share them, and they last as long as one of these.

    A connection that fails ends its communicator, and no other one.
    """

    def __init__(self, interfaces: str) -> None:
        make = dist.ProcessGroupGloo.create_device
        self._devices = [make(interface=name) for name in interfaces.split(",") if name]
        if not self._devices:
            self._devices = [dist.ProcessGroupGloo.create_default_device()]

    def options(self, timeout: timedelta) -> Any:
        """Return the options of a new communicator, as torch sets them."""
        options = gloo_options()
        options._timeout = timeout
        options._devices = self._devices
        options._threads = 2 * len(self._devices)
        return options


_devices: weakref.WeakValueDictionary[tuple[int, str], _Devices] = weakref.WeakValueDictionary()


def _open_devices() -> _Devices:
    # Of a forked process: it has none of the threads that it inherits, see [Note: forks].
    key = os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    devices = _devices.get(key)
    if devices is None:
        devices = _devices.setdefault(key, _Devices(key[1]))
    return devices


class _ScratchPool:
    """Reused receive buffers: new pages cost as much as the exchange itself."""

    _MAX_KEPT = 2  # the number of operations that gloo runs concurrently

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Tensor] = []

    def acquire(self, nbytes: int) -> Tensor:
        with self._lock:
            for i, memory in enumerate(self._kept):
                if memory.numel() >= nbytes:
                    return self._kept.pop(i)
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, memory: Tensor) -> None:
        with self._lock:
            self._kept = sorted([*self._kept, memory], key=torch.numel)[-self._MAX_KEPT :]


def _await_end(freeing: Any, over: threading.Event) -> None:
    """Wait until `BackendRelease` has freed a backend, or the process is about to end."""
    pause_s = 0.0005
    while not (freeing.done or over.wait(pause_s)):
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _finishes(work: dist.Work, within: timedelta) -> bool:
    """Return True if `work` finishes within a time limit. Raise its error if it failed."""
    try:
        work.wait(within)
    except RuntimeError as error:
        if from_user_code(error):
            raise
        if not work.is_completed():
            return False
        work.wait()  # raises its error, or returns if it finished just after the time limit
    return True
