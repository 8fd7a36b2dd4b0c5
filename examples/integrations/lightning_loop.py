"""A Trainer of Lightning with fddp: accumulated batches, a mean over tokens, uneven inputs."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from examples.integrations import task
from fddp.integrations.lightning import FddpStrategy


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The tagger; with `by_tokens`, for the mean over all labels of a step."""

    def __init__(self, *, by_tokens: bool, is_uneven: bool) -> None:
        super().__init__()
        self.tagger, self.by_tokens, self.is_uneven = task.Tagger(), by_tokens, is_uneven

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return a sum of losses, and count it, or a mean."""
        output = self.tagger(batch["input_ids"], batch["labels"])
        if not self.by_tokens:
            loss: Tensor = output["loss"]
            return loss
        loss, count = task.loss_sum(output["logits"], batch["labels"])
        self.trainer.strategy.count_tokens(count)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=task.RATE)

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return task.uneven_batches() if self.is_uneven else task.batches_of_rank(task.BATCH)


def train(strategy: DDPStrategy, *, by_tokens: bool, is_uneven: bool = False) -> list[Tensor]:
    """Train for an epoch with two accumulated batches a step."""
    module = Module(by_tokens=by_tokens, is_uneven=is_uneven)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=task.RANKS,
        max_epochs=1,
        accumulate_grad_batches=task.ACCUMULATED,
        use_distributed_sampler=False,  # loaders are those of this rank
        gradient_clip_val=100.0,
        **quiet,
    ).fit(module)
    return task.values(module.parameters())


def main() -> None:
    """Compare stock's and fddp's parameters with those of one process."""
    wanted = task.of_one_process(task.samples())
    stock = train(DDPStrategy(), by_tokens=False)
    same = train(FddpStrategy(), by_tokens=False)
    assert all(map(torch.equal, stock, same)), "fddp's class gave other bits than torch's"
    exact = train(FddpStrategy(), by_tokens=True)
    uneven = train(FddpStrategy(), by_tokens=True, is_uneven=True)
    alone = task.of_one_process(task.samples(task.UNEVEN))
    task.report(
        "lightning",
        {
            "DDPStrategy, mean of means": (task.difference(stock, wanted), False),
            "FddpStrategy, count_tokens": (task.difference(exact, wanted), True),
            "FddpStrategy, uneven inputs": (task.difference(uneven, alone), True),
        },
    )


if __name__ == "__main__":
    task.under_torchrun(main)
