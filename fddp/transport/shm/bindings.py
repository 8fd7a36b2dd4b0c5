"""The extension's shared memory, typed: arenas, views of other processes' arenas, backends."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

from fddp.native import extension

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist
    from torch import Tensor


class Status(IntEnum):
    """Status of an operation; all but `PENDING` are final."""

    PENDING = 0
    OK = 1
    LOST = 2  # members died, or left while they were needed
    TIMEOUT = 3  # members did not come in time
    MISMATCH = 4  # members met in different operations; the group stays usable
    CLOSED = 5  # this rank left the group
    CORRUPT = 6  # the control block contains invalid data
    PEER_FAILED = 7  # a member reported a failure outside of the group


class Arena(Protocol):
    """Anonymous memory of a process that other processes map. Freed with its last mapping."""

    @property
    def fd(self) -> int: ...
    @property
    def span(self) -> int: ...
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None: ...
    def allocate_zeroed(self, n_bytes: int) -> int | None: ...
    def read(self, offset: int, n: int) -> bytes: ...
    def make_control_block(self, members: int) -> int | None: ...
    def trim(self) -> int: ...
    def close_fd(self) -> None: ...


class View(Protocol):
    def write(self, offset: int, data: bytes) -> None: ...


class ShmOperation(Protocol):
    """An operation of a `ShmBackend`."""

    @property
    def done(self) -> bool: ...
    @property
    def done_s(self) -> float | None: ...
    def status_within(self, seconds: float) -> int: ...
    def descriptors(self) -> list[dict[str, Any]]: ...


class ShmBackend(Protocol):
    """Ranks that have mapped each other's arenas, a `Backend` of torch; members are numbered by
    their place."""

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
        wait_soon: bool = ...,
        prompt: bool = ...,
        tree: tuple[Sequence[int], Sequence[int]] | None = ...,
    ) -> ShmOperation:
        """Start an operation on a whole tensor, in place. Never blocks. Raises TypeError or
        ValueError if the tensor is unsuitable, which does not affect the other members."""

    def split(self, store: dist.Store, ranks: Sequence[int], timeout_s: float) -> ShmBackend:
        """Create a backend of some ranks of this one, which meet in the store; blocks."""

    def collectives_of_steps(self) -> Any: ...
    def fail(self, status: int, members: Sequence[int]) -> None: ...
    def shutdown(self) -> None: ...


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


def make_shm_backend(
    arena: Arena,
    views: Sequence[View | None],
    index: int,
    control_block_offset: int,
    timeout_s: float,
    waiters_on_host: int,
) -> ShmBackend:
    """Join the group whose control block lies in its first member's arena.

    Views are those of the members, None at this member's `index`.
    `waiters_on_host` is the number of processes of this host that may wait at the same time.
    Raises OSError or RuntimeError if pages can't be reserved.
    """
    made = extension.load().ShmBackend(
        arena, views, index, control_block_offset, timeout_s, waiters_on_host
    )
    return cast("ShmBackend", made)
