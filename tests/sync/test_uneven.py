"""Loops over inputs of unequal length: the same rounds, and the same parameters, on all ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from tests.support.collectives import record_issued
from tests.support.endings import BoomError, Ending, ending
from tests.support.groups import rank_of
from tests.support.models import (
    descend,
    largest_difference,
    mean_gradients,
    mlp,
    mlp_loss,
    rand,
    same_bits,
)
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.ranks import Launch

SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}
LR = 0.1


def batches(rank: int, count: int) -> list[Tensor]:
    """Of 1 to 3 rows each."""
    return [rand(1 + (rank + n) % 3, 8, seed=100 * n + rank) for n in range(count)]


def rows(params: Any, x: Any) -> int:
    return x.shape[0]


def reference(rounds: list[list[list[Tensor]]], weighted: bool) -> Any:
    """One process: `rounds[n]` has, by rank, the batches of round n."""
    params = mlp()
    for turn in rounds:
        inputs = [(torch.cat(own),) for own in turn if own]
        weights = [float(x.shape[0]) if weighted else 1.0 for (x,) in inputs]
        params = descend(params, mean_gradients(mlp_loss, params, inputs, weights), LR)
    return params


def train_unevenly(group: Any, counts: list[int], weighted: bool, every: int) -> Any:
    params, losses, actives = mlp(), [], []
    with fddp.GradSync(params, group=group, **SMALL) as sync:
        issued = record_issued(sync)
        step = sync.value_and_grad(mlp_loss, with_info=True, weight_fn=rows if weighted else None)
        expected = int(sync.world_size > 1)  # the vote before the first round
        for batch in fddp.uneven(batches(sync.rank, counts[sync.rank]), sync, every=every):
            # The control word rides in the last; one rank alone needs no transport.
            expected += len(sync.plan.buckets) if sync.world_size > 1 else 0
            joined = torch.cat(batch) if isinstance(batch, tuple) else batch
            loss, grads, info = step(params, joined)
            params = descend(params, grads, LR)
            losses.append(None if loss is None else loss.item())
            actives.append(info.active)
            assert len(issued) == expected
        return params, losses, actives, len(issued)


def check(runs: list[Any], counts: list[int], weighted: bool, every: int) -> None:
    grouped = [
        [own[n : n + every] for n in range(0, len(own), every)]
        for own in (batches(rank, count) for rank, count in enumerate(counts))
    ]
    number = max(map(len, grouped))
    rounds = [[own[n] if n < len(own) else [] for own in grouped] for n in range(number)]
    expected = reference(rounds, weighted)
    assert same_bits([run[0] for run in runs])
    for rank, (params, losses, actives, _) in enumerate(runs):
        assert largest_difference(params, expected) < 1e-12
        own = len(grouped[rank])
        assert len(losses) == number
        assert all(loss is not None for loss in losses[:own])
        assert losses[own:] == [None] * (number - own)
        assert actives == [sum(bool(own) for own in turn) for turn in rounds]
    assert len({run[3] for run in runs}) == 1


@pytest.mark.parametrize("counts", [[2, 4], [3, 0, 1, 2]], ids=str)
def test_as_one_process_with_the_same_weights(launch: Launch, counts: list[int]) -> None:
    check(launch(len(counts), train_unevenly, counts, True, 1), counts, True, 1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_random_lengths_and_groups(counts: list[int], every: int, weighted: bool) -> None:
    if any(counts):
        check(
            fddp.loopback(len(counts), train_unevenly, counts, weighted, every),
            counts,
            weighted,
            every,
        )


def test_rounds_of_several_batches_come_as_tuples() -> None:
    def run(group: Any) -> list[Any]:
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss)
            seen = []
            own = range([5, 2][group.rank])
            for micro in fddp.uneven(own, sync, every=2):
                seen.append(micro)
                step(mlp(), micro if micro is fddp.EXHAUSTED else torch.ones(1, 8).double())
            return seen

    e = fddp.EXHAUSTED
    assert fddp.loopback(2, run) == [[(0, 1), (2, 3), (4,)], [(0, 1), e, e]]


def test_no_batches_on_any_rank() -> None:
    def run(group: Any) -> tuple[int, int]:
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss)
            rounds = sum(1 for _ in fddp.uneven([], sync))
            return rounds, sum(
                1 for x in fddp.uneven(batches(group.rank, group.rank), sync) if step(mlp(), x)
            )

    assert fddp.loopback(2, run) == [(0, 1)] * 2


def test_a_generator_is_asked_one_batch_ahead() -> None:
    def run(group: Any) -> list[int]:
        fetched = [0]

        def stream() -> Iterator[Tensor]:
            for x in batches(group.rank, 3 + group.rank):
                fetched[0] += 1
                yield x

        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss)
            seen = []
            for x in fddp.uneven(stream(), sync):
                seen.append(fetched[0])
                step(mlp(), x)
            return seen

    assert fddp.loopback(2, run) == [[2, 3, 3, 3], [2, 3, 4, 4]]


@pytest.mark.parametrize("keyword", [False, True])
def test_batches_of_an_exhausted_rank(keyword: bool) -> None:
    def run(group: Any) -> Any:
        calls = []

        def loss_fn(p: Any, x: Tensor) -> tuple[Tensor, str]:
            calls.append(x)
            return mlp_loss(p, x), "aux"

        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(loss_fn, has_aux=True, with_info=True)
            x = fddp.EXHAUSTED if group.rank else batches(0, 1)[0]
            (loss, aux), grads, info = step(mlp(), x=x) if keyword else step(mlp(), x)
            return loss, aux, grads, info.active, len(calls)

    expected = mean_gradients(mlp_loss, mlp(), [(batches(0, 1)[0],)], [1.0])
    first, second = fddp.loopback(2, run)
    assert first[1] == "aux"
    assert second[:2] == (None, None)
    assert (first[3:], second[3:]) == ((1, 1), (1, 0))
    for run_ in (first, second):
        assert largest_difference(run_[2], expected) < 1e-14


def test_exhausted_is_one_object() -> None:
    assert repr(fddp.EXHAUSTED) == "fddp.EXHAUSTED"
    assert pickle.loads(pickle.dumps(fddp.EXHAUSTED)) is fddp.EXHAUSTED


def test_a_loop_over_a_tree_sync() -> None:
    def run(group: Any) -> list[float]:
        nothing = {"w": None}
        with fddp.GradSync({"w": torch.zeros(2)}, group=group) as sync:
            means = []
            for value in fddp.uneven([1.0, 2.0, 4.0][: 1 + 2 * group.rank], sync):
                done = value is fddp.EXHAUSTED
                grads = nothing if done else {"w": torch.full((2,), value)}
                means.append(sync(grads, weight=0.0 if done else 1.0)["w"][0].item())
            return means

    assert fddp.loopback(2, run) == [[1.0, 2.0, 4.0]] * 2


def test_another_sync_and_an_all_gather_in_the_body_do_not_count() -> None:
    def run(group: Any) -> int:
        one = fddp.GradSync(mlp(), group=group, algorithm="reduce_scatter")
        with one, fddp.GradSync(mlp(), group=group) as two:
            step, other = one.value_and_grad(mlp_loss), two.value_and_grad(mlp_loss)
            rounds = 0
            for x in fddp.uneven(batches(group.rank, 1 + group.rank), one):
                step(one.all_gather(one.shard(mlp())), x)
                other(mlp(), torch.ones(1, 8).double())
                other(mlp(), torch.ones(1, 8).double())
                rounds += 1
            return rounds

    assert fddp.loopback(2, run) == [2, 2]


def test_all_ranks_may_break_early() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss)
            loop = fddp.uneven(batches(group.rank, 2 + group.rank), sync)
            for number, x in enumerate(loop):
                step(mlp(), x)
                if number == 1:
                    break
            loop.close()
            once = [step(mlp(), torch.ones(1, 8).double())[1] for _ in range(3)]
            rounds = [step(mlp(), x)[1] for x in fddp.uneven(batches(0, 2), sync)]
            return len(once), len(rounds)

    assert fddp.loopback(2, run) == [(3, 2)] * 2


# What goes wrong


def wrong_body(group: Any, culprits: tuple[int, ...], turn: int, times: int) -> Any:
    """A body that synchronises `times` times in round `turn`, on some ranks."""
    seen = Ending((), "", {})
    begin_s = time.perf_counter()
    with fddp.GradSync(mlp(), group=group, timeout_s=LONG_S) as sync:
        step = sync.value_and_grad(mlp_loss)

        def loop() -> None:
            for number, x in enumerate(fddp.uneven(batches(0, 3), sync)):
                wrong = number == turn and sync.rank in culprits
                for _ in range(times if wrong else 1):
                    step(mlp(), x)

        seen = ending(loop)
    took_s = time.perf_counter() - begin_s
    with fddp.GradSync(mlp(), group=group) as sync:
        step = sync.value_and_grad(mlp_loss)
        return seen, took_s, sum(1 for x in fddp.uneven(batches(0, 2), sync) if step(mlp(), x))


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("times", [0, 2, 3])
@pytest.mark.parametrize("culprits", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_a_round_synchronises_exactly_once(
    turn: int, times: int, culprits: tuple[int, ...]
) -> None:
    runs = fddp.loopback(3, wrong_body, culprits, turn, times)
    for rank, (seen, took_s, after) in enumerate(runs):
        alone = turn == 2 and times > 1
        if rank in culprits:
            assert seen.kinds[0] == "UnevenError", seen
            assert f"rank {rank} at step" in seen.text
            assert f"round {turn} " in seen.text
            assert f"{min(times, 2)} times instead of once" in seen.text
            assert "every=k" in seen.text
        elif not alone:
            assert seen.kinds[0] == "PeerError", seen
            assert "UnevenError" in seen.failures[1]
        else:
            assert seen.kinds[0] == "no error", "the others have ended in order"
        assert took_s < PROMPT_S, "no rank waited for one that does not come"
        assert after == 2


def failing_source(group: Any, how: str, culprits: tuple[int, ...]) -> Any:
    def stream() -> Iterator[Tensor]:
        for number, x in enumerate(batches(rank_of(group), 3)):
            if how == f"item {number}":
                raise BoomError(number, "in the source")
            yield x

    class NoIterator:
        def __iter__(self) -> Iterator[Tensor]:
            raise BoomError(9, "in the source")

    sources: dict[str, Any] = {
        "no iterable": 7,
        "no iterator": NoIterator(),
        "every": batches(0, 3),
    }
    rounds = 0
    with fddp.GradSync(mlp(), group=group, timeout_s=5.0) as sync:
        step = sync.value_and_grad(mlp_loss)
        mine = sync.rank in culprits
        source = sources.get(how, stream()) if mine else batches(sync.rank, 3)

        def loop() -> None:
            nonlocal rounds
            for x in fddp.uneven(source, sync, every=0 if mine and how == "every" else 1):
                step(mlp(), x)
                rounds += 1

        seen = ending(loop)
        after = step(mlp(), batches(sync.rank, 1)[0])[1]
        again = sum(1 for x in fddp.uneven(batches(0, 2), sync) if step(mlp(), x))
        return seen, rounds, after, again


def test_arguments_in_the_wrong_order_are_an_error() -> None:
    def loop(group: Any) -> Ending:
        with fddp.GradSync(mlp(), group=group) as sync:
            return ending(lambda: [*fddp.uneven(sync, [1, 2])])  # type: ignore[arg-type]

    (found,) = fddp.loopback(1, loop)
    assert found.kinds[0] == "TypeError", found
    assert "expected a GradSync as its second argument, got a list" in found.text, found


FAILING = {
    "item 0": (0, "BoomError", "boom 0 in the source"),
    "item 1": (1, "BoomError", "boom 1 in the source"),
    "item 2": (2, "BoomError", "boom 2 in the source"),
    "no iterable": (0, "TypeError", "not iterable"),
    "no iterator": (0, "BoomError", "boom 9 in the source"),
    "every": (0, "ValueError", "every must be at least 1, got 0"),
}


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("culprits", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_failing_source_is_raised_on_all_ranks(how: str, culprits: tuple[int, ...]) -> None:
    check_source(fddp.loopback(3, failing_source, how, culprits), how, culprits)


def check_source(runs: list[Any], how: str, culprits: tuple[int, ...]) -> None:
    number, kind, text = FAILING[how]
    for rank, (seen, rounds, _, again) in enumerate(runs):
        assert rounds == number, "the rounds before it went through"
        if rank in culprits:
            assert kind in seen.kinds
        else:
            assert seen.kinds[0] == "PeerError"
            assert set(seen.failures) == set(culprits)
        assert text in seen.text
        assert again == 2
    assert same_bits([after for _, _, after, _ in runs])


def failing_source_beside_operators(group: Any) -> tuple[Ending, float, float]:
    """Rank 1 has no batch for the second round, where the others average in their loss function."""
    rank = rank_of(group)

    def source() -> Iterator[float]:
        yield 1.0
        if rank == 1:
            raise BoomError(7, "in the source")
        yield 2.0

    params = {"w": torch.ones(())}
    with fddp.GradSync(params, group=group, timeout_s=LONG_S) as sync:
        step = sync.value_and_grad(lambda p, x: fddp.pmean(p["w"] * x, group))
        begin_s = time.perf_counter()
        seen = ending(lambda: [step(params, x) for x in fddp.uneven(source(), sync)])
        took_s = time.perf_counter() - begin_s
        again = [step(params, x)[1]["w"].item() for x in fddp.uneven([3.0], sync)]
    return seen, took_s, again[0]


def test_failing_source_reaches_ranks_in_operators(launch: Launch) -> None:
    for rank, (seen, took_s, again) in enumerate(launch(3, failing_source_beside_operators)):
        assert took_s < PROMPT_S, "not once their time was over"
        assert again == 3.0
        assert "boom 7 in the source" in seen.text
        assert seen.kinds[0] == ("BoomError" if rank == 1 else "PeerError")


def test_a_failed_step_may_be_caught_in_the_body() -> None:
    def run(group: Any) -> Any:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            if group.rank == 1 and x.shape[0] == 2:
                raise BoomError(8, "in the loss")
            return mlp_loss(p, x)

        kinds = []
        with fddp.GradSync(mlp(), group=group, timeout_s=5.0) as sync:
            step = sync.value_and_grad(loss_fn)
            for x in fddp.uneven(batches(0, 3), sync):
                kinds.append(ending(lambda x=x: step(mlp(), x)).kinds[0])
        return kinds

    first, second = fddp.loopback(2, run)
    assert first == ["no error", "PeerError", "no error"]
    assert second == ["no error", "BoomError", "no error"]
