"""A loopback group whose ranks take turns, as if each had a process of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from fddp.transport.loopback import DEFAULT_GROUP, LoopbackGroup, LoopbackState, run_ranks

if TYPE_CHECKING:
    from fddp.transport.loopback import Rendezvous

T = TypeVar("T")


def in_turns(world_size: int, fn: Callable[[LoopbackGroup], T], timeout_s: float = 60.0) -> list[T]:
    """Run `fn(group)` on ranks as `loopback` does, one rank at a time; return results by rank.

    A rank computes until it waits for others. Each has its own global random numbers of the CPU, of
    torch, NumPy and Python, which begin in the state of the caller's, and the group is the default
    group of its context (`group=None`). Between two waits, a rank has the process for itself: also
    `virtual_rng` as a context manager and `torch.func.jvp`, which belong to the process.

    Example:
        >>> import fddp, torch
        >>> def same_noise(group):
        ...     noise = torch.rand(())
        ...     return bool(fddp.pmax(noise) == noise)
        >>> in_turns(3, same_noise)
        [True, True, True]
    """
    state = _TurnsState(world_size, timeout_s)
    random_state = _random_state()

    def run(group: LoopbackGroup) -> T:
        token = DEFAULT_GROUP.set(group)
        state.begin_turn()
        try:
            _set_random_state(random_state)
            return fn(group)
        finally:
            state.end_turn()
            DEFAULT_GROUP.reset(token)

    try:
        return run_ranks(state, run)
    finally:
        _set_random_state(random_state)


class _TurnsState(LoopbackState):
    """A state whose ranks compute one at a time.

    A rank may wait on a thread that is not its own, such as one of JAX, while its own is blocked in
    its turn: meanwhile the others do not wait for the end of that turn.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        super().__init__(size, timeout_s)
        self._ended = threading.Condition()
        self._computing: set[int] = set()  # threads
        self._elsewhere = 0  # waits on other threads

    def begin_turn(self) -> None:
        """Wait for the turn of this thread."""
        with self._ended:
            self._ended.wait_for(lambda: not self._computing or self._elsewhere)
            self._computing.add(threading.get_ident())

    def end_turn(self) -> None:
        """Give the turn to another thread."""
        with self._ended:
            self._computing.remove(threading.get_ident())
            self._ended.notify_all()

    def open(self, *args: Any) -> dict[int, str | None]:
        with self._others_compute():
            return super().open(*args)

    def wait(self, rendezvous: Rendezvous, *args: Any) -> dict[int, str | None]:
        if self.is_over(rendezvous):
            return super().wait(rendezvous, *args)
        with self._others_compute():
            return super().wait(rendezvous, *args)

    @contextmanager
    def _others_compute(self) -> Iterator[None]:
        if threading.get_ident() not in self._computing:
            with self._ended:
                self._elsewhere += 1
                self._ended.notify_all()
            try:
                yield
            finally:
                with self._ended:
                    self._elsewhere -= 1
            return
        random_state = _random_state()
        self.end_turn()
        try:
            yield
        finally:
            self.begin_turn()
            _set_random_state(random_state)


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
