"""The control word in the tail of the last bucket, at run time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.core.protocol.control_word import decode
from fddp.core.schedule.piggyback import with_separate_word
from fddp.runtime import finish
from tests.support.collectives import record_issued
from tests.support.examples import examples
from tests.support.models import batch, mlp, mlp_loss, same_bits
from tests.support.on_ranks import on_threads
from tests.support.ranks import Launch

WORLD = fddp.Topology(world=2)
SMALL = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5}


def one_small(group: Any, dtype: torch.dtype) -> list[tuple[str, int]]:
    grads = {"w": torch.ones(4, dtype=dtype)}
    with fddp.GradSync(grads, group=group) as sync:
        issued = record_issued(sync)
        for _ in range(3):
            assert torch.equal(sync(grads)["w"], grads["w"])
        return [(operation.kind, operation.numel) for operation in issued]


@pytest.mark.parametrize(("dtype", "tail"), [(torch.float32, 198), (torch.float64, 15)])
def test_one_small_tensor_takes_one_collective(dtype: torch.dtype, tail: int) -> None:
    """The order of arrival rides, too, since the plan may be rebuilt."""
    assert fddp.loopback(2, one_small, dtype) == [[("all_reduce", 4 + tail)] * 3] * 2


@examples(10)
@given(
    st.lists(st.floats(0.0, 1e30), min_size=2, max_size=4).filter(any),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_piggybacked_word_equals_a_separate_word(weights: list[float], dtype: torch.dtype) -> None:
    plan = fddp.plan_buckets({"a": torch.zeros(3, dtype=dtype), "b": torch.zeros(2, dtype=dtype)})
    made = fddp.make_schedule(plan, fddp.Topology(world=len(weights)))

    def run(group: Any) -> Any:
        reports = []
        for schedule in (made, with_separate_word(made)):
            with (
                fddp.GradSync(schedule, group=group) as sync,
                sync._engine.collect_steps() as sessions,
            ):
                grads = {"a": torch.ones(3, dtype=dtype), "b": None}
                try:
                    sync(grads, weight=weights[group.rank])
                except fddp.WeightError:  # of a jump; the report is there all the same
                    reports.append("a jump")
                else:
                    reports.append(sessions[-1].report)
        return reports

    for riding, own in fddp.loopback(len(weights), run):
        if riding == "a jump":
            assert own == "a jump"
            continue
        assert riding.total_weight == math.fsum(weights)
        assert riding.total_weight == pytest.approx(own.total_weight, rel=1e-15)
        assert riding.total_squared == pytest.approx(own.total_squared, rel=1e-15)
        assert (riding.active, riding.users) == (own.active, own.users)


@on_threads(2)
def test_nonfinite_gradients_do_not_affect_the_word(group: Any) -> None:
    grads = {"w": torch.tensor([math.nan, math.inf, 1.0])}
    with fddp.GradSync(grads, group=group) as sync:
        mean, info = sync(grads, weight=3.0 + group.rank, with_info=True)
    assert mean["w"][2].item() == 1.0
    assert (info.total_weight, info.active, info.all_finite) == (7.0, 2, False)


@on_threads(2)
def test_failure_in_packing_the_last_bucket_is_in_its_control_word(group: Any) -> None:
    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with fddp.GradSync(params, group=group, **SMALL) as sync:
        assert len(sync.plan.buckets) == 2
        (last,) = sync.plan.buckets[-1].leaves
        ones = {name: torch.ones(3) for name in params}
        odd = {sync.plan.paths[last]: torch.ones(3, device="meta")} if group.rank == 1 else {}
        issued = record_issued(sync)
        with pytest.raises(fddp.FddpError, match="is on meta where its bucket is on cpu"):
            sync({**ones, **odd})
        assert len(issued) == 3, "two buckets, and the exchange of what went wrong"
        assert sync(ones)["b"].tolist() == [1.0] * 3


def test_equal_words_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum is the number of ranks times this rank's own."""
    decoded: list[bool] = []

    def note_and_decode(*arguments: Any, **options: Any) -> Any:
        decoded.append(True)
        return decode(*arguments, **options)

    monkeypatch.setattr(finish, "decode", note_and_decode)

    def run(group: Any) -> None:
        grads = {"w": torch.ones(3)}
        with fddp.GradSync(grads, group=group) as sync:
            for _ in range(3):
                assert sync(grads, with_info=True)[1].active == 3

    fddp.loopback(3, run)
    assert decoded == []


def test_under_a_hook_the_word_is_sent_apart(launch: Launch) -> None:
    for kinds, compared in launch(2, with_and_without_hook):
        # Over c10d, what a hook issues first in a place is compared, too.
        assert kinds == [1, 2 + compared, 1, 2]


def with_and_without_hook(group: Any) -> tuple[list[int], bool]:
    grads = {"w": torch.ones(4)}
    counts = []
    with fddp.GradSync(fddp.plan_buckets(grads), group=group) as sync:
        issued = record_issued(sync)
        for hook in (None, fddp.hooks.bf16_compress, None, fddp.hooks.bf16_compress):
            sync._engine.set_hook(hook)
            assert (sync.schedule.piggyback_op < 0) is (hook is not None)
            issued.clear()
            assert torch.equal(sync(grads)["w"], grads["w"])
            counts.append(len(issued))
        return counts, sync.transport == "c10d"


@pytest.mark.parametrize("holds", [False, True])
@on_threads(2)
def test_the_word_of_an_idle_bucket_is_sent_apart(group: Any, holds: bool) -> None:
    """As under `skip_all_reduce_unused_params`, whose surprises tests/ddp/test_unused.py has; also
    by a rank on which the bucket has memory."""
    params = {"a": torch.zeros(3), "b": torch.zeros(3)}
    plan = fddp.plan_buckets(params, **SMALL)
    (last,) = (plan.paths[leaf] for leaf in plan.buckets[-1].leaves)

    def loss_fn(p: dict[str, Tensor]) -> Tensor:
        (running,) = sync._engine._running.values()
        step = running()
        if holds and group.rank and step is not None:
            step.memory(1)
        return sum(p[name].sum() for name in p if name != last)

    with fddp.GradSync(plan, group=group) as sync:
        sync._engine._idle = frozenset({1})
        issued = record_issued(sync)
        grads = sync.value_and_grad(loss_fn, with_info=holds)(params)[1]
        assert [o.numel for o in issued] == [3, sync._engine.program.control.size]
    found = {name: None if g is None else g.tolist() for name, g in grads.items()}
    assert found == {name: [1.0] * 3 if name != last else None for name in "ab"}


def gradients(group: Any, rides: bool) -> list[Any]:
    schedule = fddp.make_schedule(fddp.plan_buckets(mlp()), WORLD, split_mb=0.0001)
    own = with_separate_word(schedule)
    assert schedule.ops[schedule.piggyback_op].region.start > 0
    with fddp.GradSync(schedule if rides else own, group=group) as sync:
        step = sync.value_and_grad(mlp_loss)
        return [step(mlp(), batch(group.rank, number))[1] for number in range(3)]


def test_the_last_of_several_pieces_carries_it() -> None:
    assert same_bits([*fddp.loopback(2, gradients, True), *fddp.loopback(2, gradients, False)])
