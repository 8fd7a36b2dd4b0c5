"""Samples of virtual ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from fddp.core.entrance import entrance
from fddp.sync.rounds import EXHAUSTED
from fddp.sync.virtual_random import derived_seed


class VirtualSampler(Sampler[list[int]]):
    """Batches of indices for the virtual ranks that a rank carries; a batch sampler of torch.

    The samples of a virtual rank in a step depend on the arguments but `carried` alone, so that
    they are the same on any number of ranks. A pass over the data is an epoch. Its samples are cut
    into batches, which go to virtual ranks in turn: the first `batch_size` samples to virtual rank
    0, the next to 1, and so on. In the last step of an epoch a batch may be short, and virtual
    ranks may have none.

    Args:
        data_source: the data set, or its length.
        virtual_ranks: number of virtual ranks.
        carried: virtual ranks of this rank; `GradSync.carried_ranks`.
        batch_size: number of samples of a virtual rank in a step.
        shuffle: True to draw a new order for each epoch.
        seed: seed of these orders.
        drop_last: True to leave out the last step of an epoch if a batch would be short.

    Attributes:
        epoch: number of the current epoch, from 0.
        step: number of steps in this epoch that `steps` has handed out.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> import torch, fddp
        >>> from torch.utils.data import DataLoader
        >>> sampler = fddp.VirtualSampler(7, 4, carried=range(2, 4), batch_size=1, shuffle=False)
        >>> [*sampler]
        [[2], [3], [6]]
        >>> loader = DataLoader(torch.arange(7), batch_sampler=sampler)
        >>> for number, batches in sampler.steps(loader):
        ...     print(number, batches)
        0 [tensor([2]), tensor([3])]
        1 [tensor([6]), fddp.EXHAUSTED]
    """

    @entrance
    def __init__(
        self,
        data_source: Sized | int,
        virtual_ranks: int,
        carried: range,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        length = data_source if isinstance(data_source, int) else len(data_source)
        if length < 1 or batch_size < 1:
            raise ValueError(
                f"there must be samples in the data and in batches, got {length} and {batch_size}"
            )
        if not carried or not 0 <= carried[0] <= carried[-1] < virtual_ranks:
            raise ValueError(
                f"carried must be virtual ranks of the {virtual_ranks}, got {carried}; pass "
                f"carried_ranks of a GradSync with virtual_ranks={virtual_ranks}"
            )
        self._fixed = {
            "samples": length,
            "virtual_ranks": virtual_ranks,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
        }
        self._length, self._batch_size = length, batch_size
        self._virtual_ranks, self._carried = virtual_ranks, carried
        self._shuffle, self._seed = shuffle, seed
        full, rest = divmod(length, virtual_ranks * batch_size)
        self.steps_per_epoch = full + (rest > 0 and not drop_last)
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"{length} samples are no step of {virtual_ranks} batches of {batch_size}; pass "
                f"drop_last=False, or smaller batches"
            )
        self.epoch = self.step = 0

    @entrance
    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches of the rest of the epoch, step by step, without empty ones."""
        order = self._order(self.epoch)
        start = self.step
        return (
            order[self._part(step, number)].tolist()
            for step in range(start, self.steps_per_epoch)
            for number in self._carried
            if self._has_samples(step, number)
        )

    def __len__(self) -> int:
        """Number of batches of this rank in a whole epoch."""
        steps = range(self.steps_per_epoch)
        return sum(self._has_samples(step, number) for step in steps for number in self._carried)

    @entrance
    def steps(self, loader: Iterable[Any]) -> Iterator[tuple[int, list[Any]]]:
        """Iterate over the rest of the epoch, and go on to the next epoch.

        Args:
            loader: iterable over the batches, such as a `DataLoader` with this batch sampler; it
                may load ahead.

        Yields:
            The number of the step, over all epochs, and one batch for each carried virtual rank,
            or `EXHAUSTED`, for `GradSync.virtual_batches`.
        """
        loaded = iter(loader)
        while self.step < self.steps_per_epoch:
            step, self.step = self.step, self.step + 1
            batches = [
                next(loaded) if self._has_samples(step, number) else EXHAUSTED
                for number in self._carried
            ]
            yield self.epoch * self.steps_per_epoch + step, batches
        self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the step handed out last, the same on all ranks."""
        epoch, step = self.epoch, self.step
        if step == self.steps_per_epoch:
            epoch, step = epoch + 1, 0
        return {**self._fixed, "epoch": epoch, "step": step}

    @entrance
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, of a run on any number of ranks.

        Raises:
            ValueError: the sampler of that run had other arguments.
        """
        for name, value in self._fixed.items():
            if state.get(name) != value:
                raise ValueError(
                    f"{name} is {value}, and was {state.get(name)} where the state was saved; "
                    f"pass the same, or other samples follow"
                )
        self.epoch, self.step = state["epoch"], state["step"]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed(derived_seed("epoch", self._seed, epoch))
        return torch.randperm(self._length, generator=generator)

    def _part(self, step: int, number: int) -> slice:
        start = (step * self._virtual_ranks + number) * self._batch_size
        return slice(start, start + self._batch_size)

    def _has_samples(self, step: int, number: int) -> bool:
        return (step * self._virtual_ranks + number) * self._batch_size < self._length
