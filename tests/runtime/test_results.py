"""Results are values: they never change, hold only what is theirs, and inputs are not written."""

from __future__ import annotations

import gc
import io
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from fddp.tree.pytree import flatten
from tests.support.backward_calls import call_in_backward
from tests.support.models import Params, batch, mlp, mlp_loss, rand
from tests.support.ranks import Launch

SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}
WAYS = ["sync", "value_and_grad", "weighted", "reduce_dtype", "sparse", "local"]


def bits(tree: Any) -> list[Tensor]:
    """Copies of the leaves, dense."""
    return [leaf.to_dense().clone() for leaf in flatten(tree)[0] if leaf is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def params_for(way: str) -> Params:
    return mlp(dtype=torch.bfloat16 if way == "reduce_dtype" else torch.float64)


def make_sync(group: Any, way: str) -> fddp.GradSync:
    options: dict[str, Any] = {
        "reduce_dtype": {"reduce_dtype": torch.float32},
        "sparse": {"sparse": ("layer0.weight", "layer2.weight")},
        "local": {"select": lambda path: path != "layer1.weight"},
    }.get(way, {})
    return fddp.GradSync(params_for(way), group=group, **SMALL, **options)


def gradients(sync: fddp.GradSync, way: str, number: int) -> Any:
    """One step's result, got in one of the `WAYS`."""
    params, x = (
        params_for(way),
        batch(sync.rank, number).to(params_for(way)["layer0"]["bias"].dtype),
    )
    if way in ("value_and_grad", "local"):
        return sync.value_and_grad(mlp_loss)(params, x)[1]
    grads = torch.func.grad(mlp_loss)(params, x)
    return sync(grads, weight=1.0 + sync.rank + number if way == "weighted" else 1.0)


@pytest.mark.parametrize("way", WAYS)
def test_results_do_not_change_after_later_steps(launch: Launch, way: str) -> None:
    assert all(launch(2, results_stay, way))


def results_stay(group: Any, way: str) -> bool:
    with make_sync(group, way) as sync:
        results = []
        for number in range(6):
            grads = gradients(sync, way, number)
            results.append((grads, bits(grads)))
    return all(same(bits(grads), copy) for grads, copy in results)


@pytest.mark.parametrize("way", WAYS)
def test_inputs_survive_bit_for_bit(way: str) -> None:
    def run(group: Any) -> None:
        params = params_for(way)
        leaves = flatten(params)[0]
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i % 2 == 0)
            leaf.grad = torch.full_like(leaf, 7.0)
        x = batch(group.rank, 0).to(leaves[0].dtype)
        inputs = [*leaves, *(leaf.grad for leaf in leaves), x]
        before, versions = bits(inputs), [tensor._version for tensor in inputs]
        with make_sync(group, way) as sync:
            for _ in range(3):
                sync.value_and_grad(mlp_loss)(params, x)
                grads = torch.func.grad(mlp_loss)(params, x)
                copies = bits(grads)
                synced = sync(grads, weight=2.0 + group.rank)
                for leaf in flatten(synced)[0]:
                    leaf.zero_()
                assert same(bits(grads), copies)
        assert same(bits(inputs), before)
        assert [tensor._version for tensor in inputs] == versions
        assert [leaf.requires_grad for leaf in leaves] == [i % 2 == 0 for i in range(len(leaves))]
        assert all(
            leaf.grad is grad for leaf, grad in zip(leaves, inputs[len(leaves) :], strict=False)
        )

    fddp.loopback(2, run)


