"""Training by a strategy of Lightning, over the backend that is named; see `test_backend`."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from examples.integrations import task
from fddp.transport.backend import backend_choice


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The tagger, sharded if the strategy has a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = task.Tagger()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.tagger, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.tagger(batch["input_ids"], batch["labels"])["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=task.RATE)

    def train_dataloader(self) -> Any:
        return task.batches_of_rank(task.BATCH)


def main(strategy: str, backend: str) -> None:
    """Train, and print a sum over the parameters on rank 0."""
    module = Module()
    made = {"DDPStrategy": DDPStrategy, "ModelParallelStrategy": ModelParallelStrategy}[strategy]
    lightning.Trainer(
        strategy=made(process_group_backend=backend),
        accelerator="cpu",
        devices=task.RANKS,
        max_epochs=1,
        use_distributed_sampler=False,  # loaders are those of this rank
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module)
    assert dist.get_backend() == backend
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    if dist.get_rank() == 0:
        total = sum(float(p.detach().double().sum()) for p in whole)
        over = backend_choice().name if backend == "fddp" else backend
        print(f"over {over}: {total.hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
