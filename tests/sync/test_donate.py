"""`GradSync.donate`: memory given back before its last reference is gone, and never garbage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from tests.support.ranks import Launch

USES: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda t: t + 1,
    "in place": lambda t: t.add_(1.0),
    "as another's operand": lambda t: torch.zeros(6).sub_(t),
    "copied": lambda t: torch.zeros(6).copy_(t),
    "a clone": lambda t: t.clone(),
    "a product": lambda t: t @ t,
    "many at once": lambda t: torch._foreach_add([t], [t]),
    "its values": lambda t: t.tolist(),
    "as text": repr,
    "numpy": lambda t: t.numpy(),
    "its address": lambda t: t.data_ptr(),
}


def grads(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((6,), value), "v": [torch.full((2, 2), value)], "none": None}


@pytest.mark.parametrize("use", USES)
def test_using_a_donated_result_raises(use: str) -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(grads(), group=group) as sync:
            result = sync(grads())
            view = result["w"].view(3, 2).view(6)
            sync.donate(result)
            for tensor in (result["w"], view):
                with pytest.raises(RuntimeError, match=r"was donated to its GradSync.*clone what"):
                    USES[use](tensor)
            assert result["w"].shape == (6,)
            assert sync(grads(2.0))["w"].tolist() == [2.0] * 6

    fddp.loopback(1, run)


def test_backward_through_a_donated_gradient_raises() -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(grads(), group=group) as sync:
            result = sync(grads())
            x = torch.ones(6, requires_grad=True)
            product = (x * result["w"]).sum()
            sync.donate(result)
            with pytest.raises(RuntimeError, match="was donated"):
                product.backward()

    fddp.loopback(1, run)


def test_donated_memory_is_reused_in_the_next_step(launch: Launch) -> None:
    for donated, held in launch(2, addresses_of_steps):
        # A backend may hold on to a buffer for a moment after the work is done.
        assert donated <= 2 < held


def addresses_of_steps(group: Any) -> tuple[int, int]:
    """Return the number of addresses that gradients had, with and without donation, while all were
    referenced."""
    found = []
    for donates in (True, False):
        with fddp.GradSync(grads(), group=group) as sync:
            seen, last, previous = set(), None, None
            for number in range(6):
                if donates and last is not None:
                    sync.donate(last)
                last, previous = sync(grads(float(number))), last
                assert last["w"].tolist() == [float(number)] * 6
                assert last["none"] is None
                if number > 1:
                    seen.add(last["w"].data_ptr())
            del previous
            found.append(len(seen))
    return found[0], found[1]


def test_from_the_first_step_on_across_the_rebuilt_plan() -> None:
    def run(group: Any) -> None:
        params = {f"w{i}": torch.ones(100) for i in range(4)}
        with fddp.GradSync(params, group=group, bucket_cap_mb=0.0005) as sync:
            step = sync.value_and_grad(lambda p: sum(w.square().sum() for w in p.values()))
            plan = sync.plan
            for _ in range(3):
                _, result = step(params)
                assert result["w0"].tolist() == [2.0] * 100
                sync.donate(result)
            assert sync.plan is not plan

    fddp.loopback(2, run)


NOT_RESULTS: dict[str, Callable[[fddp.GradSync, Any], Any]] = {
    "gradients of its own": lambda sync, result: grads(),
    "a clone among them": lambda sync, result: {**result, "w": result["w"].clone()},
    "no tensor": lambda sync, result: {**result, "w": 1.0},
    "another's": lambda sync, result: fddp.GradSync(grads(), group=sync.group)(grads()),
}


@pytest.mark.parametrize("what", NOT_RESULTS)
def test_donating_other_tensors_is_refused(what: str) -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(grads(), group=group) as sync:
            result = sync(grads())
            with pytest.raises(
                fddp.TreeMismatchError,
                match=r"leaf '(w|v.0)' \(bucket 0\) of the donated .* no result",
            ):
                sync.donate(NOT_RESULTS[what](sync, result))
            assert result["v"][0].tolist() == [[1.0, 1.0]] * 2, "nothing was taken"
            sync.donate(result)
            with pytest.raises(fddp.TreeMismatchError, match="was donated before"):
                sync.donate(result)
            with pytest.raises(fddp.TreeMismatchError, match="donated gradients does not have"):
                sync.donate({"w": None})

    fddp.loopback(1, run)


def test_sparse_local_and_cast_leaves() -> None:
    def run(group: Any) -> None:
        params = {
            "table": torch.zeros(4, 2),
            "local": torch.zeros(3),
            "half": torch.zeros(5, dtype=torch.bfloat16),
        }
        own = {"table": torch.eye(4, 2).to_sparse(1), "local": torch.ones(3), "half": None}
        own["half"] = torch.ones(5, dtype=torch.bfloat16)
        with fddp.GradSync(
            params,
            group=group,
            sparse=["table"],
            select=lambda path: path != "local",
            reduce_dtype=torch.float32,
        ) as sync:
            result = sync(own)
            sync.donate(result)
            assert result["table"].to_dense().tolist() == torch.eye(4, 2).tolist()
            assert result["local"].tolist() == [1.0] * 3
            with pytest.raises(RuntimeError, match="was donated"):
                result["half"].sum()

    fddp.loopback(2, run)


def test_shards_of_several_pieces_or_none() -> None:
    def run(group: Any) -> None:
        tree = {"w": torch.arange(6.0), "v": torch.ones(3), "u": torch.ones(1)}
        with fddp.GradSync(tree, group=group, algorithm="reduce_scatter") as sync:
            for _ in range(3):
                shards = sync.reduce_scatter(tree)
                whole = sync.all_gather(shards)
                assert {name: leaf.tolist() for name, leaf in whole.items()} == {
                    name: leaf.tolist() for name, leaf in tree.items()
                }
                sync.donate(shards)
                with pytest.raises(RuntimeError, match="was donated"):
                    shards["w"].sum()

    fddp.loopback(2, run)


def test_one_result_for_two_leaves() -> None:
    def run(group: Any) -> None:
        tree = {"a": torch.ones(2), "b": torch.ones(2)}
        with fddp.GradSync(tree, group=group) as sync:
            result = sync(tree)
            sync.donate({"a": result["a"], "b": result["a"].view(2)})
            assert result["b"].tolist() == [1.0, 1.0]
            with pytest.raises(RuntimeError, match="was donated"):
                result["a"].sum()

    fddp.loopback(1, run)
