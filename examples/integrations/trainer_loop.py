"""The Trainer of Transformers with fddp: a mean over labels by default, uneven inputs."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from examples.integrations import task
from fddp.integrations.transformers import FddpTrainer


class Aware(task.Tagger):
    """A tagger that divides by the number of labels that `Trainer` counts."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **options: Tensor
    ) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        output = super().forward(input_ids, labels)
        num_items_in_batch = options.get("num_items_in_batch")
        if labels is not None and num_items_in_batch is not None:
            output["loss"] = task.loss_sum(output["logits"], labels)[0] / num_items_in_batch
        return output


class Uneven(FddpTrainer):
    """A trainer whose ranks have different numbers of batches."""

    def get_train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return task.uneven_batches()


def train(trainer: type[Trainer], model: task.Tagger) -> list[Tensor]:
    """Train with two accumulated batches a step."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=task.BATCH,
            gradient_accumulation_steps=task.ACCUMULATED,
            max_steps=task.STEPS,
            learning_rate=task.RATE,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer(model=model, args=arguments, train_dataset=task.samples()).train()
    return task.values(model.parameters())


def main() -> None:
    """Compare stock's and fddp's parameters with those of one process."""
    wanted = task.of_one_process(task.samples())
    stock, aware = train(Trainer, task.Tagger()), train(Trainer, Aware())
    ours, ours_aware = train(FddpTrainer, task.Tagger()), train(FddpTrainer, Aware())
    assert all(map(torch.equal, aware, ours_aware)), "fddp's class gave other bits than torch's"
    uneven = train(Uneven, task.Tagger())
    alone = task.of_one_process(task.samples(task.UNEVEN))
    task.report(
        "transformers",
        {
            "Trainer, any model": (task.difference(stock, wanted), False),
            "Trainer, model with num_items_in_batch": (task.difference(aware, wanted), True),
            "FddpTrainer, any model": (task.difference(ours, wanted), True),
            "FddpTrainer, model with num_items_in_batch": (
                task.difference(ours_aware, wanted),
                True,
            ),
            "FddpTrainer, uneven inputs": (task.difference(uneven, alone), True),
        },
    )


if __name__ == "__main__":
    task.under_torchrun(main)
