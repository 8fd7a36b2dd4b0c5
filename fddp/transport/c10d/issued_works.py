"""Operations of a transport that may still be in flight."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from fddp.transport.c10d.communicator import PendingWorks

if TYPE_CHECKING:
    from fddp.transport.c10d.communicator import Communicator, Pending
    from fddp.transport.operation import Operation

_MAX_WORKS = 256  # works remembered before finished ones are removed


class IssuedWork(Protocol):
    """A work whose `collective` is None once it is over, at a `place` among the operations of its
    communicator."""

    communicator: Communicator
    collective: Pending | None
    operation: Operation | None
    place: int


class IssuedWorks:
    """Works in the order of issue, some finished."""

    def __init__(self) -> None:
        self._works: list[weakref.ref[IssuedWork]] = []

    def add(self, work: IssuedWork) -> None:
        if len(self._works) == _MAX_WORKS:
            self._works = [ref for ref in self._works if _is_open(ref)]
        self._works.append(weakref.ref(work))

    def first_failed(self, failed: IssuedWork) -> tuple[int, str]:
        """Return position and description of the first failed operation of the same ranks.

        Where ranks diverge, later operations fail only because this one did.
        """
        for ref in self._works:
            work = ref()
            if work is None or work.communicator is not failed.communicator:
                continue
            collective = work.collective
            has_failed = isinstance(collective, PendingWorks) and not collective.succeeded
            if has_failed and work.place < failed.place:
                return work.place, str(work.operation)
        return failed.place, "" if failed.operation is None else str(failed.operation)


def _is_open(ref: weakref.ref[IssuedWork]) -> bool:
    work = ref()
    return work is not None and work.collective is not None
