"""The ledger of bits: what docs/determinism.md says has a test, and what had none has it here."""

from __future__ import annotations

import ast
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from tests.support.digests import digest
from tests.support.models import rand
from tests.support.pages import ROOT, read
from tests.support.ranks import Launch, RankPool

PAGE = "docs/determinism.md"
_ROW = re.compile(r"^\|(?P<cells>.+)\|\s*$", re.MULTILINE)
_TEST = re.compile(r"`tests/(?P<file>[\w/]+\.py)::(?P<name>test_\w+)`")


# The page


def rows(page: str) -> list[list[str]]:
    """The cells of all rows of the page's tables, without headings and rules."""
    found = []
    for table in re.split(r"\n(?!\|)", page):
        lines = [match["cells"].split("|") for match in _ROW.finditer(table)]
        found += [[cell.strip() for cell in line] for line in lines[2:]]
    return found


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_names_tests_that_exist() -> None:
    ledger = rows(read(PAGE))
    assert len(ledger) > 25
    for row in ledger:
        named = [(match["file"], match["name"]) for match in _TEST.finditer(row[-1])]
        assert named, f"no test shows {row[0]!r}"
        for file, name in named:
            assert name in functions_of(ROOT / "tests" / file), f"{file} has no {name}"


# Steps whose bits are looked at


def parameters() -> dict[str, Tensor]:
    return {
        "deep": rand(9, 9, seed=1, dtype=torch.float32),
        "half": rand(40, seed=2).bfloat16(),
        "long": rand(700, seed=3, dtype=torch.float32),
        "wide": rand(9, 50, seed=4, dtype=torch.float64),
    }


def gradients(rank: int, step: int = 0) -> dict[str, Tensor]:
    """Of many magnitudes, so that sums depend on their order."""

    def drawn(leaf: Tensor, seed: int) -> Tensor:
        exponents = 3.0 * rand(leaf.numel(), seed=seed + 1)
        values = rand(leaf.numel(), seed=seed) * 10.0**exponents
        return values.view(leaf.shape).to(leaf.dtype)

    return {
        name: drawn(leaf, 1000 * step + 20 * rank + i)
        for i, (name, leaf) in enumerate(parameters().items())
    }


