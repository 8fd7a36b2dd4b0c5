"""fddp in the Trainer of Hugging Face's Transformers.

[Note: exhausted ranks in Trainer]
`Trainer` computes the number of steps from the length of its own loader, and has collectives in
every step and at the end. So no rank leaves its loop early. All ranks take the steps of the longest
loader, and a rank with too few batches for a step repeats its last one with the weight zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from transformers import Trainer

from fddp import Communicator, DistributedDataParallel
from fddp.integrations.lockstep import (
    Lockstep,
    empty_error,
    exchange_lengths,
    unchanged_buffers,
)
from fddp.integrations.replace_ddp import install

# Older ones divide every loss by the number of accumulated batches, without a way to say no.
if not hasattr(Trainer, "loss_is_scaled_for_ga"):
    raise ImportError(
        "FddpTrainer needs a Trainer with loss_is_scaled_for_ga; upgrade transformers"
    )


class FddpTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` with fddp's `DistributedDataParallel`, and means over labels for any model.

    `Trainer` itself divides by the labels of all ranks and accumulated batches if the model accepts
    `num_items_in_batch`, or with a `compute_loss_func`. Other losses, as of a subclass's
    `compute_loss`, are taken here for the mean over labels that are not -100, and weighted by their
    number. A subclass that sets `loss_is_scaled_for_ga` is followed: False stands for means of
    equal weight, and True for losses to be used as they are.

    Ranks may have different numbers of batches; see [Note: exhausted ranks in Trainer].

    Raises:
        UnevenError: in training: a rank has no batch at all.
    """

    loss_is_scaled_for_ga: bool | None
    _total = 0  # labels of a step, if its losses are to be weighted
    _ranks: Communicator | None = None  # if ranks may have different numbers of batches
    _last: Any = None  # last batch of this rank
    _asks_stop = False  # of all ranks

    def request_stop(self) -> None:
        """End training on all ranks after the same step; see `fddp.stop_on_signal`.

        Callbacks see `control.should_training_stop` after that step, and may ask for a checkpoint.
        """
        self._asks_stop = True

    @property
    def stopping(self) -> bool:
        """True once all ranks end training."""
        return bool(self.control.should_training_stop)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does, in fddp's wrapper."""
        with install(quiet=True):
            return super().train(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Compute the numbers of steps, from the longest loader of all ranks."""
        self._ranks = self._last = None
        if args.world_size > 1:
            ranks = Communicator()
            lengths = exchange_lengths(dataloader, ranks)
            if not lengths.is_even:
                self._ranks = ranks
                dataloader = Lockstep(dataloader, lengths, ranks)
        return super().set_initial_training_values(args, dataloader)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Fetch the batches of a step, and count their labels."""
        self._weights: deque[float] = deque()  # of batches whose weight is not 1
        if self._ranks is None:
            samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
            self._set_total(samples, len(samples), num_items, device)
            return samples, num_items
        samples = [*islice(epoch_iterator, num_batches)]
        votes = self._ranks.transport.exchange(len(samples).to_bytes(8, "big"), "batches")
        counts = [int.from_bytes(vote, "big") for vote in votes]
        if not any(counts):
            return [], None
        if self._last is None and not all(counts):
            raise empty_error(self._ranks, [rank for rank, n in enumerate(counts) if n == 0])
        self._last = samples[-1] if samples else self._last
        # With fewer batches on all ranks, Trainer would not step.
        repeats = [self._last] * (num_batches - len(samples))
        uncounted = [_without_labels(batch) for batch in repeats]
        num_items = self._get_num_items_in_batch([*samples, *uncounted], device)
        self._set_total([*samples, *repeats], len(samples), num_items, device)
        weight = 1.0
        if num_items is not None and not self.args.average_tokens_across_devices:
            num_items = num_items.clamp(min=1)  # a rank without labels has the weight zero
            weight = len(counts) / sum(map(bool, counts))
        elif self.loss_is_scaled_for_ga is False or (num_items is None and not self._total):
            weight = len(counts) * num_batches / sum(counts)
        self._weights.extend([weight] * len(samples) + [0.0] * len(repeats))
        return [*samples, *repeats], num_items

    def _set_total(self, batches: list[Any], number: int, num_items: Any, device: Any) -> None:
        """Count the labels of the first `number` batches of all ranks, if losses need weights."""
        is_open = num_items is None and self.loss_is_scaled_for_ga is None
        has_labels = is_open and all("labels" in batch for batch in batches)
        self._total = 0
        if has_labels and self.args.average_tokens_across_devices:
            own = torch.tensor(sum(map(self._labels, batches[:number])), device=device)
            self._total = int(self.accelerator.gather(own).sum())

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward; a repeated batch leaves buffers as they were."""
        if self._asks_stop and isinstance(model, DistributedDataParallel):
            model.request_stop()
        weight = self._weights.popleft() if self._weights else 1.0
        with self._weighted_losses(weight), nullcontext() if weight else unchanged_buffers(model):
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.control.should_training_stop |= getattr(model, "stopping", self._asks_stop)
        return loss

    @contextmanager
    def _weighted_losses(self, weight: float) -> Iterator[None]:
        """Let `compute_loss`, which may be a subclass's, return its part in the step's loss."""
        compute_loss: Any = self.compute_loss
        total, attributes = self._total, self.__dict__
        names = ("compute_loss", "loss_is_scaled_for_ga")
        before = {name: attributes[name] for name in names if name in attributes}

        def weighted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            share = self._labels(inputs) * self.accelerator.num_processes / total if total else 1.0
            return compute_loss(model, inputs, *args, **kwargs) * (share * weight)

        attributes["compute_loss"] = weighted
        if total:
            attributes["loss_is_scaled_for_ga"] = True
        try:
            yield
        finally:
            for name in names:
                attributes.pop(name, None)
            attributes.update(before)

    def _labels(self, inputs: Any) -> int:
        labels = inputs["labels"][..., 1:] if self._loss_shifts_labels else inputs["labels"]
        return int((labels != -100).sum())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loader of an evaluation, with as many batches on each rank."""
        return self._even(super().get_eval_dataloader, *args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loader of a prediction, with as many batches on each rank."""
        return self._even(super().get_test_dataloader, *args, **kwargs)

    def _even(self, make_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `make_loader` with `even_batches`: evaluation gathers every batch."""
        configuration = self.accelerator.dataloader_config
        before, configuration.even_batches = configuration.even_batches, True
        try:
            return make_loader(*args, **kwargs)
        finally:
            configuration.even_batches = before


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    ignored = ("labels", "shift_labels")
    return {k: torch.full_like(v, -100) if k in ignored else v for k, v in batch.items()}
