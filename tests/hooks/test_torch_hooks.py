"""Hooks that were written for torch's DistributedDataParallel, unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future

import fddp
from fddp.core.protocol.calls import Method
from fddp.hooks import (
    Hook,
    HookError,
    TorchHook,
    allreduce,
    bf16_compress,
    builtin,
    chain,
    fp16_compress,
)
from fddp.runtime.contributions import Contributions
from tests.support.hook_models import SMALL, grads, late_loss, params
from tests.support.models import largest_difference, rand, same_bits
from tests.support.on_ranks import on_processes, on_threads
from tests.support.ranks import Launch, RankPool
from tests.support.sparse_models import dense_loss, embedding_loss, embedding_params

STEPS = 4
NOOP = TorchHook(None, debugging_hooks.noop_hook)


def gradients_under(hook: Hook[Any] | None, **options: Any) -> list[dict[str, Tensor]]:
    """Synchronised gradients of some steps during backward, in several buckets."""
    rank, own = dist.get_rank(), matrices(params(torch.float32))
    with fddp.GradSync(own, hook=hook, **{**SMALL, **options}) as sync:
        step = sync.value_and_grad(
            lambda p, g: torch.stack([(p[name] * g[name]).sum() for name in p]).sum()
        )
        return [step(own, grads(rank, n, torch.float32))[1] for n in range(STEPS)]


def matrices(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what torch's PowerSGD can't take: scalars and empty tensors."""
    return {name: leaf for name, leaf in tree.items() if name not in ("scalar", "empty")}


def own_grads(rank: int) -> list[dict[str, Tensor]]:
    return [matrices(grads(rank, n, torch.float32)) for n in range(STEPS)]


def largest(trees: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> float:
    return max(map(largest_difference, trees, others))


# torch's own hooks


def test_default_hooks(ranks: RankPool) -> None:
    runs = ranks.run(2, run_default_hooks)
    assert same_bits([run[0] for run in runs])


def run_default_hooks(rank: int, world_size: int) -> Any:
    world, hooks = dist.group.WORLD, default_hooks
    plain, half, brain = (
        gradients_under(None),
        gradients_under(fp16_compress),
        gradients_under(bf16_compress),
    )
    for group in (None, world):
        assert same_bits([plain, gradients_under(TorchHook(group, hooks.allreduce_hook))])
        assert same_bits([half, gradients_under(TorchHook(group, hooks.fp16_compress_hook))])
        assert same_bits([brain, gradients_under(TorchHook(group, hooks.bf16_compress_hook))])
    wrapped = hooks.fp16_compress_wrapper(hooks.allreduce_hook)
    assert same_bits([half, gradients_under(TorchHook(world, wrapped))])
    wrapped = hooks.bf16_compress_wrapper(hooks.allreduce_hook)
    assert same_bits([brain, gradients_under(TorchHook(world, wrapped))])
    assert same_bits([plain, gradients_under(allreduce)])
    return [plain]


@pytest.mark.parametrize("wrap", [False, True])
@on_processes(2)
def test_power_sgd(rank: int, n: int, wrap: bool) -> None:
    """With many buckets, which torch's own reducer mixes up over gloo; held against one bucket."""

    def hook() -> TorchHook:
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, 1, start_powerSGD_iter=2)
        own: Any = powerSGD_hook.powerSGD_hook
        return TorchHook(state, default_hooks.fp16_compress_wrapper(own) if wrap else own)

    plain, one_by_one = gradients_under(None), gradients_under(hook())
    whole = gradients_under(hook(), bucket_cap_mb=25, first_bucket_mb=25)
    assert same_bits([one_by_one[:2], whole[:2]])
    # Random at first: only the first two steps, which are not compressed, have the same bits.
    assert largest(one_by_one[:2], plain[:2]) < (0.01 if wrap else 1e-6)
    assert largest(one_by_one[2:], plain[2:]) > 0.01


@on_processes(2)
def test_power_sgd_of_full_rank_is_the_mean(rank: int, n: int) -> None:
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, 30, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    compressed = gradients_under(TorchHook(state, powerSGD_hook.powerSGD_hook))
    assert largest(gradients_under(None), compressed) < 1e-5