def loss_of(grads: dict[str, Tensor], order: list[str]) -> Callable[[dict[str, Tensor]], Tensor]:
    """A loss whose gradients are these, ready in the reverse of that order."""

    def loss(params: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name in order:
            total = total + (params[name] * grads[name]).sum(dtype=torch.float64)
        return total

    return loss


TINY = {"bucket_cap_mb": 1e-3, "first_bucket_mb": 1e-4}
Grads = Callable[[int], dict[str, Tensor]]


def mean_digest(
    world_size: int, of: Grads = gradients, *, options: dict[str, Any] | None = None
) -> str:
    """The mean of gradients over threads; all ranks have the same."""

    def run(group: Any) -> str:
        with fddp.GradSync(parameters(), group=group, **(options or {})) as sync:
            return digest(sync(of(group.rank)))

    first, *others = fddp.loopback(world_size, run)
    assert others == [first] * (world_size - 1)
    return first


# What is promised, and was not shown elsewhere


def test_bits_do_not_depend_on_when_gradients_come() -> None:
    """Each run has other orders and other delays on each rank."""

    def steps(group: Any, run: int) -> list[str]:
        chance = random.Random(10 * run + group.rank)
        found = []
        with fddp.GradSync(parameters(), group=group, deterministic=True, **TINY) as sync:
            for step in range(3):
                order = sorted(parameters())
                chance.shuffle(order)
                time.sleep(chance.uniform(0.0, 0.01))
                loss = loss_of(gradients(group.rank, step), order)
                found.append(digest(sync.value_and_grad(loss)(parameters())[1]))
        return found

    runs = [fddp.loopback(3, steps, run) for run in range(3)]
    assert runs == [[runs[0][0]] * 3] * 3


def test_bits_do_not_depend_on_plans_that_change_between_steps() -> None:
    def steps(group: Any, replans: bool) -> list[str]:
        found, chance = [], random.Random(4)
        with fddp.GradSync(parameters(), group=group, deterministic=True, **TINY) as sync:
            for step in range(4):
                found.append(digest(sync(gradients(group.rank, step), weight=1.3 + group.rank)))
                if replans:
                    order = chance.sample(sync.plan.order, k=len(sync.plan.order))
                    caps = [chance.choice([4, 300, 1 << 20])]
                    sync._engine.set_plan(fddp.rebucket(sync.plan, order, caps_bytes=caps))
        return found

    kept, replanned = (fddp.loopback(3, steps, replans) for replans in (False, True))
    assert kept == replanned == [kept[0]] * 3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_has_the_bits_of_the_call_on_its_gradients(
    deterministic: bool, weighted: bool
) -> None:
    def run(group: Any) -> set[tuple[str, float]]:
        weight = 1.3 + group.rank if weighted else 1.0
        grads = gradients(group.rank)
        loss = loss_of(grads, sorted(grads))
        with fddp.GradSync(parameters(), group=group, deterministic=deterministic, **TINY) as sync:
            step = sync.value_and_grad(loss, with_info=True, weight_fn=lambda p: weight)
            found = [sync(grads, weight=weight, with_info=True), step(parameters())[1:]]
            written = {name: grad.clone() for name, grad in grads.items()}
            found.append(sync.reduce_(written, weight=weight, with_info=True))
        return {(digest(tree), info.total_weight) for tree, info in found}

    first, *others = fddp.loopback(3, run)
    assert len(first) == 1
    assert others == [first] * 2


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_whole_steps_do_not_depend_on_the_number_of_threads() -> None:
    """Of a leaf of many pieces, with a norm."""

    def run(group: Any) -> tuple[str, float]:
        grads = {"w": rand(400_000, seed=group.rank, dtype=torch.float32)}
        with fddp.GradSync(grads, group=group) as sync:
            mean, info = sync(grads, weight=0.3 + group.rank, with_info=True)
            return digest(mean), info.grad_norm

    found = []
    for threads in (1, 3):
        with computing_with(threads):
            found.append(fddp.loopback(2, run))
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_infos_are_equal_on_all_ranks(launch: Launch) -> None:
    first, *others = launch(3, infos)
    assert others == [first] * 2


def infos(group: Any) -> list[tuple[float, float, bool]]:
    found = []
    with fddp.GradSync(parameters(), group=group, **TINY) as sync:
        for step in range(3):
            grads = gradients(sync.rank, step)
            _, info = sync(grads, weight=0.1 + sync.rank, with_info=True)
            found.append((info.grad_norm, info.total_weight, info.all_finite))
    return found


def test_operators_in_a_graph_have_the_bits_of_eager_ones(ranks: RankPool) -> None:
    assert ranks.run(3, graph_and_eager, timeout_s=100.0) == [True] * 3


def graph_and_eager(rank: int, world_size: int) -> bool:
    grads = gradients(rank)
    eager = fddp.pmean(grads)
    in_graph = torch.compile(fddp.pmean, backend="eager", fullgraph=True)(grads)
    return digest(eager) == digest(in_graph)


def test_two_ranks_have_the_same_bits_over_all_transports(ranks: RankPool) -> None:
    """A sum of two has one order, so that it takes no deterministic mode."""
    due = mean_digest(2)
    assert due == mean_digest(2, options=TINY)
    assert ranks.run(2, over_all_transports) == [[due] * 4] * 2


def over_all_transports(rank: int, world_size: int) -> list[str]:
    found = []
    for transport in ("c10d", "shm"):
        for caps in ({}, TINY):
            with fddp.GradSync(parameters(), transport=transport, **caps) as sync:
                found.append(digest(sync(gradients(rank))))
    return found


# What is not promised, where it shows for sure: on numbers whose sums depend on their order


def test_other_axes_have_other_bits() -> None:
    square = {"mesh": fddp.Topology(host=2, local=2), "deterministic": True}
    assert mean_digest(4, options=square) != mean_digest(4, options={"deterministic": True})


def test_permuted_ranks_have_other_bits() -> None:
    deterministic = {"deterministic": True}
    changed = mean_digest(3, lambda rank: gradients([1, 2, 0][rank]), options=deterministic)
    assert changed != mean_digest(3, options=deterministic)


def test_another_world_size_has_other_bits() -> None:
    """Of the same mean: two ranks bring what four do, added up by themselves."""

    def pairs(rank: int) -> dict[str, Tensor]:
        first, second = gradients(rank), gradients(rank + 2)
        return {name: (first[name] + second[name]) / 2 for name in first}

    deterministic = {"deterministic": True}
    assert mean_digest(2, pairs, options=deterministic) != mean_digest(4, options=deterministic)


def test_multiplied_weights_have_other_bits() -> None:
    def weighted(group: Any, factor: float) -> str:
        with fddp.GradSync(parameters(), group=group, deterministic=True) as sync:
            return digest(sync(gradients(group.rank), weight=factor * (1.0 + group.rank)))

    whole, cut = (fddp.loopback(3, weighted, factor)[0] for factor in (1.0, 0.3))
    assert whole != cut

    def alike(group: Any, weight: float) -> str:
        with fddp.GradSync(parameters(), group=group, deterministic=True) as sync:
            return digest(sync(gradients(group.rank), weight=weight))

    ones, threes = (fddp.loopback(3, alike, weight)[0] for weight in (1.0, 3.0))
    assert ones != threes


def test_hooks_have_other_bits() -> None:
    assert mean_digest(3, options={"hook": fddp.hooks.bf16_compress}) != mean_digest(3)


def test_wider_sums_have_other_bits() -> None:
    assert mean_digest(3, options={"reduce_dtype": torch.float32}) != mean_digest(3)
