"""All members of one shm group in one process, for tests of the shared-memory core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fddp.native import extension

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_C = extension.load()
MIB = 2**20
COPIED, IN_PLACE = 1024, 40_000  # elements: far below and above the limit of copying


class Crew(NamedTuple):
    """The members' backends of one group, in one process."""

    arenas: list[Any]
    groups: list[Any]
    control_block: int  # offset in the first arena

    @property
    def size(self) -> int:
        return len(self.groups)


def crew_of(size: int, timeout_s: float = 20.0, span_bytes: int = 64 * MIB) -> Crew:
    arenas = [_C.ShmArena(span_bytes) for _ in range(size)]
    control_block = arenas[0].make_control_block(size)
    groups = []
    for rank, arena in enumerate(arenas):
        views = [
            None if other == rank else _C.ShmView(arenas[other].fd, span_bytes)
            for other in range(size)
        ]
        groups.append(_C.ShmBackend(arena, views, rank, control_block, timeout_s))
    return Crew(arenas, groups, control_block)


def outcome(operations: Sequence[Any]) -> set[int]:
    return {operation.status_within(20.0) for operation in operations}


def run(crew: Crew, kind: str, tensors: Sequence[Tensor], **options: Any) -> None:
    """Carry out one operation, each rank on its own tensor."""
    operations = [
        group.start(kind, tensor, **options)
        for group, tensor in zip(crew.groups, tensors, strict=True)
    ]
    assert outcome(operations) == {_C.SHM_OK}
