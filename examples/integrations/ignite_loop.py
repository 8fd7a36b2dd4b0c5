"""An engine of Ignite with fddp in `idist.auto_model`, and a mean over tokens."""

from __future__ import annotations

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from examples.integrations import task
from fddp.integrations import TokenMean, install


def train(*, by_tokens: bool) -> list[Tensor]:
    """Train; with `by_tokens`, for the mean over all labels of a step."""
    model = idist.auto_model(task.Tagger())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=task.RATE))
    tokens = TokenMean()

    def step(engine: Engine, batch: dict[str, Tensor]) -> None:
        output = model(batch["input_ids"], batch["labels"])
        if by_tokens:
            loss, count = task.loss_sum(output["logits"], batch["labels"])
            loss.backward()
            tokens.add(count)
            tokens.scale_(model.parameters())
        else:
            output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    Engine(step).run(task.batches_of_rank(task.STEP // task.RANKS), max_epochs=1)
    return task.values(model.parameters())


def train_uneven(number: int) -> list[Tensor]:
    """Train where rank 1 has a batch less, for the mean over all labels."""
    model = idist.auto_model(task.Tagger())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=task.RATE))
    tokens = TokenMean()

    def step(engine: Engine, batch: dict[str, Tensor]) -> None:
        loss, count = task.loss_sum(model(batch["input_ids"])["logits"], batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        tokens.add(count)
        tokens.scale_(model.parameters())
        optimizer.step()

    whole = list(DataLoader(task.samples(number), batch_size=task.BATCH))
    with Join([model, tokens]):
        Engine(step).run(whole[idist.get_rank() :: task.RANKS], max_epochs=1)
    return task.values(model.parameters())


def main(local_rank: int = 0) -> None:
    """Compare stock's and fddp's parameters with those of one process."""
    idist.initialize("gloo")
    wanted = task.of_one_process(task.samples())
    stock = train(by_tokens=False)
    with install():
        same, exact = train(by_tokens=False), train(by_tokens=True)
        per_step = task.BATCH * task.RANKS
        uneven = train_uneven(3 * per_step + task.BATCH)
    alone = task.of_one_process(task.samples(3 * per_step + task.BATCH), per_step)
    assert all(map(torch.equal, stock, same)), "fddp's class gave other bits than torch's"
    task.report(
        "ignite",
        {
            "torch's class, mean of means": (task.difference(stock, wanted), False),
            "fddp's class and TokenMean": (task.difference(exact, wanted), True),
            "TokenMean in a Join, uneven inputs": (task.difference(uneven, alone), True),
        },
    )


if __name__ == "__main__":
    task.under_torchrun(main)
