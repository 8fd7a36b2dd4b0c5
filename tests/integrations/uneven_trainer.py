"""The Trainer of Transformers on two ranks with uneven inputs; run by `test_frameworks.py`."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from examples.integrations import task
from examples.integrations.trainer_loop import Aware
from fddp import UnevenError
from fddp.integrations.transformers import FddpTrainer
from tests.integrations import uneven_task

RANK = int(os.environ["RANK"])


class Own(FddpTrainer):
    """Trainer whose ranks bring batches of their own."""

    has_length = True

    def get_train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return uneven_task.loader(RANK, has_length=self.has_length)


class Streaming(Own):
    """Trainer whose loaders have no length."""

    has_length = False


class OwnLoss(Own):
    """Trainer with a loss of its own, a mean over labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean over the labels of a batch."""
        output = model(**inputs)
        return (output["loss"], output) if return_outputs else output["loss"]


class Means(OwnLoss):
    """Trainer whose loss is a mean over a batch, of which a step has the mean."""

    loss_is_scaled_for_ga = False


class Scaled(OwnLoss):
    """Trainer whose loss is its part in that of the whole step."""

    loss_is_scaled_for_ga = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **items: Any
    ) -> Any:
        """Return a sum over labels, divided by the number in the step on all ranks."""
        output = model(inputs["input_ids"])
        loss, count = task.loss_sum(output["logits"], inputs["labels"])
        total = items.get("num_items_in_batch")
        loss = loss * len(uneven_task.LENGTHS) / total if self.is_in_train else loss / count
        return (loss, output) if return_outputs else loss


class Stopped(Own):
    """Trainer of which rank 1 gets a signal in its second step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Ask for a stop."""
        if RANK == 1 and self.state.global_step == 1:
            self.request_stop()
        return super().compute_loss(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train until the stop, which the step after the request tells."""
        done = super().train(*args, **kwargs)
        assert self.stopping
        assert self.state.global_step == 3
        return done


class Empty(FddpTrainer):
    """Trainer whose rank 0 has no batch."""

    def get_train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return [] if RANK == 0 else uneven_task.loader(RANK)


def train(kind: type[FddpTrainer], model: Any, accumulated: int, **options: Any) -> list[Any]:
    """Train for two epochs."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=uneven_task.EPOCHS,
            per_device_train_batch_size=uneven_task.SIZE,
            per_device_eval_batch_size=uneven_task.SIZE,
            gradient_accumulation_steps=accumulated,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_steps=1,
            eval_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        data = task.samples(9)
        kind(model=model, args=arguments, train_dataset=data, eval_dataset=data).train()
    return task.values(model.parameters())


def sharded_alone() -> list[Any]:
    """Parameters of one process on nine samples, four a step."""
    model, data = uneven_task.tagger(), task.samples(9)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(uneven_task.EPOCHS):
        for first in range(0, 9, 4):
            optimizer.zero_grad()
            batch = torch.utils.data.default_collate(data[first : first + 4])
            model(**batch)["loss"].backward()
            optimizer.step()
    return task.values(model.parameters())


def main() -> None:
    """Run the cases."""
    for model in (task.Tagger, Aware):
        for accumulated in (1, 2):
            steps = uneven_task.EPOCHS * -(-max(uneven_task.LENGTHS) // accumulated)
            for kind, options in ((Own, {}), (Streaming, {"max_steps": steps})):
                found = train(kind, model().double(), accumulated, **options)
                name = f"trainer, {model.__name__}, {kind.__name__}, {accumulated} accumulated"
                uneven_task.check(name, found, uneven_task.of_one_process(accumulated))
            own = (OwnLoss, Means) if model is task.Tagger else (Scaled, Means)
            for kind in own:
                found = train(kind, model().double(), accumulated)
                by_labels = kind is not Means
                one = uneven_task.of_one_process if by_labels else uneven_task.of_means
                name = f"trainer, {model.__name__}, {kind.__name__}, {accumulated} accumulated"
                uneven_task.check(name, found, one(accumulated))
        config = {"even_batches": False}
        found = train(FddpTrainer, model().double(), 1, accelerator_config=config)
        difference = task.difference(found, sharded_alone())
        print(f"case trainer, {model.__name__}, even_batches False: {difference:.1e}")
    train(Stopped, task.Tagger().double(), 1)
    with pytest.raises(UnevenError, match="rank 0 has no batch"):
        train(Empty, task.Tagger().double(), 1)


if __name__ == "__main__":
    main()