@on_processes(2)
def test_post_local_sgd(rank: int, n: int) -> None:
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, alone, 2)
    local = gradients_under(TorchHook(state, post_localSGD_hook.post_localSGD_hook))
    assert same_bits([gradients_under(None)[:2], local[:2]])
    assert largest(local[2:], own_grads(rank)[2:]) == 0.0


@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
@on_processes(2)
def test_quantization(rank: int, n: int, name: str) -> None:
    """These hooks read all-gathers as NCCL gives them: as one tensor, where gloo has a list."""
    gather = dist.all_gather

    class Stacked:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._work = gather(*args, **kwargs)

        def get_future(self) -> Any:
            return self._work.get_future().then(lambda future: [torch.stack(future.value())])

    hook = TorchHook(dist.group.WORLD, getattr(quantization_hooks, name))
    with mock.patch.object(dist, "all_gather", Stacked):
        assert 0.0 < largest(gradients_under(None), gradients_under(hook)) < 0.1


class Descent:
    """A functional optimizer, as torch defines it."""

    def step_param(self, param: Tensor, grad: Tensor) -> None:
        with torch.no_grad():
            param.sub_(grad, alpha=0.5)


@pytest.mark.parametrize("only", [None, ["matrix", "conv"]])
@on_processes(2)
def test_optimizer_overlap(rank: int, n: int, only: list[str] | None) -> None:
    own = matrices(params(torch.float32))
    chosen = None if only is None else [own[name] for name in only]
    state = optimizer_overlap_hooks._OptimizerHookState(Descent(), chosen)
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    with fddp.GradSync(own, hook=TorchHook(None, hook, own), **SMALL) as sync:
        sync(own_grads(rank)[0])
    mean = gradients_under(None)[0]
    for name, leaf in matrices(params(torch.float32)).items():
        moved = only is None or name in only
        assert torch.equal(own[name], leaf - 0.5 * mean[name] if moved else leaf)


def test_builtin_hooks() -> None:
    assert builtin(dist.BuiltinCommHookType.ALLREDUCE) == allreduce
    assert builtin(dist.BuiltinCommHookType.FP16_COMPRESS).name == "FP16_COMPRESS"
    with pytest.raises(ValueError, match="'fp16' is not a built-in hook; pass ALLREDUCE or FP16"):
        builtin("fp16")  # type: ignore[arg-type]


# The bucket that they get


