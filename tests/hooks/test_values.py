"""Results of each hook, compared with one process, and laws of all hooks."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.hooks import (
    AllReduce,
    Bucket,
    BucketSpec,
    Future,
    Hook,
    allreduce,
    auto,
    bf16_compress,
    block_top_k,
    cast,
    chain,
    error_feedback,
    fp16_compress,
    int8,
    power_sgd,
    top_k,
)
from fddp.hooks.power_sgd import PowerSgd
from fddp.testing import assert_mean, gradients, param_trees
from fddp.tree.pytree import flatten
from tests.hooks.one_leaf import random_inputs, run_leaf
from tests.support.hook_models import (
    SMALL,
    Halves,
    Same,
    grads,
    name_of,
    params,
    same_leaves,
    steps,
    weight,
    weighted_sum,
)
from tests.support.models import largest_difference, same_bits
from tests.support.on_ranks import on_threads
from tests.support.ranks import Launch

# Measures each bucket in each step, so that choices change.
AUTO = auto([int8(16), block_top_k(0.1), power_sgd(1)], tolerance=1.0, every=1, smallest=1)
LOSSY = [
    fp16_compress,
    bf16_compress,
    cast(torch.float32),
    int8(16),
    int8(),
    top_k(0.1),
    top_k(1.0),
    block_top_k(0.1),
    power_sgd(1),
    power_sgd(100),
    AUTO,
    error_feedback(fp16_compress),
    error_feedback(int8(7)),
    chain(power_sgd(2), fp16_compress),
    chain(bf16_compress, int8(32)),
    chain(power_sgd(2), error_feedback(int8(5))),
]
HOOKS = [allreduce, Halves(), *LOSSY]


# On every transport


@pytest.mark.parametrize("hook", HOOKS, ids=name_of)
def test_ranks_get_the_same_bits(launch: Launch, hook: Hook[Any]) -> None:
    runs = launch(2, steps, hook)
    assert same_bits([means for means, _ in runs])
    exact = [weighted_sum([grads(r, step) for r in range(2)], [0.5, 0.5]) for step in range(3)]
    tolerance = 1.0 if "TopK" in hook.name or "rank" in hook.name else 0.05
    if hook in (top_k(1.0), power_sgd(100), allreduce, Halves()):
        tolerance = 1e-12
    for mean, wanted in zip(runs[0][0], exact, strict=True):
        largest = max(float(leaf.abs().max()) for leaf in wanted.values() if leaf.numel())
        assert largest_difference(mean, wanted) <= tolerance * largest * 2


@pytest.mark.parametrize("hook", HOOKS, ids=name_of)
def test_four_ranks_get_the_same_bits(hook: Hook[Any]) -> None:
    """Of sums of more than two numbers the association matters."""
    assert same_bits([means for means, _ in fddp.loopback(4, steps, hook)])


# Against plain references: one leaf, so that the bucket is the leaf


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_casting_sums_in_that_dtype(world_size: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(world_size, 40)
    means, _ = run_leaf(cast(dtype), inputs)
    for own, mean in zip(inputs, means, strict=True):
        total = torch.zeros(40, dtype=dtype)
        for grad in own:
            total += (grad * (1 / world_size)).to(dtype)
        assert torch.equal(mean, total.double())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.99])
def test_top_k_sends_the_largest_and_remembers_the_rest(world_size: int, fraction: float) -> None:
    inputs = random_inputs(world_size, 30, steps=6)
    means, states = run_leaf(top_k(fraction), inputs)
    memory = [[0.0] * 30 for _ in range(world_size)]
    count = math.ceil(fraction * 30)
    for own, mean in zip(inputs, means, strict=True):
        total = [0.0] * 30
        for rank, grad in enumerate(own):
            owed = [value + old for value, old in zip(grad.tolist(), memory[rank], strict=True)]
            largest = sorted(range(30), key=lambda i: -abs(owed[i]))[:count]
            for i in largest:
                total[i] += owed[i]
            memory[rank] = [0.0 if i in largest else value for i, value in enumerate(owed)]
        assert mean.tolist() == pytest.approx([value / world_size for value in total])
    for state, left in zip(states, memory, strict=True):
        assert state[0]["residual"].tolist() == pytest.approx(left)


def orthonormal(columns: Tensor) -> Tensor:
    """By Gram and Schmidt."""
    done: list[Tensor] = []
    for column in columns.T:
        for other in done:
            column = column - (other @ column) * other
        done.append(column / column.norm())
    return torch.stack(done, dim=1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_is_algorithm_2_of_the_paper(world_size: int, rank: int) -> None:
    inputs = random_inputs(world_size, 9, 4, 5, steps=5)
    means, states = run_leaf(power_sgd(rank), inputs)
    (q,) = PowerSgd(rank).init(_spec(inputs[0][0]))
    memory = [torch.zeros(9, 20, dtype=torch.float64)] * world_size
    for own, mean in zip(inputs, means, strict=True):
        owed = [g.reshape(9, 20) + old for g, old in zip(own, memory, strict=True)]
        p = orthonormal(sum(m @ q for m in owed) / world_size)
        qs = [m.T @ p for m in owed]
        q = sum(qs) / world_size
        assert torch.allclose(mean.reshape(9, 20), p @ q.T, rtol=1e-9)
        memory = [m - p @ own_q.T for m, own_q in zip(owed, qs, strict=True)]
    for state, left in zip(states, memory, strict=True):
        assert torch.allclose(state[0]["residual"].view(9, 20), left, rtol=1e-7, atol=1e-12)


def _spec(leaf: Tensor) -> Any:
    seen = []

    class Spy(Same):
        def init(self, spec: Any) -> tuple[()]:
            seen.append(spec)
            return ()

    fddp.loopback(1, lambda group: fddp.GradSync({"w": leaf}, group=group, hook=Spy()).close())
    return seen[0]


def test_power_sgd_finds_a_matrix_of_its_rank_at_once_and_gets_out_of_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (12, 15))
    inputs = [[torch.zeros(12, 15, dtype=torch.float64)], [1e-12 * (u @ v.T)], [u @ v.T]]
    means, _ = run_leaf(power_sgd(2), inputs)
    for (wanted,), mean in zip(inputs, means, strict=True):
        assert torch.allclose(mean, wanted, rtol=1e-9, atol=1e-20)


def test_power_sgd_skips_matrices_that_would_not_shrink() -> None:
    means, (state,) = run_leaf(power_sgd(3), random_inputs(1, 6, 6, steps=1))
    assert state[0]["inner"] == []
    assert torch.equal(means[0], random_inputs(1, 6, 6, steps=1)[0][0])


@pytest.mark.parametrize(
    "hook",
    [fp16_compress, int8(8), top_k(0.3), power_sgd(2), AUTO, chain(bf16_compress, int8(8))],
    ids=name_of,
)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
)
def test_every_dtype_matches_one_process(hook: Hook[Any], dtype: torch.dtype) -> None:
    runs = fddp.loopback(2, steps, hook, 6, dtype)
    assert same_bits([means for means, _ in runs])
    for mean in runs[0][0]:
        assert {leaf.dtype for leaf in mean.values()} == {dtype}
    # Over steps the sums agree, but for what is still owed.
    if hook.name.startswith("error_feedback"):
        _conserved(runs, [[1.0] * 2] * 6, torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("hook", "nbytes"),
    [
        (None, 4000),
        (allreduce, 4000),
        (fp16_compress, 2000),
        (bf16_compress, 2000),
        (int8(250), 1000 + 4 * 4),
        (top_k(0.01), 10 * (4 + 4)),
        (block_top_k(0.01), 4 * 3 * (1 + 1) + 4),
        (power_sgd(2), 4 * (100 * 2 + 10 * 2)),
        (chain(power_sgd(2), fp16_compress), 2 * (100 * 2 + 10 * 2)),
    ],
    ids=name_of,
)
@on_threads(2)
def test_bytes_on_the_wire_are_those_of_the_docstrings(
    group: Any, hook: Hook[Any] | None, nbytes: int
) -> None:
    grad = {"w": torch.ones(100, 10)}
    with fddp.GradSync(grad, group=group, hook=hook) as sync:
        *_, info = sync.update(grad, sync.init_state(), with_info=True)
        assert info.timeline.buckets[0].nbytes == nbytes


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: top_k(0.0), "fraction must be above 0 and at most 1, got 0.0"),
        (lambda: top_k(1.5), "fraction must be above 0 and at most 1, got 1.5"),
        (lambda: block_top_k(1.5), "fraction must be above 0 and at most 1, got 1.5"),
        (lambda: auto(tolerance=-1.0), "tolerance must be a number of at least 0, got -1.0"),
        (lambda: auto(tolerance="0.2"), "tolerance must be a number of at least 0, got '0.2'"),
        (lambda: auto(every=0), "every must be an int of at least 1, got 0"),
        (lambda: auto(smallest=0), "smallest must be an int of at least 1, got 0"),
        (lambda: int8(0), "block must be an int of at least 1, got 0"),
        (lambda: power_sgd(0), "rank must be an int of at least 1, got 0"),
        (lambda: cast(torch.int32), "dtype must be a floating dtype of torch, got torch.int32"),
    ],
)
def test_invalid_parameters(make: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


# Laws


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_allreduce_is_no_hook(data: st.DataObject) -> None:
    tree = data.draw(param_trees())
    trees = data.draw(gradients(tree, ranks=2))

    def run(group: Any) -> None:
        options = {"group": group, "bucket_cap_mb": 1e-4}
        with (
            fddp.GradSync(tree, **options) as plain,
            fddp.GradSync(tree, hook=allreduce, **options) as hooked,
            fddp.GradSync(tree, hook=Same(), **options) as same,
        ):
            assert_mean(hooked, trees)
            assert same_bits([sync(trees[group.rank]) for sync in (plain, hooked, same)])

    fddp.loopback(2, run)


@dataclass(frozen=True)
class SumOfSent(Hook[Any]):
    """The sum of what each rank sent by a compressor, in place of the compressor's own result."""

    feedback: Any

    def init(self, spec: BucketSpec) -> Any:
        return self.feedback.compressor.init(spec)

    def apply(
        self, state: Any, bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, Any]]:
        end = self.feedback.compressor.compress(state, bucket, all_reduce).wait()
        return all_reduce(end.sent().clone()).map(lambda total: (total, end.state))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "feedback",
    [
        error_feedback(cast(torch.float64)),
        error_feedback(int8(5)),
        top_k(0.3),
        block_top_k(0.02),
        power_sgd(2),
    ],
    ids=name_of,
)
def test_the_total_is_the_sum_of_what_ranks_sent(world_size: int, feedback: Any) -> None:
    inputs = random_inputs(world_size, 12, 10)
    totals, _ = run_leaf(feedback.compressor, inputs)
    sums, _ = run_leaf(SumOfSent(feedback), inputs)
    for total, summed in zip(totals, sums, strict=True):
        assert torch.allclose(total, summed, rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class AllStagesAtOnce(Hook[Any]):
    """A hook whose stages are started as early as possible. Fails if it has undeclared ones."""

    hook: Hook[Any]

    def init(self, spec: BucketSpec) -> Any:
        return self.hook.init(spec)

    def apply(
        self, state: Any, bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, Any]]:
        future = self.hook.apply(state, bucket, all_reduce)
        for _ in range(self.hook.stages - 1):
            future.advance()
        assert not future.pending
        return future


