"""The extension's shared memory, typed: arenas, views of other processes' arenas, teams."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

from fddp.native import extension

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class Status(IntEnum):
    """How an operation stands; all but the first are its end."""

    PENDING = 0
    OK = 1
    LOST = 2  # members died, or left while they were needed
    TIMEOUT = 3  # members did not come in time
    MISMATCH = 4  # members met in different operations; the team stays usable
    CLOSED = 5  # this rank left the team
    BROKEN = 6  # what members wrote makes no sense
    PEER_FAILED = 7  # a member met a failure elsewhere


class Arena(Protocol):
    """A process's memory that others map; anonymous, so that it ends with those who hold it."""

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
    """Another process's arena, mapped."""

    def write(self, offset: int, data: bytes) -> None: ...


class ShmWork(Protocol):
    """An operation of a team."""

    @property
    def done(self) -> bool: ...
    @property
    def done_s(self) -> float | None: ...
    def wait(self, slice_s: float) -> int: ...
    def descriptors(self) -> list[dict[str, Any]]: ...


class Team(Protocol):
    """Ranks that have mapped each other's arenas; members are numbered by their place."""

    @property
    def failure(self) -> tuple[int, tuple[int, ...], int]: ...
    @property
    def states(self) -> list[str]: ...
    def start(
        self,
        kind: str,
        tensor: Tensor,
        src: int = ...,
        average: bool = ...,
        order: Sequence[int] = ...,
        soon: bool = ...,
        stamp: bool = ...,
    ) -> ShmWork:
        """Never blocks.

        Raises:
            TypeError, ValueError: the tensor can't be summed or moved; nothing was told to others.
        """

    def fail(self, status: int, members: Sequence[int]) -> None: ...
    def leave(self) -> None: ...


def make_arena(span_bytes: int) -> Arena:
    """Reserves addresses, and pages only as they are needed; an OSError if that can't be."""
    return cast("Arena", extension.load().ShmArena(span_bytes))


def view_arena(fd: int, span_bytes: int) -> View:
    """Maps another process's arena; the descriptor may be closed after that.

    Raises:
        ValueError: it is no sealed anonymous file of this size and user.
        OSError: it can't be mapped.
    """
    return cast("View", extension.load().ShmView(fd, span_bytes))


def make_team(
    arena: Arena,
    views: Sequence[View | None],
    index: int,
    board_offset: int,
    pidfds: Sequence[int],
    timeout_s: float,
    waiters_on_host: int,
) -> Team:
    """Joins the team whose board lies in its first member's arena.

    Args:
        arena: this member's.
        views: of the members' arenas, None at `index`.
        index: this member's place.
        board_offset: of the board.
        pidfds: of the members' processes, -1 at `index`.
        timeout_s: the longest that an operation may take.
        waiters_on_host: processes on this host that may be waiting at a time.

    Raises:
        OSError, RuntimeError: pages could not be reserved.
    """
    made = extension.load().ShmTeam(
        arena, views, index, board_offset, pidfds, timeout_s, waiters_on_host
    )
    return cast("Team", made)