def finished(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


def with_hook(hook: Callable[..., Any], own: Mapping[str, Tensor], ranks: int = 2) -> list[Any]:
    """Return each rank's reduced gradients."""

    def run(group: Any) -> Any:
        step_hook = TorchHook(group.rank, hook, own)
        with fddp.GradSync(own, group=group, hook=step_hook, **SMALL) as sync:
            return sync({name: leaf + group.rank for name, leaf in own.items()})

    return fddp.loopback(ranks, run)


def test_grad_bucket_attributes() -> None:
    own = {name: torch.full((300,), float(i)) for i, name in enumerate("abc")}
    seen = []

    def hook(rank: int, bucket: Any) -> Any:
        (param,), (grad,) = bucket.parameters(), bucket.gradients()
        name = next(n for n, leaf in own.items() if leaf is param)
        assert torch.equal(grad, param + rank)
        assert grad.data_ptr() == bucket.buffer().data_ptr()
        if rank == 0:
            seen.append((bucket.index(), name, bucket.is_last(), tuple(bucket.buffer().shape)))
        return finished(bucket.buffer())

    results = with_hook(hook, own)
    assert seen == [(0, "c", False, (300,)), (1, "b", False, (300,)), (2, "a", True, (300,))]
    for rank, result in enumerate(results):
        assert all(torch.equal(result[name], leaf + rank) for name, leaf in own.items())


def test_gradients_have_their_shapes_in_any_memory_order() -> None:
    last = torch.arange(24.0).view(1, 4, 3, 2).to(memory_format=torch.channels_last)
    own = {"a": torch.arange(3.0), "b": last}

    def hook(rank: int, bucket: Any) -> Any:
        b, a = bucket.gradients()
        assert a.is_contiguous()
        assert torch.equal(b.view(4, 6), (last + rank).reshape(4, 6))
        a.add_(0.5)
        b[0, 0, 0, 0] = 99.0
        return finished(bucket.buffer())

    for rank, result in enumerate(with_hook(hook, own)):
        assert result["a"].tolist() == [0.5 + rank, 1.5 + rank, 2.5 + rank]
        wanted = (last + rank).clone(memory_format=torch.preserve_format)
        wanted[0, 0, 0, 0] = 99.0
        assert torch.equal(result["b"], wanted)
        assert result["b"].stride() == last.stride()


def test_sparse_buckets_follow_the_dense_ones() -> None:
    own = embedding_params(torch.float32)
    seen: list[Any] = []

    def run(group: Any) -> Any:
        dense: Any = Future()

        def hook(_: Any, bucket: Any) -> Any:
            buffer = bucket.buffer()
            if group.rank == 0:
                seen.append((buffer.is_sparse, bucket.is_last(), len(bucket.gradients())))
            buffer.mul_(group.rank + 1)
            if buffer.is_sparse:
                assert dense.done()
                return finished(buffer)
            threading.Timer(0.05, dense.set_result, [buffer]).start()
            return dense

        with fddp.GradSync(
            own, group=group, sparse=["emb"], hook=TorchHook(None, hook), **SMALL
        ) as sync:
            step = sync.value_and_grad(embedding_loss)
            return step(own, torch.tensor([1, 1, group.rank]))[1]

    results = fddp.loopback(2, run)
    assert seen == [(False, False, 1), (True, True, 0)]
    for rank, result in enumerate(results):
        index = torch.tensor([1, 1, rank])
        alone = torch.func.grad(dense_loss)(own, index)
        assert result["emb"].is_coalesced()
        assert torch.allclose(result["emb"].to_dense(), alone["emb"] * (rank + 1))
        assert torch.allclose(result["w"], alone["w"] * (rank + 1))


@pytest.mark.parametrize("result", [None, torch.zeros(10, 4), torch.zeros(3, 3).to_sparse(1)])
def test_a_wrong_result_for_a_sparse_bucket_fails_the_step_on_all_ranks(result: Any) -> None:
    own = embedding_params(torch.float32)

    def run(group: Any) -> list[str]:
        def hook(_: Any, bucket: Any) -> Any:
            is_wrong = bucket.buffer().is_sparse and group.rank == 1 and not errors
            return finished(result if is_wrong else bucket.buffer())

        errors: list[str] = []
        with fddp.GradSync(own, group=group, sparse=["emb"], hook=TorchHook(None, hook)) as sync:
            step = sync.value_and_grad(embedding_loss)
            for _ in range(2):
                try:
                    step(own, torch.tensor([1]))
                except fddp.errors.FddpError as error:
                    errors.append(str(error))
        return errors

    (theirs,), (own_error,) = fddp.loopback(2, run)
    assert "rank 1" in theirs
    assert "HookError" in theirs
    assert "bucket 0" in own_error


def test_complex_numbers_are_pairs() -> None:
    own = {"a": torch.tensor([1 + 2j, 3.0]), "b": torch.full((2, 2), 4j)}

    def hook(rank: int, bucket: Any) -> Any:
        assert bucket.buffer().tolist() == [0.0, 4.0] * 4 + [1.0, 2.0, 3.0, 0.0]
        b, a = bucket.gradients()
        assert torch.equal(b, own["b"])
        a.mul_(1j)
        return finished(bucket.buffer().half())

    (result,) = with_hook(hook, own, ranks=1)
    assert result["a"].tolist() == [-2 + 1j, 3j]
    assert torch.equal(result["b"], own["b"])


def test_set_buffer() -> None:
    own = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}

    def hook(rank: int, bucket: Any) -> Any:
        bucket.set_buffer(bucket.buffer().double() * 2)
        assert [tuple(grad.shape) for grad in bucket.gradients()] == [(2, 2), (3,)]
        assert {grad.dtype for grad in bucket.gradients()} == {torch.float64}
        return finished([bucket.buffer()])  # as the futures of process groups

    for rank, result in enumerate(with_hook(hook, own)):
        assert result["a"].tolist() == [2.0 * rank, 2.0 + 2 * rank, 4.0 + 2 * rank]
        assert result["a"].dtype is torch.float32


