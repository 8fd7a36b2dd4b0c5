"""Loaders of unequal length that end on all ranks together."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import IterableDataset

from fddp import Communicator
from fddp.errors import UnevenError

_END = object()


class Turn(NamedTuple):
    """Batch of one rank in one iteration of all ranks."""

    is_repeat: bool  # the rank had no batch left, and repeats its last one
    present: int  # number of ranks with a batch of their own


class Lengths(NamedTuple):
    """Lengths of the loaders of all ranks, in batches."""

    longest: int | None  # None if a loader has no length
    is_same: bool  # on all ranks
    is_reliable: bool  # on all ranks

    @property
    def is_even(self) -> bool:
        """True if all ranks have the same number of batches."""
        return self.is_same and self.is_reliable


class Lockstep:
    """Loader that repeats its last batch until the loaders of all ranks have ended.

    For loops with collectives of their own in every iteration, which a rank without input can't
    leave. The loop gives repeated batches the weight zero. Attributes are those of the loader.

    Args:
        loader: loader of this rank.
        lengths: of the loaders of all ranks; also an attribute.
        ranks: communicator. Each fetched batch makes one small exchange on it.
        is_used: called when an iteration starts, with this object. False to iterate over the loader
            itself, without exchanges.

    Attributes:
        turns: entries for batches other than None that were fetched. The loop removes them, the
            first one first.

    Raises:
        UnevenError: a rank has no batch at all; on all ranks, when the first batch is fetched.
    """

    turns: deque[Turn]
    lengths: Lengths

    def __init__(
        self,
        loader: Any,
        lengths: Lengths,
        ranks: Communicator,
        is_used: Callable[[Lockstep], bool] = lambda _: True,
    ) -> None:
        # Not by assignment, which sets attributes of the loader.
        self.__dict__.update(
            _loader=loader, lengths=lengths, _ranks=ranks, _is_used=is_used, turns=deque()
        )

    def __len__(self) -> int:
        longest = self.lengths.longest
        if longest is None:
            raise TypeError(
                f"a {type(self._loader).__name__} has no length on this or another rank"
            )
        return int(longest)

    def __iter__(self) -> Iterator[Any]:
        self.turns.clear()
        if not self._is_used(self):
            yield from self._loader
            return
        batches, batch = iter(self._loader), None
        for number in itertools.count():
            fetched = next(batches, _END)
            is_repeat = fetched is _END
            votes = self._ranks.transport.exchange(bytes([not is_repeat]), "has a batch")
            without = [rank for rank, vote in enumerate(votes) if not any(vote)]
            if len(without) == len(votes):
                return
            if without and number == 0:
                raise empty_error(self._ranks, without)
            batch = batch if is_repeat else fetched
            if batch is not None:
                self.turns.append(Turn(is_repeat, len(votes) - len(without)))
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def exchange_lengths(loader: Any, ranks: Communicator) -> Lengths:
    """Return the lengths of the loaders of all ranks. A collective call.

    Lengths over an `IterableDataset` are not reliable: the number of batches can be another.
    """
    length = _length(loader)
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    own = f"{-1 if length is None else length} {int(length is not None and not is_iterable)}"
    texts = ranks.transport.exchange(own.encode(), "loader lengths")
    pairs = [[int(number) for number in text.split()] for text in texts]
    lengths = [number for number, _ in pairs]
    longest = None if -1 in lengths else max(lengths)
    return Lengths(longest, len(set(lengths)) == 1, all(reliable for _, reliable in pairs))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


@contextmanager
def unchanged_buffers(*modules: nn.Module) -> Iterator[None]:
    """Put the buffers of modules back at the end."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    values = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(
                value
            )  # a graph that waits for its backward may have saved the buffer


def empty_error(ranks: Communicator, without: list[int]) -> UnevenError:
    """Error for ranks that have no batch to repeat."""
    names = ", ".join(map(str, without))
    return UnevenError(
        f"rank {ranks.rank} of {ranks.world_size}: rank {names} has no batch for training, and so "
        f"none to repeat while others train; give each rank at least one batch"
    )
