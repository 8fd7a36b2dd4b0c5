"""Typed bindings of the extension's shared memory: arenas, views of other arenas, teams."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

from fddp.native import extension

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class Status(IntEnum):
    """Status of an operation; all but `PENDING` are final."""

    PENDING = 0
    OK = 1
    LOST = 2  # members died, or left while operations were pending
    TIMEOUT = 3  # members did not take part in time
    MISMATCH = 4  # members issued different operations; the team stays usable
    CLOSED = 5  # this rank left the team
    BROKEN = 6  # members wrote malformed data
    PEER_FAILED = 7  # a member reported a failure outside the team


class Arena(Protocol):
    """Anonymous memory of a process that other processes map. Freed with its last mapping."""

    @property
    def fd(self) -> int: ...
    @property
    def span(self) -> int: ...
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None: ...
    def block(self, n_bytes: int) -> int | None: ...
    def read(self, offset: int, n: int) -> bytes: ...
    def board(self, members: int) -> int | None: ...
    def trim(self) -> int: ...
    def close_fd(self) -> None: ...


class View(Protocol):
    def write(self, offset: int, data: bytes) -> None: ...


class ShmWork(Protocol):
    @property
    def done(self) -> bool: ...
    @property
    def done_s(self) -> float | None: ...
    def wait(self, slice_s: float) -> int: ...
    def descriptors(self) -> list[dict[str, Any]]: ...


class Team(Protocol):
    """Ranks that have mapped each other's arenas. Members are numbered by position."""

    @property
    def failure(self) -> tuple[int, tuple[int, ...], int]: ...
    @property
    def states(self) -> list[str]: ...
    def start(  # mirrors the signature in C++
        self,
        kind: str,
        tensor: Tensor,
        src: int = ...,
        average: bool = ...,
        order: Sequence[int] = ...,
        soon: bool = ...,
        stamp: bool = ...,
    ) -> ShmWork:
        """Start an operation. Never blocks.

        Raises:
            TypeError, ValueError: unsuitable tensor. The other members are not affected.
        """

    def fail(self, status: int, members: Sequence[int]) -> None: ...
    def leave(self) -> None: ...


def make_arena(span_bytes: int) -> Arena:
    """Reserve addresses; pages are reserved on demand. Raises OSError on failure."""
    return cast("Arena", extension.load().ShmArena(span_bytes))


def view_arena(fd: int, span_bytes: int) -> View:
    """Map another process's arena. The descriptor may be closed afterwards.

    Raises:
        ValueError: `fd` is not a sealed anonymous file of this size and user.
        OSError: the mapping failed.
    """
    return cast("View", extension.load().ShmView(fd, span_bytes))


def make_team(  # mirrors the constructor in C++
    arena: Arena,
    views: Sequence[View | None],
    index: int,
    board_offset: int,
    pidfds: Sequence[int],
    timeout_s: float,
    waiters_on_host: int,
) -> Team:
    """Join the team whose board lies in its first member's arena.

    Args:
        arena: this member's arena.
        views: views of the members' arenas, None at `index`.
        index: this member's position.
        board_offset: offset of the board in the first member's arena.
        pidfds: pidfds of the members' processes, -1 at `index`.
        timeout_s: time limit of one operation.
        waiters_on_host: largest number of processes on this host that wait at the same time.

    Raises:
        OSError, RuntimeError: pages could not be reserved.
    """
    team = extension.load().ShmTeam(
        arena, views, index, board_offset, pidfds, timeout_s, waiters_on_host
    )
    return cast("Team", team)
