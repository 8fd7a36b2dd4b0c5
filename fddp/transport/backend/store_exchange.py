"""Exchange of small messages between the ranks of a new process group, through its store."""

from __future__ import annotations

from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING

from fddp.core.protocol.messages import decode_all
from fddp.core.text import counted
from fddp.errors import SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist


class StoreExchange:
    """Exchanges between all ranks of a store's group, matched by their order.

    Attributes:
        rank: this rank's number in the group.
        world_size: number of ranks in the group.
        timeout_s: time limit of all exchanges together, in seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        names: Sequence[str] = (),
        call: str = "creating a process group",
    ) -> None:
        """Create the exchange of the ranks that use this part of a store.

        Args:
            names: of the ranks in keys, by rank; their numbers by default.
            call: what the ranks do, for errors.
        """
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store, self._call = store, call
        self._names = names or [str(rank) for rank in range(world_size)]
        self._deadline_s = perf_counter() + timeout_s
        self._exchanges = 0

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, by rank; blocks.

        Raises:
            SyncTimeoutError: some ranks did not take part in time.
        """
        prefix = f"fddp/{self._exchanges}"
        self._exchanges += 1
        # A store's `set` takes text. The payload may have any bytes.
        self._store.set(f"{prefix}/{self._names[self.rank]}", payload.hex())
        keys = [f"{prefix}/{name}" for name in self._names]
        left_s = max(0.001, self._deadline_s - perf_counter())
        try:
            self._store.wait(keys, timedelta(seconds=left_s))
        except RuntimeError as error:
            raise self._missing_error(keys) from error
        texts = [self._store.get(key) for key in keys]
        return decode_all(texts, lambda text: bytes.fromhex(text.decode()), "store")

    def close(self) -> None:
        """End the exchanges. The last rank deletes their keys, which a later group of the same name
        would read."""
        if self._store.add("fddp/met", 1) < self.world_size:
            return
        for number in range(self._exchanges):
            for name in self._names:
                self._store.delete_key(f"fddp/{number}/{name}")
        self._store.delete_key("fddp/met")

    def _missing_error(self, keys: list[str]) -> SyncTimeoutError:
        missing = tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))
        return missing_error(self.rank, self.world_size, missing, self.timeout_s, self._call)


def missing_error(
    rank: int,
    world_size: int,
    missing: tuple[int, ...],
    timeout_s: float,
    call: str = "creating a process group",
) -> SyncTimeoutError:
    return SyncTimeoutError(
        f"{call} on rank {rank} of {world_size}: "
        f"{counted(len(missing), 'rank')} did not take part within "
        f"timeout={timeout_s} s: {', '.join(map(str, missing))}",
        missing,
    )
