"""What the examples train: a tagger on sequences with different numbers of labels.

A step takes `STEP` sequences from all ranks and micro-batches. Its gradient has to be that of the
mean over all their labels, as in one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BATCH, ACCUMULATED, RANKS, STEPS = 4, 2, 2, 4
STEP = BATCH * ACCUMULATED * RANKS
UNEVEN = 3 * STEP + BATCH  # samples of which rank 0 has a batch more
RATE = 0.5
_LENGTH, _WORDS, _TAGS = 6, 12, 5


class Tagger(nn.Module):
    """Tags of words; -100 stands for no label."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(_WORDS, 8)
        self.output = nn.Linear(8, _TAGS)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits, and with labels their mean loss."""
        logits = self.output(torch.tanh(self.embedding(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def samples(number: int = STEP * STEPS) -> Any:
    """Sequences with one to six labels."""
    generator = torch.Generator().manual_seed(1)
    made: list[dict[str, Tensor]] = []
    for _ in range(number):
        words = torch.randint(_WORDS, (_LENGTH,), generator=generator)
        labels = words % _TAGS
        labels[int(torch.randint(1, _LENGTH + 1, (1,), generator=generator)) :] = -100
        made.append({"input_ids": words, "labels": labels})
    return made


def loss_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of losses, and the number of labels."""
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def of_one_process(data: list[dict[str, Tensor]], step: int = STEP) -> list[Tensor]:
    """Parameters after training on `data` in one process."""
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for first in range(0, len(data), step):
        batch = data[first : first + step]
        words, labels = (torch.stack([s[key] for s in batch]) for key in ("input_ids", "labels"))
        optimizer.zero_grad()
        model(words, labels)["loss"].backward()
        optimizer.step()
    return values(model.parameters())


def batches_of_rank(size: int) -> Any:
    """Loader of every other sample, in batches of `size`."""
    data = samples()
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler)


def uneven_batches() -> Any:
    """Loader of every other batch of `UNEVEN` samples."""
    starts = [*range(0, UNEVEN, BATCH)][dist.get_rank() :: RANKS]
    batches: Any = [range(start, start + BATCH) for start in starts]
    return torch.utils.data.DataLoader(samples(UNEVEN), batch_sampler=batches)


def values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Copies of parameters."""
    return [parameter.detach().clone() for parameter in parameters]


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest absolute difference."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def report(name: str, rows: dict[str, tuple[float, bool]]) -> None:
    """Print differences from one process on rank 0; exit with 1 if one is not as it should be.

    Args:
        name: of the framework.
        rows: differences, and True for those that have to be rounding alone.
    """
    failed = False
    for title, (found, is_exact) in rows.items():
        as_expected = found <= 1e-5 if is_exact else found > 1e-5
        failed |= not as_expected
        verdict = "ok" if as_expected else "FAILED"
        if dist.get_rank() == 0:
            print(f"{name}: {title}: {found:.1e} from one process, {verdict}")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


def under_torchrun(main: Callable[[], Any]) -> None:
    """Run `main` on the ranks of torchrun."""
    if "RANK" not in os.environ:
        sys.exit("run this with torchrun --nproc-per-node 2")
    main()