@pytest.mark.parametrize("way", WAYS)
def test_each_leaf_is_a_plain_tensor_with_a_storage_and_a_version_of_its_own(way: str) -> None:
    def run(group: Any) -> None:
        with make_sync(group, way) as sync:
            every = flatten(gradients(sync, way, 0))[0]
        leaves = [leaf for leaf in every if not leaf.is_sparse]
        for leaf in leaves:
            assert leaf.untyped_storage().nbytes() == leaf.nbytes
            assert leaf.storage_offset() == 0
            file, alone = io.BytesIO(), io.BytesIO()
            torch.save(leaf, file)
            torch.save(leaf.clone(), alone)
            assert len(file.getvalue()) == len(alone.getvalue())
        others = [(leaf._version, leaf.clone()) for leaf in leaves[1:]]
        leaves[0].add_(1.0)
        for leaf, (version, value) in zip(leaves[1:], others, strict=True):
            assert leaf._version == version
            assert torch.equal(leaf, value)
        for leaf in every:
            assert leaf.is_leaf
            assert leaf.grad_fn is None
            assert leaf.grad is None
            assert not leaf.requires_grad
            assert not leaf.is_inference()
            leaf.requires_grad_()
            (leaf.to_dense() ** 2).sum().backward()
            assert torch.equal(leaf.grad.to_dense(), 2 * leaf.detach().to_dense())

    fddp.loopback(2, run)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_are_ordinary_in_every_grad_mode(mode: Callable[[], Any]) -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(mlp(), group=group) as sync:
            params, x = mlp(), batch(group.rank, 0)
            grads = torch.func.grad(mlp_loss)(params, x)
            step = sync.value_and_grad(mlp_loss)
            expected = bits(step(params, x)[1])
            for _ in range(3):  # recycled buffers, too
                with mode():
                    results = [step(params, x)[1], sync(grads)]
                for result in results:
                    assert same(bits(result), expected)
                    for leaf in flatten(result)[0]:
                        assert not leaf.is_inference()
                        leaf.add_(1.0)
                assert same(bits(step(params, x)[1]), expected)

    fddp.loopback(2, run)


# Lifetimes


@pytest.fixture
def no_gc() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("fault", ["none", "error", "nan", "backward"])
def test_results_are_freed_without_the_garbage_collector(fault: str) -> None:
    def run(group: Any) -> list[bool]:
        seen: list[weakref.ref[Any]] = []

        def loss_fn(p: Params, x: Tensor) -> Tensor:
            seen.extend(weakref.ref(leaf) for leaf in flatten(p)[0])
            seen.extend(sync._engine._running.values())  # the step
            hidden = torch.tanh(x @ p["layer0"]["weight"])
            seen.append(weakref.ref(hidden))
            if fault == "error":
                raise ValueError("no loss today")
            loss = mlp_loss(p, hidden * (math.nan if fault == "nan" else 1.0))
            return call_in_backward(loss, fail) if fault == "backward" else loss

        def fail() -> None:
            raise ValueError("no gradients today")

        with fddp.GradSync(mlp(), group=group, nonfinite="raise", **SMALL) as sync:
            for number in range(3):
                try:
                    _, grads = sync.value_and_grad(loss_fn)(mlp(), batch(group.rank, number))
                    seen.extend(weakref.ref(leaf) for leaf in flatten(grads)[0])
                    seen.extend(weakref.ref(leaf) for leaf in flatten(sync(grads))[0])
                    del grads
                except (ValueError, fddp.NonFiniteError):
                    pass
            return [ref() is None for ref in seen]

    for dead in fddp.loopback(2, run):
        assert all(dead)
        assert dead


@pytest.mark.slow
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("way", ["sync", "value_and_grad", "weighted", "reduce_"])
def test_a_step_leaves_no_reference_cycle(way: str) -> None:
    def run(group: Any) -> int:
        x = batch(group.rank, 0)
        grads = torch.func.grad(mlp_loss)(mlp(), x)
        with fddp.GradSync(mlp(), group=group, **SMALL) as sync:
            step = sync.value_and_grad(mlp_loss, with_info=True)
            calls: dict[str, Callable[[], Any]] = {
                "sync": lambda: sync(grads, with_info=True),
                "weighted": lambda: sync(grads, weight=3.0),
                "reduce_": lambda: sync.reduce_(grads),
                "value_and_grad": lambda: step(mlp(), x),
            }
            calls[way]()
            gc.collect()
            for _ in range(5):
                calls[way]()
            return gc.collect()

    assert fddp.loopback(1, run) == [0]


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[3:5],
    "a view": lambda t: t.view(10, 100).T,
    "a detached alias": lambda t: t.detach(),
    "its storage": lambda t: t.untyped_storage(),
    "a numpy array": lambda t: t.numpy(),
    "a numpy view": lambda t: t.numpy()[3:5],
    "a dlpack twin": lambda t: torch.from_dlpack(t),
    "a graph that saved it": lambda t: (torch.ones(1000, requires_grad=True) * t).sum(),
}