STAGED = [
    chain(power_sgd(2), int8(4)),
    chain(power_sgd(3), power_sgd(1)),
    auto([int8(16)], tolerance=1e9, every=1, smallest=1),
]


@pytest.mark.parametrize("hook", [*LOSSY, *STAGED], ids=name_of)
def test_no_hook_has_more_stages_than_it_declares(hook: Hook[Any]) -> None:
    inputs = random_inputs(3, 12, 10)
    means, _ = run_leaf(AllStagesAtOnce(hook), inputs)
    assert same_bits([means, run_leaf(hook, inputs)[0]])


ENDS = st.sampled_from([int8(5), top_k(0.3)])
MIDDLES = st.sampled_from(
    [Same(), Halves(), fp16_compress, bf16_compress, power_sgd(1), error_feedback(bf16_compress)]
)
WORLDS = st.integers(1, 3)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(WORLDS, MIDDLES, MIDDLES, st.one_of(MIDDLES, ENDS))
def test_chain_is_associative(world_size: int, a: Hook[Any], b: Hook[Any], c: Hook[Any]) -> None:
    left = fddp.loopback(world_size, steps, chain(chain(a, b), c), 3, torch.float32, weight)
    right = fddp.loopback(world_size, steps, chain(a, chain(b, c)), 3, torch.float32, weight)
    for (means, states), (other_means, other_states) in zip(left, right, strict=True):
        assert same_bits([means, other_means])
        for state, other in zip(states, other_states, strict=True):
            assert same_leaves(state, other)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(WORLDS, st.one_of(MIDDLES, ENDS))