def test_a_hook_may_stretch_the_buffer_for_a_while() -> None:
    def hook(rank: int, bucket: Any) -> Any:
        count = len(bucket.buffer())
        bucket.buffer().resize_(count + 1000)
        return finished(bucket.buffer().resize_(count))

    own = {"a": torch.arange(3.0)}
    assert [result["a"].tolist() for result in with_hook(hook, own)] == [[0, 1, 2], [1, 2, 3]]


def test_buckets_are_hooked_in_order() -> None:
    """A hook's later stages may be issued by other threads; nothing else is issued meanwhile."""
    running: list[int] = []
    started: list[int] = []

    def hook(_: Any, bucket: Any) -> Any:
        assert not running, "the bucket before is not done"
        running.append(bucket.index())
        started.append(bucket.index())
        future: Any = Future()
        threading.Timer(0.02, future.set_result, [bucket.buffer()]).start()
        return future.then(lambda done: (running.clear(), done.value())[1])

    def run(group: Any) -> None:
        own = {f"w{i}": torch.ones(300) for i in range(4)}
        with fddp.GradSync(own, group=group, hook=TorchHook(None, hook), **SMALL) as sync:
            step = sync.value_and_grad(
                lambda p: torch.stack([leaf.sum() for leaf in p.values()]).sum()
            )
            step(own)

    fddp.loopback(1, run)
    assert started == [0, 1, 2, 3]


# Weights


@pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0, 0.0)])
@on_threads(2)
def test_weights_that_differ_are_an_error_on_every_rank(
    group: Any, weights: tuple[float, float]
) -> None:
    own = {"w": torch.ones(3)}
    with fddp.GradSync(own, group=group, hook=NOOP) as sync:
        with pytest.raises(fddp.WeightError, match=r"TorchHook\(noop_hook\) divides by the num"):
            sync(own, weight=weights[group.rank])
        assert torch.equal(sync(own)["w"], own["w"])


