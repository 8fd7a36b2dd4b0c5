"""`auto`: estimates, choices that all ranks share, and what a choice does to means."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.hooks import (
    allreduce,
    auto,
    bf16_compress,
    block_top_k,
    chain,
    choices_table,
    error_feedback,
    fp16_compress,
    int4,
    int8,
    power_sgd,
    top_k,
)
from fddp.hooks.choosing import Auto, sketch
from fddp.hooks.hook import BucketSpec
from fddp.numerics import SquaredNorms
from tests.hooks.one_leaf import run_leaf
from tests.support.examples import examples
from tests.support.hook_models import Same
from tests.support.models import same_bits
from tests.support.ranks import RankPool

SIZE = 600


def noisy(rank: int, step: int, signal: float, noise: float, size: int = SIZE) -> Tensor:
    """A gradient with a part that all ranks share."""
    common = torch.randn(size, generator=torch.Generator().manual_seed(7))
    own = torch.randn(size, generator=torch.Generator().manual_seed(100 * step + rank))
    return signal * common + noise * own


def shared(state: Any) -> Any:
    """What is the same on all ranks."""
    return [{name: part[name] for name in part if name != "residual"} for part in state]


# Estimates


@settings(examples(20))
@given(
    st.lists(st.lists(st.integers(-9, 9), min_size=7, max_size=7), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_the_squared_norm_of_a_sketch_has_no_bias(rows: list[list[int]], width: int) -> None:
    """The mean over all signs is that of the vectors, and of their sum."""
    vectors = torch.tensor(rows, dtype=torch.float64)
    signs = torch.tensor(list(itertools.product((1, -1), repeat=7)), dtype=torch.int8)
    total = sum(
        sum(sketch(vector, each, width) for vector in vectors).square().sum() for each in signs
    )
    assert total / len(signs) == pytest.approx(float(vectors.sum(0).square().sum()))


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (3.0, 0.5, 1.0), (2.0, 0.0, 1.0)])
def test_estimates_are_those_of_the_gradients(weights: tuple[float, ...]) -> None:
    """To the deviation of sketches, over 40 steps of which each one is measured."""
    hook, size, steps = auto([top_k(0.1)], every=1, smallest=1), 2000, 40
    grads = [
        [0.5 + noisy(rank, step, 0.5, 1.0, size) for rank in range(3)] for step in range(steps)
    ]

    def run(group: Any) -> Any:
        found = []
        with fddp.GradSync({"w": grads[0][0]}, group=group, hook=hook) as sync:
            first = sync.init_state()
            for own in grads:
                mine = {"w": own[group.rank]}
                _, state = sync.update(mine, _later(first, len(found)), weight=weights[group.rank])
                found.append(shared(state)[0])
        return found

    runs = fddp.loopback(3, run)
    assert runs[0] == runs[1] == runs[2]
    heavy = torch.tensor(weights)
    errors, variances, signals = [], [], []
    for own in grads:
        stacked = torch.stack(own)
        kept = stacked.abs() >= stacked.abs().topk(size // 10, dim=1).values[:, -1:]
        squares, mean = stacked.square().sum(1), (heavy @ stacked) / heavy.sum()
        norms = SquaredNorms(
            math.nan,
            float(heavy @ squares),
            float(mean.square().sum()),
            int((heavy > 0).sum()),
            float(heavy.sum()),
        )
        variances.append(norms.variance)
        signals.append(norms.signal)
        lost = heavy @ stacked.masked_fill(kept, 0.0) / heavy.sum()
        errors.append(float(lost.square().sum()))
    for name, exact in (("variance", variances), ("signal", signals)):
        measured = sum(state[name] for state in runs[0]) / steps
        assert measured == pytest.approx(sum(exact) / steps, rel=0.1), name
    measured = sum(state["errors"][1] for state in runs[0]) / steps
    assert measured == pytest.approx(sum(errors) / steps, rel=0.1)
    assert runs[0][-1]["noise"] == pytest.approx(runs[0][-1]["variance"] / sum(weights))


def _later(state: Any, step: int) -> Any:
    """The first state, as before another step, which has other signs."""
    return tuple({**part, "step": step} for part in state)


def test_estimates_do_not_depend_on_the_processor() -> None:
    """torch adds in an order that does: squares are added from the first to the last."""
    hook = auto([int8(16)])
    assert isinstance(hook, Auto)
    spec = BucketSpec(
        index=0,
        count=1,
        is_last=True,
        numel=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        paths=("w",),
        shapes=((SIZE,),),
        strides=((1,),),
        offsets=(0,),
    )
    for seed in range(10):
        parts = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed))
        summed = torch.cat([parts.view(-1), torch.tensor([2.0, 2.0, 900.0])])
        mean, error = (sum(x * x for x in part) / 4.0 for part in parts.tolist())
        norms = SquaredNorms(math.nan, 900.0, mean, 2, 2.0)
        state = hook._chosen(hook.init(spec), summed)
        assert (state["variance"], state["signal"]) == (norms.variance, norms.signal)
        assert state["errors"] == (0.0, error)


# Choices


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_choose_alike_and_change_their_choice(world_size: int) -> None:
    """From the exact sum over quantization to few values, as noise takes over."""
    hook = auto([int8(16), int4(16), block_top_k(0.1)], tolerance=1.0, every=4, smallest=1)
    strengths = [(300.0, 1.0)] * 8 + [(10.0, 1.0)] * 20 + [(0.0, 1.0)] * 60

    def run(group: Any) -> Any:
        seen, means = [], []
        with fddp.GradSync({"w": torch.zeros(SIZE)}, group=group, hook=hook) as sync:
            state = sync.init_state()
            for step, (signal, noise) in enumerate(strengths):
                own = {"w": noisy(group.rank, step, signal, noise)}
                mean, state = sync.update(own, state, weight=1.0 + group.rank)
                seen.append(shared(state))
                means.append(mean)
        return seen, means

    runs = fddp.loopback(world_size, run)
    assert all(seen == runs[0][0] for seen, _ in runs)
    assert same_bits([means for _, means in runs])
    choices = [state[0]["choice"] for state in runs[0][0]]
    assert (choices[7], choices[-1]) == (0, 3)
    assert {1, 2} & {*choices}
    changes = [i for i in range(1, len(choices)) if choices[i] != choices[i - 1]]
    assert all(i % 4 == 0 or i in (1, 2) for i in changes)


def test_choices_over_processes(ranks: RankPool) -> None:
    for transport in ("shm", "c10d"):
        runs = ranks.run(2, choose, transport)
        assert runs[0] == runs[1]
        assert runs[0][-1][0]["choice"] > 0


def choose(rank: int, world_size: int, transport: Any) -> Any:
    hook = auto([int8(16), top_k(0.1)], tolerance=1.0, every=2, smallest=1)
    seen = []
    with fddp.GradSync({"w": torch.zeros(SIZE)}, hook=hook, transport=transport) as sync:
        state = sync.init_state()
        for step in range(6):
            _, state = sync.update({"w": noisy(rank, step, 2.0 - step / 3, 1.0)}, state)
            seen.append(shared(state))
    return seen


def test_the_error_of_the_mean_is_below_the_accepted_part_of_the_noise() -> None:
    hook = auto([int8(16), int4(16), block_top_k(0.1), block_top_k(0.5)], every=1, smallest=1)
    inputs = [[noisy(rank, step, 0.1, 1.0) for rank in range(2)] for step in range(12)]
    _, states = run_leaf(hook, inputs)
    (state,) = states[0]
    errors, costs = state["errors"], state["nbytes"]
    accepted = [i for i, error in enumerate(errors) if error <= 0.2 * state["noise"]]
    assert 0 < len(accepted) < len(errors)
    assert state["choice"] == min(accepted, key=lambda i: costs[i]) > 0


def test_costs_are_those_of_a_ring() -> None:
    hook = auto([bf16_compress, int8(100), top_k(0.1), power_sgd(1)], every=1, smallest=1)
    for ranks in (2, 4):
        inputs = [[noisy(rank, 0, 0.0, 1.0).view(30, 20) for rank in range(ranks)]]
        _, states = run_leaf(hook, inputs)
        ring = 2 * (ranks - 1) / ranks
        chunk = SIZE // ranks
        quantized = chunk + 4 * -(-chunk // 100)
        # Two ranks send all chunks in one stage, more send each chunk, and then its sum.
        assert states[0][0]["nbytes"] == pytest.approx(
            (
                ring * 4 * SIZE,
                ring * 2 * SIZE,
                2 * (ranks - 1) * quantized,
                (ranks - 1) * 60 * 8,
                ring * 4 * (30 + 20),
            )
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    hook = auto([int8(16), top_k(0.2)], tolerance=1.0, every=1, smallest=1)
    inputs = [[noisy(rank, step, 0.1, 1.0).to(dtype) for rank in range(2)] for step in range(4)]
    means, states = run_leaf(hook, inputs)
    assert states[0][0]["choice"] > 0
    assert {mean.dtype for mean in means} == {dtype}


def test_small_buckets_and_single_ranks_are_summed_exactly() -> None:
    inputs = [[noisy(rank, step, 0.0, 1.0) for rank in range(2)] for step in range(3)]
    means, states = run_leaf(auto(every=1), inputs)
    assert same_bits([means, run_leaf(allreduce, inputs)[0]])
    assert states[0][0]["share"] == 0.0
    alone = [[own[0]] for own in inputs]
    means, states = run_leaf(auto(every=1, smallest=1), alone)
    assert same_bits([means, [own[0] for own in alone]])
    assert states[0][0]["choice"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    hook = auto([int8(16), top_k(0.1)], tolerance=1.0, every=1, smallest=1)

    def run(group: Any) -> Any:
        with fddp.GradSync({"w": torch.zeros(SIZE)}, group=group, hook=hook) as sync:
            _, state = sync.update({"w": noisy(group.rank, 0, 0.1, 1.0)}, sync.init_state())
            own = noisy(group.rank, 1, 0.1, 1.0)
            own[3] = bad if group.rank else own[3]
            _, after = sync.update({"w": own}, state)
            assert shared(after) == shared(state)
            assert torch.equal(after[0]["residual"], state[0]["residual"])
            _, last = sync.update({"w": noisy(group.rank, 2, 0.1, 1.0)}, after)
        return shared(last)

    first, second = fddp.loopback(2, run)
    assert first == second
    assert first[0]["choice"] > 0


def test_a_candidate_that_overflows_is_not_chosen() -> None:
    hook = auto([fp16_compress, bf16_compress], tolerance=1e9, every=1, smallest=1)
    inputs = [[noisy(rank, step, 0.0, 1e9) for rank in range(2)] for step in range(2)]
    _, states = run_leaf(hook, inputs)
    assert states[0][0]["choice"] == 2
    assert not math.isfinite(states[0][0]["errors"][1])


def test_ranks_with_no_part_in_a_step() -> None:
    """A step in which all but one have the weight zero has no estimate."""
    hook = auto([int8(16)], tolerance=1.0, every=1, smallest=1)

    def run(group: Any) -> Any:
        with fddp.GradSync({"w": torch.zeros(SIZE)}, group=group, hook=hook) as sync:
            own = {"w": noisy(group.rank, 0, 0.0, 1.0)}
            _, state = sync.update(own, sync.init_state(), weight=float(group.rank == 1))
            return shared(state)[0]

    for state in fddp.loopback(2, run):
        assert (state["step"], state["choice"], state["share"]) == (1, 0, 0.0)


def test_zeros_are_sent_by_the_cheapest() -> None:
    hook = auto([int8(16), top_k(0.01)], every=1, smallest=1)

    def run(group: Any) -> Any:
        zeros = {"w": torch.zeros(SIZE)}
        with fddp.GradSync(zeros, group=group, hook=hook) as sync:
            mean, state = sync.update(zeros, sync.init_state())
            mean, state = sync.update(zeros, state)
            return state[0]["choice"], choices_table(sync.plan, hook, state).split()[-1], mean["w"]

    for choice, error, mean in fddp.loopback(2, run):
        assert (choice, error) == (2, "0")
        assert not mean.any()


def test_hooks_know_the_weight_of_their_rank() -> None:
    """Also behind another hook."""
    seen: dict[int, list[float]] = {0: [], 1: []}

    class Spy(Same):
        def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Any:
            seen[all_reduce.rank].append(bucket.weight)
            return super().apply(state, bucket, all_reduce)

    def run(group: Any) -> None:
        own = {"w": torch.ones(4)}
        for hook in (Spy(), chain(Same(), Spy())):
            with fddp.GradSync(own, group=group, hook=hook) as sync:
                sync(own)
                sync(own, weight=2.0 * group.rank)
                step = sync.value_and_grad(
                    lambda p: p["w"].sum(), weight_fn=lambda p: 3.0 + group.rank
                )
                step(own)

    fddp.loopback(2, run)
    assert seen == {0: [1.0, 0.0, 3.0] * 2, 1: [1.0, 2.0, 4.0] * 2}


def test_ranks_with_other_choices_are_an_error_on_all() -> None:
    hook = auto([int8(16), top_k(0.1)], smallest=1)

    def run(group: Any) -> Any:
        with fddp.GradSync({"w": torch.zeros(SIZE)}, group=group, hook=hook) as sync:
            (state,) = sync.init_state()
            with pytest.raises(fddp.FddpError) as caught:
                sync.update({"w": torch.ones(SIZE)}, ({**state, "step": 3, "choice": group.rank},))
            return type(caught.value).__name__

    assert {*fddp.loopback(2, run)} <= {"DesyncError", "RankLostError"}


# State


def test_a_saved_state_continues_with_the_same_bits() -> None:
    hook = auto([int8(16), block_top_k(0.1), power_sgd(1)], tolerance=1.0, every=2, smallest=1)

    def run(group: Any, saves: bool) -> Any:
        means, state = [], None
        for part in range(2):
            with fddp.GradSync({"w": torch.zeros(30, 20)}, group=group, hook=hook) as sync:
                state = sync.init_state() if state is None else state
                for step in range(3 * part, 3 * part + 3):
                    own = noisy(group.rank, step, 2.0 - step / 3, 1.0).view(30, 20)
                    mean, state = sync.update({"w": own}, state)
                    means.append(mean)
            if saves:
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                state = torch.load(file, weights_only=True)
        return means, shared(state)[0]["choice"]

    straight, saved = (fddp.loopback(2, run, saves) for saves in (False, True))
    assert same_bits([straight[0][0], saved[0][0]])
    assert straight[0][1] == saved[0][1] > 0


def test_residuals_outlast_a_change_of_the_choice() -> None:
    """What few values left is in the next exact sum."""
    hook = auto([top_k(0.1)], smallest=1)
    first, second = ([noisy(rank, step, 0.0, 1.0) for rank in range(2)] for step in range(2))

    def run(group: Any) -> Any:
        with fddp.GradSync({"w": torch.zeros(SIZE)}, group=group, hook=hook) as sync:
            (state,) = sync.init_state()
            few, (state,) = sync.update(
                {"w": first[group.rank]}, ({**state, "choice": 1, "step": 3},)
            )
            rest, (state,) = sync.update({"w": second[group.rank]}, ({**state, "choice": 0},))
            assert not state["residual"].any()
            return few["w"] + rest["w"]

    wanted = sum(first + second) / 2
    for found in fddp.loopback(2, run):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_fewer_ranks_go_on_with_their_states() -> None:
    hook = auto([int8(16), top_k(0.1)], tolerance=1.0, every=2, smallest=1)

    def begin(group: Any) -> Any:
        sync = fddp.GradSync({"w": torch.zeros(SIZE)}, group=group, hook=hook)
        state = sync.init_state()
        for step in range(3):
            _, state = sync.update({"w": noisy(group.rank, step, 0.1, 1.0)}, state)
        return sync, state

    left = fddp.loopback(3, begin)[::2]

    def go_on(group: Any) -> Any:
        old, state = left[group.rank]
        with old.rebuild(group) as sync:
            for step in range(3, 8):
                _, state = sync.update({"w": noisy(group.rank, step, 0.1, 1.0)}, state)
        return shared(state)

    first, second = fddp.loopback(2, go_on)
    assert first == second
    assert (first[0]["step"], first[0]["choice"]) == (8, 2)


# The name, the arguments and the table


def test_auto_by_name() -> None:
    own = {"w": torch.ones(8)}

    def run(group: Any) -> Any:
        with (
            fddp.GradSync(own, group=group, hook="auto") as named,
            fddp.GradSync(own, group=group, hook=auto()) as called,
        ):
            assert named._engine.hook == called._engine.hook == auto()
            state = called.init_state()
            assert choices_table(named.plan, "auto", state) == choices_table(
                named.plan, auto(), state
            )
            return named.update(own, state)[0]["w"].tolist()

    assert fddp.loopback(2, run) == [[1.0] * 8] * 2
    with pytest.raises(TypeError, match=r"a fddp.hooks.Hook or 'auto', got a str"):
        fddp.loopback(1, lambda group: fddp.GradSync(own, group=group, hook="none"))  # type: ignore[arg-type]


def test_the_wrapper_takes_it_by_name(ranks: RankPool) -> None:
    first, second = ranks.run(2, wrapped)
    assert first == second
    assert first[0]["choice"] > 0


def wrapped(rank: int, world_size: int) -> Any:
    torch.manual_seed(rank)
    ddp = fddp.DistributedDataParallel(torch.nn.Linear(80, 80))
    ddp.register_comm_hook(None, "auto")
    for _ in range(3):
        ddp(torch.randn(4, 80)).square().sum().backward()
    return shared(ddp.comm_hook_state)


def test_candidates() -> None:
    given = auto([allreduce, error_feedback(int8()), top_k(0.1)])
    assert given == auto([int8(), top_k(0.1)])
    assert given.name == (
        "auto(Int8(block=256), TopK(fraction=0.1), tolerance=0.2, every=32, smallest=4096)"
    )
    assert (given.stages, given.narrow, given.scatters) == (2, False, False)
    assert auto([fp16_compress]).narrow
    with pytest.raises(TypeError, match=r"candidates must be compressors, such as int8"):
        auto([chain(int8(), bf16_compress)])
    with pytest.raises(TypeError, match=r"hook must be a result of fddp.hooks.auto, got Int8"):
        choices_table(fddp.plan_buckets({"w": torch.ones(4)}), int8(), [])
    with pytest.raises(ValueError, match=r"one for each of the 1 buckets of the plan, got 0"):
        choices_table(fddp.plan_buckets({"w": torch.ones(4)}), "auto", [])
    with pytest.raises(TypeError, match=r"a sequence of compressors, got Int8"):
        auto(int8())  # type: ignore[arg-type]


def test_the_table_names_what_each_bucket_is_reduced_by() -> None:
    leaves = {"bias": torch.zeros(4), "rows": torch.zeros(9, 4), "weight": torch.zeros(5000)}
    hook = auto([int4(50)])

    def run(group: Any) -> Any:
        options: Any = {"bucket_cap_mb": 0.01, "first_bucket_mb": 0.01, "sparse": ["rows"]}
        with fddp.GradSync(leaves, group=group, hook=hook, **options) as sync:
            state = sync.init_state()
            tables = [choices_table(sync.plan, hook, state)]
            grads = {
                "bias": torch.ones(4),
                "rows": torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (9, 4)),
                "weight": noisy(group.rank, 0, 0.0, 1.0, 5000),
            }
            _, state = sync.update(grads, state)
            return [*tables, choices_table(sync.plan, hook, state)]

    runs = fddp.loopback(2, run)
    assert runs[0] == runs[1]
    before, after = ([line.split() for line in table.splitlines()] for table in runs[0])
    assert len(before) == len(after) == 4
    row = {line[2]: line for line in after[1:]}
    assert row["weight"][6:8] == ["Int4(block=50)", "2.832"]
    assert 0.0 < float(row["weight"][-1]) < 0.2
    assert row["bias"][-3:] == row["rows"][-3:] == ["allreduce", "-", "-"]
    assert all(line[-3:] == ["allreduce", "-", "-"] for line in before[1:])