def test_allreduce_is_the_identity_of_chain(world_size: int, hook: Hook[Any]) -> None:
    assert chain(hook, allreduce) == chain(allreduce, hook) == chain(hook) == hook
    assert chain() == chain(allreduce) == allreduce
    # That it may be left out is true of the sum itself.
    ways = [hook, chain(Same(), hook)]
    if hook not in (int8(5), top_k(0.3)):
        ways.append(chain(hook, Same()))
    runs = [fddp.loopback(world_size, steps, way, 3, torch.float32, weight) for way in ways]
    for run in runs[1:]:
        for (means, states), (other_means, other_states) in zip(runs[0], run, strict=True):
            assert same_bits([means, other_means])
            assert all(map(same_leaves, states, other_states))


def test_gathering_hooks_come_last() -> None:
    def build(group: Any) -> None:
        fddp.GradSync(params(), group=group, hook=chain(int8(), fp16_compress))

    with pytest.raises(ValueError, match=r"Int8\(block=256\) leaves no sum to fp16_compress"):
        fddp.loopback(2, build)


def test_a_hook_must_declare_its_sum() -> None:
    class Silent(Halves):
        def parts(self, spec: Any) -> Any:
            return super().parts(spec) if spec.numel < 0 else (spec,)

        def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Any:
            return all_reduce(bucket.buffer[1:].clone()).map(lambda total: (total, state))

    with pytest.raises(ValueError, match=r"sum 0 of .*Silent.* is of \d+ elements"):
        fddp.loopback(1, steps, chain(Silent(), fp16_compress))