def content(held: Any) -> Any:
    if isinstance(held, torch.UntypedStorage):
        return bytes(held.tolist())
    if isinstance(held, Tensor) and held.requires_grad:
        (edge,) = (fn for fn, _ in held.grad_fn.next_functions)
        return edge._saved_other.clone().tolist()
    return held.tolist()


@pytest.mark.parametrize("how", HOLDS)
def test_memory_is_not_reused_while_anything_holds_it(how: str) -> None:
    def run(group: Any) -> None:
        params = {"w": torch.zeros(1000), "v": torch.zeros(10)}
        with fddp.GradSync(params, group=group) as sync:
            held = []
            for number in range(5):
                grads = sync({"w": torch.full((1000,), 1.0 + number), "v": torch.ones(10)})
                held.append(HOLDS[how](grads["w"]))
                # A copy: what is compared with must not hold the memory too.
                held.append(content(held[-1]))
                del grads
            for thing, was in zip(held[::2], held[1::2], strict=True):
                assert content(thing) == was

    fddp.loopback(2, run)


@pytest.mark.parametrize("casts", [False, True], ids=["views", "casts"])
@pytest.mark.parametrize("dropped", ["older", "newer", "a leaf of the older"])
@pytest.mark.parametrize("leaf", ["w0", "w2"])
def test_a_finalizer_of_a_result_may_take_a_step(casts: bool, dropped: str, leaf: str) -> None:
    """It runs within a step, which takes the memory of the result. All keep their values."""
    dtype = torch.bfloat16 if casts else torch.float32

    def grads(value: float) -> dict[str, Tensor]:
        return {f"w{i}": torch.full((500,), value, dtype=dtype) for i in range(3)}

    def run(group: Any) -> None:
        options: Any = {"reduce_dtype": torch.float32} if casts else {}
        with fddp.GradSync(grads(0), group=group, **options) as sync:
            older, newer = sync(grads(1)), sync(grads(2))
            kept: list[Any] = []
            subject = newer if dropped == "newer" else older
            weakref.finalize(subject[leaf], lambda: kept.append(sync(grads(3))))
            del subject
            if dropped == "older":
                del older
            elif dropped == "newer":
                del newer
            else:
                del older[leaf]
            found = [sync(grads(7)), *kept, sync(grads(8))]
            for value, result in zip((7, 3, 8), found, strict=True):
                assert all((tensor == value).all() for tensor in result.values())

    fddp.loopback(2, run)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_does_not_grow_over_50_steps_of_which_four_are_held() -> None:
    def run(group: Any) -> int:
        grads = {"w": torch.ones(1 << 20), "v": torch.ones(1 << 20)}
        with fddp.GradSync(grads, group=group) as sync:
            held: list[Any] = []
            start = 0
            for number in range(50):
                held = [*held, sync(grads)][-4:]
                if number == 24:
                    start = resident_bytes()
            return resident_bytes() - start

    (growth,) = fddp.loopback(1, run)
    assert growth < 25 * (4 << 20) / 2, "no buffer of 4 MiB for each of the last 25 steps"


