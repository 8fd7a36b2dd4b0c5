"""Samples, random numbers and normalisation of virtual ranks."""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fddp
from fddp.core.schedule.virtual import VirtualRanks
from tests.support.digests import digest
from tests.support.models import rand
from tests.support.ranks import RankPool

COUNT = 6
LENGTH = 53

# Random numbers


def test_numbers_depend_on_the_arguments_alone() -> None:
    def drawn(*args: int, **options: int) -> list[float]:
        with fddp.virtual_rng(*args, **options):
            return torch.rand(4).tolist()

    state = torch.get_rng_state()
    first = drawn(3, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(10)
    assert drawn(3, 1) == first
    assert torch.rand(4, generator=fddp.virtual_rng(3, 1).generator()).tolist() == first
    others = [drawn(1, 3), drawn(3, 2), drawn(31, 1), drawn(3, 1, seed=1)]
    assert first not in others
    assert len({*map(tuple, others)}) == 4


def test_seeds_are_pinned() -> None:
    """A run that is resumed with another version goes on with the same numbers."""
    assert fddp.virtual_rng(3, 1).seed == 5885228800956641246
    assert [*fddp.VirtualSampler(9, 2, range(2), batch_size=2, seed=5)][:2] == [[5, 2], [8, 1]]


def test_blocks_of_two_threads_are_refused() -> None:
    """Each would draw the numbers of the other."""
    errors = []

    def enter() -> None:
        try:
            with fddp.virtual_rng(0, 0):
                pass
        except fddp.ReentryError as error:
            errors.append(str(error))

    with fddp.virtual_rng(0, 0), fddp.virtual_rng(0, 1):  # nested blocks are fine
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "pass virtual_rng(...).generator() to random operations" in errors[0]
    enter()
    assert len(errors) == 1


# Samples


def samplers(ranks: int, **options: Any) -> list[fddp.VirtualSampler]:
    runs = VirtualRanks.over(COUNT, ranks).runs
    options = {"batch_size": 2, **options}
    return [fddp.VirtualSampler(LENGTH, COUNT, run, **options) for run in runs]


def handed_out(sampler: fddp.VirtualSampler, loader: Any = None) -> list[list[Any]]:
    """Samples of the carried virtual ranks in each step of an epoch; None for exhausted ones."""
    return [
        [None if batch is fddp.EXHAUSTED else list(batch) for batch in batches]
        for _, batches in sampler.steps(sampler if loader is None else loader)
    ]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": False}, {"seed": 3}])
def test_the_same_samples_for_any_number_of_ranks(options: dict[str, Any]) -> None:
    (alone,) = (handed_out(sampler) for sampler in samplers(1, **options))
    assert alone[0] != alone[1]
    for ranks in range(2, COUNT + 1):
        parts = [handed_out(sampler) for sampler in samplers(ranks, **options)]
        joined = [[*chain.from_iterable(step)] for step in zip(*parts, strict=True)]
        assert joined == alone, ranks
    flat = [sample for step in alone for batch in step if batch is not None for sample in batch]
    if options.get("drop_last"):
        assert len(flat) == len({*flat}) == LENGTH // (2 * COUNT) * 2 * COUNT
        assert all(len(batch) == 2 for step in alone for batch in step)
    else:
        assert sorted(flat) == [*range(LENGTH)]
        assert [batch is None for batch in alone[-1]] == [False, False, False, True, True, True]


def test_epochs_have_other_orders() -> None:
    (sampler,) = samplers(1)
    first, second = handed_out(sampler), handed_out(sampler)
    assert first != second
    assert sampler.epoch == 2
    assert [number for number, _ in sampler.steps(sampler)] == [*range(10, 15)]


def test_the_state_after_an_epoch_is_that_before_the_next() -> None:
    (sampler,) = samplers(1)
    states = [sampler.state_dict() for _ in sampler.steps(sampler)]
    assert states[-1] == sampler.state_dict()
    assert (states[-1]["epoch"], states[-1]["step"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders(workers: int) -> None:
    data = TensorDataset(torch.arange(LENGTH))
    for sampler, due in zip(samplers(2), map(handed_out, samplers(2)), strict=True):
        # Not forked: JAX may run in this process.
        context = "forkserver" if workers else None
        loader = DataLoader(
            data, batch_sampler=sampler, num_workers=workers, multiprocessing_context=context
        )
        assert len(loader) == len(sampler) == sum(b is not None for step in due for b in step)
        found = [
            [None if b is fddp.EXHAUSTED else b[0].tolist() for b in batches]
            for _, batches in sampler.steps(loader)
        ]
        assert found == due


def test_runs_go_on_at_any_step_with_any_number_of_ranks() -> None:
    """The state counts steps that were handed out, though loaders are ahead."""
    (whole,) = samplers(1)
    due = handed_out(whole) + handed_out(whole)
    for stop in range(2 * whole.steps_per_epoch):
        (first,) = samplers(1)
        found, state = [], first.state_dict()
        while len(found) < stop:
            loader = DataLoader(range(LENGTH), batch_sampler=first)
            for _, batches in first.steps(loader):
                found.append([None if b is fddp.EXHAUSTED else b.tolist() for b in batches])
                state = first.state_dict()
                if len(found) == stop:
                    break
        others = samplers(4)
        for other in others:
            other.load_state_dict(state)
        while len(found) < len(due):
            parts = [handed_out(other) for other in others]
            found += [[*chain.from_iterable(step)] for step in zip(*parts, strict=True)]
        assert found == due, stop


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fddp.virtual_rng(0, -1), r"virtual_rank must be at least 0, got -1"),
        (lambda: fddp.VirtualSampler(0, 2, range(2)), r"there must be samples in the data and in"),
        (lambda: fddp.VirtualSampler(5, 2, range(0)), r"carried must be virtual ranks of the 2"),
        (lambda: fddp.VirtualSampler(5, 2, range(1, 3)), r"carried must be virtual ranks of the 2"),
        (
            lambda: fddp.VirtualSampler(5, 2, range(2), batch_size=3, drop_last=True),
            r"5 samples are no step of 2 batches of 3; pass drop_last=False, or smaller batches",
        ),
        (
            lambda: fddp.VirtualSampler([0] * 5, 2, range(2)).load_state_dict(
                fddp.VirtualSampler(6, 2, range(2)).state_dict()
            ),
            r"samples is 5, and was 6 where the state was saved; pass the same, or other samples",
        ),
    ],
)
def test_arguments(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# Batches

WEIGHT = {"w": torch.ones(())}


def test_batches_are_passed_by_position_or_name() -> None:
    def run(group: Any) -> list[float]:
        with fddp.GradSync(WEIGHT, group=group, virtual_ranks=4) as sync:
            step = sync.value_and_grad(lambda p, x: p["w"] * x)
            batches = sync.virtual_batches(lambda number: 2.0 * number)
            return [
                found[1]["w"].item() for found in (step(WEIGHT, batches), step(WEIGHT, x=batches))
            ]

    assert fddp.loopback(2, run) == [[3.0, 3.0]] * 2


def test_batches_of_another_sync_are_refused() -> None:
    def run(group: Any) -> None:
        with (
            fddp.GradSync(WEIGHT, group=group, virtual_ranks=4) as sync,
            fddp.GradSync(WEIGHT, group=group, virtual_ranks=6) as other,
        ):
            step = sync.value_and_grad(lambda p, x: p["w"] * x)
            carried = ("0 to 2", "0 to 1") if group.rank == 0 else ("3 to 5", "2 to 3")
            text = "the inputs are of virtual ranks {}, and this rank carries {}; make them with"
            with pytest.raises(ValueError, match=text.format(*carried)):
                step(WEIGHT, other.virtual_batches(float))

    fddp.loopback(2, run)


# Dropout and normalisation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        return self.last(nn.functional.dropout(hidden, 0.5, self.training))


def trained(rank: int, world_size: int, transport: str) -> list[str]:
    """Digests of parameters and of averaged statistics after each step of two epochs."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        apply, params, buffers = fddp.functionalize(Net())
    params = {name: leaf.detach() for name, leaf in params.items()}
    data = TensorDataset(rand(LENGTH, 5, seed=1).float(), rand(LENGTH, 1, seed=2).float())
    floats = {name: leaf for name, leaf in buffers.items() if leaf.is_floating_point()}
    found = []
    with (
        fddp.GradSync(params, virtual_ranks=COUNT, transport=transport) as sync,
        fddp.GradSync(floats, virtual_ranks=COUNT, transport=transport) as mean,
    ):
        sampler = fddp.VirtualSampler(data, COUNT, sync.carried_ranks, batch_size=2)

        def loss_fn(p: Any, b: Any, batch: Any, number: int, step: int) -> Any:
            with fddp.virtual_rng(step, number):
                output, new = apply(p, b, batch[0])
            return (output - batch[1]).square().mean(), {name: new[name] for name in floats}

        value_and_grad = sync.value_and_grad(
            loss_fn, has_aux=True, weight_fn=lambda p, b, batch, *_: float(len(batch[0]))
        )
        loader = DataLoader(data, batch_sampler=sampler)
        for _ in range(2):
            for step, batches in sampler.steps(loader):
                # Normalisation needs two samples.
                batches = [
                    b if b is fddp.EXHAUSTED or len(b[0]) > 1 else fddp.EXHAUSTED for b in batches
                ]
                (_, statistics), grads = value_and_grad(
                    params,
                    buffers,
                    sync.virtual_batches(batches),
                    sync.virtual_batches(sync.carried_ranks),
                    step,
                )
                params = {name: p - 0.1 * grads[name] for name, p in params.items()}
                trees = [floats if new is None else new for new in statistics]
                weights = [0.0 if new is None else 1.0 for new in statistics]
                averaged = mean(mean.virtual_batches(trees), weight=weights)
                buffers = {**buffers, **averaged}
                found.append(digest({"params": params, "buffers": averaged}))
    return found


def test_dropout_and_statistics_on_any_number_of_ranks(ranks: RankPool) -> None:
    (alone,) = ranks.run(1, trained, "c10d")
    assert len({*alone}) == 10
    assert ranks.run(2, trained, "shm") == [alone] * 2
    assert ranks.run(3, trained, "c10d") == [alone] * 3
    assert ranks.run(4, trained, "shm") == [alone] * 4