WEIGHTS = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, 3.0, 0.1, 1e4]), min_size=2, max_size=2).filter(any),
    min_size=1,
    max_size=5,
)
FEEDBACK = [
    top_k(0.1),
    block_top_k(0.02),
    power_sgd(1),
    AUTO,
    error_feedback(int8(9)),
    chain(Same(), top_k(0.2)),
]


@pytest.mark.parametrize("hook", FEEDBACK, ids=name_of)
@settings(max_examples=20, deadline=None)
@given(weights=WEIGHTS)
def test_error_feedback_loses_nothing_over_steps(
    hook: Hook[Any], weights: list[list[float]]
) -> None:
    """Whatever the weights."""
    runs = fddp.loopback(2, steps, hook, len(weights), torch.float64, lambda r, s: weights[s][r])
    _conserved(runs, weights, 1e-12)


def _conserved(runs: list[Any], weights: list[list[float]], eps: float) -> None:
    """Total weight times result, over steps, is all that was given less what is still owed."""
    means, states = runs[0][0], [states for _, states in runs]
    dtype = means[0]["vector"].dtype
    given = [
        weighted_sum([grads(rank, step, dtype) for rank in range(len(runs))], weights[step])
        for step in range(len(weights))
    ]
    got = weighted_sum(means, [sum(step) for step in weights])
    got_total = sum(leaf.sum() for leaf in got.values())
    given_total = sum(leaf.sum() for tree in given for leaf in tree.values())
    owed = sum(
        leaf.to(got_total.dtype).sum()
        for own in states
        for path, leaf in zip(*_leaves_with_paths(own[-1]), strict=True)
        if path.endswith("residual")
    )
    size = sum(abs(leaf).sum() for tree in given for leaf in tree.values())
    assert abs(got_total - (given_total - owed)) <= 4 * eps * size


def _leaves_with_paths(tree: Any) -> tuple[tuple[str, ...], list[Any]]:
    leaves, treedef = flatten(tree)
    return treedef.paths, leaves


# Buckets


def test_gradients_are_views_of_a_buffer_that_is_a_view() -> None:
    bucket = Bucket(_spec(torch.zeros(2, 3)), torch.arange(8.0)[2:], 1.0)
    (grad,) = bucket.gradients()
    assert grad.tolist() == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]
    assert grad.data_ptr() == bucket.buffer.data_ptr()


# State


STATEFUL = [Halves(), top_k(0.1), power_sgd(2), AUTO, chain(power_sgd(1), error_feedback(int8(6)))]


@pytest.mark.parametrize("hook", STATEFUL, ids=name_of)
def test_state_saves_and_resumes_to_the_same_bits(hook: Hook[Any]) -> None:
    straight = fddp.loopback(2, steps, hook, 6, torch.float32, weight)

    def halfway(group: Any) -> list[Any]:
        means, state = [], None
        for part in range(2):
            with fddp.GradSync(params(torch.float32), group=group, hook=hook, **SMALL) as sync:
                for step in range(3 * part, 3 * part + 3):
                    own = grads(group.rank, step, torch.float32)
                    before = sync.init_state() if state is None else state
                    mean, state = sync.update(own, before, weight=weight(group.rank, step))
                    means.append(mean)
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        return means

    parted = fddp.loopback(2, halfway)
    for (means, _), others in zip(straight, parted, strict=True):
        assert same_bits([means, others])


@pytest.mark.parametrize("hook", [*STATEFUL, *FEEDBACK], ids=name_of)
@on_threads(2)
def test_old_states_are_not_written(group: Any, hook: Hook[Any]) -> None:
    with fddp.GradSync(params(), group=group, hook=hook, **SMALL) as sync:
        state = sync.init_state()
        for step in range(3):
            kept = [torch.as_tensor(leaf).clone() for leaf in flatten(state)[0]]
            _, new = sync.update(grads(group.rank, step), state)
            assert all(
                torch.equal(torch.as_tensor(a), b)
                for a, b in zip(flatten(state)[0], kept, strict=True)
            )
            _, other = sync.update(grads(group.rank, step), state)
            assert same_leaves(new, other)
            state = new


@pytest.mark.parametrize("hook", STATEFUL, ids=name_of)
def test_the_first_state_is_the_same_each_time(hook: Hook[Any]) -> None:
    states = [states[0] for _, states in fddp.loopback(2, steps, hook, 0)]
    states += [states[0] for _, states in fddp.loopback(2, steps, hook, 0)]
    assert all(same_leaves(states[0], state) for state in states)