def test_a_graph_of_an_older_step_stays_right() -> None:
    def run(group: Any) -> None:
        kept = []

        def loss_fn(p: dict[str, Tensor]) -> Tensor:
            loss = (p["w"] ** 2).sum()
            kept.append((loss, p["w"]))
            return loss

        with fddp.GradSync({"w": torch.zeros(2)}, group=group) as sync:
            step = sync.value_and_grad(lambda p: loss_fn(p) * 1.0)
            for value in (2.0, 5.0, 7.0):
                _, grads = step({"w": torch.full((2,), value)})
                assert grads["w"].tolist() == [2 * value] * 2
        again = (kept[0][1] ** 2).sum()
        assert torch.autograd.grad(again, kept[0][1])[0].tolist() == [4.0, 4.0]

    fddp.loopback(2, run)


# reduce_


def test_reduce_writes_its_arguments() -> None:
    def run(group: Any) -> None:
        rank = group.rank
        whole = torch.full((4, 3), 1.0 + rank, dtype=torch.float64)
        wide = torch.full((2, 6), 10.0 * (1 + rank), dtype=torch.float64)
        grads = {
            "plain": whole,
            "columns": wide[:, ::2],
            "last": rand(1, 2, 3, 4, seed=rank).contiguous(memory_format=torch.channels_last),
            "one": torch.ones(2, dtype=torch.float64) if rank else None,
            "none": None,
        }
        like = {**grads, "one": whole[0, :2], "none": whole}
        with fddp.GradSync(like, group=group, **SMALL) as sync:
            result = sync.reduce_(grads)
        assert set(result) == set(grads)
        for key in ("plain", "columns", "last"):
            assert result[key] is grads[key]
        assert whole.tolist() == [[1.5] * 3] * 4
        assert wide.tolist() == [[15.0, 10.0 * (1 + rank)] * 3] * 2
        mean = (rand(1, 2, 3, 4, seed=0) + rand(1, 2, 3, 4, seed=1)) / 2
        assert torch.allclose(grads["last"], mean, rtol=1e-14)
        assert result["one"].tolist() == [0.5, 0.5]
        assert (result["one"] is grads["one"]) is bool(rank)
        assert result["none"] is None

    fddp.loopback(2, run)


def test_reduce_takes_the_grad_of_leaves_and_tensors_that_require_grad() -> None:
    def run(group: Any) -> None:
        leaf = torch.ones(3, requires_grad=True)
        (leaf * (1.0 + group.rank)).sum().backward()
        target = leaf.grad
        with fddp.GradSync({"w": leaf}, group=group) as sync:
            sync.reduce_({"w": leaf.grad})
            assert leaf.grad is target
            assert leaf.grad.tolist() == [1.5] * 3
            sync.reduce_({"w": leaf})
            assert leaf.is_leaf
            assert leaf.requires_grad

    fddp.loopback(2, run)


@pytest.mark.parametrize("sparse", [True, False])
def test_reduce_writes_sparse_tensors_where_they_are_declared(sparse: bool) -> None:
    def run(group: Any) -> None:
        dense = torch.eye(4, 2) * (1.0 + group.rank)
        dense[3, group.rank] = 2.0  # other rows on another rank
        grad = dense.to_sparse(1) if sparse else dense
        with fddp.GradSync(
            {"e": torch.zeros(4, 2)}, group=group, sparse=("e",) if sparse else ()
        ) as sync:
            assert sync.reduce_({"e": grad})["e"] is grad
        assert grad.to_dense().tolist() == [[1.5, 0.0], [0.0, 1.5], [0.0, 0.0], [1.0, 1.0]]

    fddp.loopback(2, run)


def test_columns_of_one_matrix_are_apart() -> None:
    def run(group: Any) -> Tensor:
        fused = torch.full((3, 4), 1.0 + group.rank)
        own = {"q": fused[:, :2], "k": fused[:, 2:]}
        with fddp.GradSync(own, group=group) as sync:
            sync.reduce_(own)
            with pytest.raises(fddp.TreeMismatchError, match="share memory"):
                sync.reduce_({"q": fused[:, :2], "k": fused[:, 1:3]})
        return fused

    assert [fused.tolist() for fused in fddp.loopback(2, run)] == [[[1.5] * 4] * 3] * 2