@pytest.mark.parametrize("weight", [3.0, 1e-6, 1e6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@on_threads(2)
def test_equal_weights_do_not_show(group: Any, weight: float, dtype: torch.dtype) -> None:
    own = {"w": torch.tensor([1.0 + group.rank, 1000.0], dtype=dtype)}
    with fddp.GradSync(own, group=group, hook=NOOP) as sync:
        for heavy in (weight, weight, 1.0):
            assert torch.equal(sync(own, weight=heavy)["w"], own["w"])


@pytest.mark.parametrize("scaling", ["before", "after", "average"])
@on_threads(2)
def test_no_schedule_divides_for_such_a_hook(group: Any, scaling: Any) -> None:
    own = {"w": torch.tensor([1.0 + group.rank, 1000.0])}
    schedule = fddp.make_schedule(fddp.plan_buckets(own), fddp.Topology(world=2), scaling=scaling)
    with fddp.GradSync(schedule, group=group, hook=NOOP) as sync:
        assert torch.equal(sync(own)["w"], own["w"])


@pytest.mark.parametrize("eager_bytes", [1, 2**20])
def test_gradients_are_as_they_are_however_they_are_packed(
    monkeypatch: pytest.MonkeyPatch, eager_bytes: int
) -> None:
    monkeypatch.setattr("fddp.runtime.program._EAGER_BYTES", eager_bytes)

    def run(group: Any) -> None:
        own = {"w": torch.tensor([1.0 + group.rank, 1000.0])}
        with fddp.GradSync(own, group=group, hook=NOOP) as sync:
            step = sync.value_and_grad(lambda p: p["w"].square().sum() / 2, weight_fn=lambda p: 3.0)
            assert torch.equal(step(own)[1]["w"], own["w"])

    fddp.loopback(2, run)


@on_threads(2)
def test_ranks_at_rest_count_as_zeros_where_they_may(group: Any) -> None:
    own = torch.tensor([4.0, 6.0])
    hook = TorchHook(None, lambda _, bucket: finished(bucket.buffer() / 2))
    with fddp.GradSync({"w": own}, group=group, hook=hook) as sync:
        step = sync._engine.open(Method.CALL, with_stats=False)
        contributions = Contributions([own], 1.0 - group.rank)
        step.begin(contributions, [own], allow_idle_ranks=True)
        (mean,) = sync._engine.finish(step).leaves
        assert mean.tolist() == [[2.0, 3.0], [0.0, 0.0]][group.rank]


@on_threads(2)
def test_micro_batches_are_averaged_first(group: Any) -> None:
    own = {"w": torch.tensor([1.0])}
    with fddp.GradSync(own, group=group, hook=NOOP) as sync:
        step = sync.value_and_grad(lambda p: 5.0 * p["w"].sum())
        grads = step(own, accumulated=({"w": torch.tensor([9.0])}, 3.0))[1]
        assert grads["w"].item() == (9.0 + 5.0) / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@on_processes(2)
def test_late_gradients_join_as_their_mean(rank: int, n: int, dtype: torch.dtype) -> None:
    """Of a leaf that a re-entrant checkpoint uses again after its bucket has left."""
    own = {f"w{i}": rand(4, 4, seed=i, dtype=dtype) for i in range(4)}
    results: list[list[Any]] = []
    for hook in (None, TorchHook(None, default_hooks.allreduce_hook)):
        nbytes = dtype.itemsize * 16 / 2**20
        with fddp.GradSync(own, hook=hook, bucket_cap_mb=nbytes, first_bucket_mb=nbytes) as sync:
            step = sync.value_and_grad(late_loss, with_info=True)
            x = rand(4, 4, seed=rank, dtype=dtype)
            results.append([step(own, x, turn == 1 and rank == 1)[1:] for turn in range(3)])
    plain, hooked = ([grads for grads, _ in steps] for steps in results)
    assert any(info.repaired for _, info in results[1])
    assert largest(plain, hooked) < torch.finfo(dtype).eps * 4


# What goes wrong


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda bucket: 1, "callback must return a torch.futures.Future object, but got int"),
        (lambda bucket: finished(1), "the future of bucket 0 must hold a tensor, got int"),
        (lambda bucket: finished([]), "must hold a tensor, got list"),
        (lambda bucket: finished(bucket.buffer()[1:]), "holds 2 elements where the bucket has 3"),
    ],
)
@on_threads(2)
def test_hooks_that_return_no_result(group: Any, returned: Any, problem: str) -> None:
    own, hook = {"w": torch.ones(3)}, TorchHook(None, lambda _, bucket: returned(bucket))
    with fddp.GradSync(own, group=group, hook=hook) as sync:
        with pytest.raises(HookError, match=problem) as caught:
            sync(own)
        assert isinstance(caught.value, (TypeError, RuntimeError))
        assert "TorchHook(<lambda>)" in str(caught.value)


def test_a_hook_that_raises_on_one_rank(launch: Launch) -> None:
    assert launch(2, raise_on_one) == ["ArithmeticError", "PeerError"]


def raise_on_one(group: Any) -> str:
    own = {"w": torch.ones(3)}
    fails = [True]

    with fddp.GradSync(own, group=group) as sync:

        def hook(_: Any, bucket: Any) -> Any:
            if fails.pop() and sync.rank == 0:
                raise ArithmeticError("no root")
            return finished(bucket.buffer())

        sync._engine.set_hook(TorchHook(None, hook))
        with pytest.raises((ArithmeticError, fddp.PeerError)) as caught:
            sync(own)
        fails.append(False)
        assert torch.equal(sync(own)["w"], own["w"])  # the group stays usable
    return type(caught.value).__name__


def test_places_where_such_a_hook_has_no_meaning() -> None:
    hook = NOOP
    with pytest.raises(ValueError, match="divides by the number of ranks itself; use it alone"):
        chain(fp16_compress, hook)
    assert chain(hook, allreduce) == hook

    def run(group: Any, **axes: int) -> None:
        own, mesh = {"w": torch.ones(3)}, fddp.Topology(**axes)
        options: dict[str, Any] = {"mesh": mesh, "algorithm": "hierarchical"}
        fddp.GradSync(own, group=group, hook=hook, **options).close()

    fddp.loopback(2, lambda group: run(group, host=2, local=1))
    with pytest.raises(
        ValueError, match="over all ranks by itself, so that it needs algorithm='al"
    ):
        fddp.loopback(4, lambda group: run(group, host=2, local=2))
