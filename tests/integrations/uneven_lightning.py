"""Lightning on two ranks with uneven inputs; run by `test_frameworks.py`."""

from __future__ import annotations

import os
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from torch import Tensor

from examples.integrations import task
from fddp import UnevenError
from fddp.integrations.lightning import FddpStrategy
from tests.integrations import uneven_task

RANK = int(os.environ["RANK"])


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The tagger; logs with collectives in every step, and counts batches."""

    def __init__(self, *, has_length: bool = True) -> None:
        super().__init__()
        self.tagger, self.has_length = uneven_task.tagger(), has_length
        self.rows = torchmetrics.SumMetric()
        self.norm = torch.nn.BatchNorm1d(1)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return a sum of losses, and count it."""
        loss, count = task.loss_sum(self.tagger(batch["input_ids"])["logits"], batch["labels"])
        self.trainer.strategy.count_tokens(count)
        self.norm(batch["input_ids"].float().flatten()[:, None])
        self.rows.update(torch.tensor(float(len(batch["labels"]))))
        self.log("loss", loss / count, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        """Log the loss."""
        self.log("validation", self.tagger(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.Adam(self.tagger.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return uneven_task.loader(RANK, has_length=self.has_length)

    def val_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return uneven_task.loader(RANK)


class Manual(Module):
    """Two losses, of one model or of two, and steps of its own."""

    def __init__(self, owners: tuple[int, ...]) -> None:
        super().__init__()
        self.automatic_optimization, self.owners = False, owners
        self.other = uneven_task.tagger()

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        """Run a backward pass for each loss."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for number, owner in enumerate(self.owners):
            loss, count = uneven_task.sums(number, (self.tagger, self.other)[owner], batch)
            self.trainer.strategy.count_tokens(count)
            self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.Adam(self.trained(), lr=0.05)

    def trained(self) -> list[Any]:
        """Return the parameters of the models with losses."""
        parts = (self.tagger, self.other)[: max(self.owners) + 1]
        return [parameter for part in parts for parameter in part.parameters()]


class Stopped(Module):
    """Rank 1 gets a signal in its second step."""

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Ask for a stop."""
        if RANK == 1 and index == 1:
            self.trainer.strategy.request_stop()
        return super().training_step(batch, index)


class Empty(Module):
    """Rank 0 has no batch."""

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return [] if RANK == 0 else uneven_task.loader(RANK)


class Two(Module):
    """Two loaders."""

    def train_dataloader(self) -> Any:
        """Return the batches of this rank, twice."""
        return [uneven_task.loader(RANK), uneven_task.loader(RANK)]


def fit(module: Module, accumulated: int, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        strategy=FddpStrategy(find_unused_parameters=True, **options),
        accelerator="cpu",
        devices=len(uneven_task.LENGTHS),
        max_epochs=uneven_task.EPOCHS,
        accumulate_grad_batches=accumulated,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module)
    return trainer


def main() -> None:
    """Run the cases."""
    for has_length in (True, False):
        for accumulated in (1, 2):
            module = Module(has_length=has_length)
            trainer = fit(module, accumulated)
            rows = sum(len(b["labels"]) for r in (0, 1) for b in uneven_task.batches(r))
            assert float(trainer.callback_metrics["rows"]) == rows
            assert int(module.norm.num_batches_tracked) in {2 * n for n in uneven_task.LENGTHS}
            assert trainer.global_step == 2 * -(-max(uneven_task.LENGTHS) // accumulated)
            name = f"lightning, length {has_length}, {accumulated} accumulated"
            wanted = uneven_task.of_one_process(accumulated)
            uneven_task.check(name, module.tagger.parameters(), wanted)
    for owners in ((0,), (0, 0), (0, 1), (0, 1, 1)):
        manual = Manual(owners)
        fit(manual, 1)
        wanted = uneven_task.of_one_process(1, owners)
        uneven_task.check(f"lightning, manual, losses of {owners}", manual.trained(), wanted)
    trainer = fit(Stopped(), 1)
    assert trainer.strategy.stopping
    assert trainer.global_step == 3  # the step after the request tells it
    for module, text in ((Empty(), "rank 0 has no batch"), (Two(), "one loader")):
        with pytest.raises(UnevenError, match=text):
            fit(module, 1)


if __name__ == "__main__":
    main()
