"""fddp in the Trainer of Hugging Face's Transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from fddp.integrations.replace_ddp import install

# Older ones divide every loss by the number of accumulated batches, without a way to say no.
if not hasattr(Trainer, "loss_is_scaled_for_ga"):
    raise ImportError(
        "FddpTrainer needs a Trainer with loss_is_scaled_for_ga; upgrade transformers"
    )


class FddpTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` with fddp's `DistributedDataParallel`, and means over labels for any model.

    `Trainer` itself divides by the labels of all ranks and accumulated batches if the model accepts
    `num_items_in_batch`, or with a `compute_loss_func`. Other losses are taken here for the mean
    over labels that are not -100, and weighted by their number.
    """

    _total = 0  # labels of a step, if its losses are to be weighted

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does, in fddp's wrapper."""
        with install(quiet=True):
            return super().train(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Fetch the batches of a step, and count their labels."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        has_labels = num_items is None and all("labels" in sample for sample in samples)
        self._total = 0
        if has_labels and self.args.average_tokens_across_devices:
            own = torch.tensor(sum(map(self._labels, samples)), device=device)
            self._total = int(self.accelerator.gather(own).sum())
        self.loss_is_scaled_for_ga = True if self._total else None
        return samples, num_items

    def _labels(self, inputs: Any) -> int:
        labels = inputs["labels"][..., 1:] if self._loss_shifts_labels else inputs["labels"]
        return int((labels != -100).sum())

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the loss; in training, its part in the mean over all labels."""
        own = self._labels(inputs) if self._total and model.training else 0
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if own:
            loss = loss * (own * self.accelerator.num_processes / self._total)
        return (loss, outputs) if return_outputs else loss
