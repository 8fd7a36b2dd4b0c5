"""Plans in use, leaves that stay local, and several `GradSync`s at once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fddp
from tests.support.models import largest_difference, mean_gradients, rand, same_bits

# Leaves that stay local


def test_leaves_that_select_declines_stay_local() -> None:
    """They may have any dtype and shape, be unused, or exist on one rank only."""

    def run(group: Any) -> Any:
        rank = group.rank
        params = {
            "w": torch.zeros(2),
            "expert": torch.zeros(2 + rank),
            f"only{rank}": torch.zeros(2, dtype=[torch.float16, torch.float64][rank % 2]),
            "unused": torch.zeros(2),
        }
        grads = {name: torch.full_like(p, 5.0 + rank) for name, p in params.items()}
        grads["unused"] = None if rank else torch.ones(2)

        def loss_fn(p: Any) -> Tensor:
            return sum((p[name] * grad).sum() for name, grad in grads.items() if grad is not None)

        with fddp.GradSync(params, group=group, select=lambda path: path == "w") as sync:
            synced_tree = sync(grads)
            _, stepped = sync.value_and_grad(loss_fn)(params)
        assert synced_tree["expert"].data_ptr() != grads["expert"].data_ptr()
        for result in (synced_tree, stepped):
            assert result.keys() == params.keys()
            assert result["w"].tolist() == [6.0, 6.0]
            for name in ("expert", f"only{rank}", "unused"):
                assert (result[name] is None) == (grads[name] is None)
                assert grads[name] is None or torch.equal(result[name], grads[name])

    fddp.loopback(3, run)


# Plans


def ordered_loss(p: dict[str, Tensor], names: list[str]) -> Tensor:
    """Uses the parameters in this order, so that gradients come in the reverse of it."""
    x = torch.ones(4, 4, dtype=torch.float64)
    for name in names:
        x = torch.tanh(x @ p[name])
    return x.square().mean()


def square_params() -> dict[str, Tensor]:
    return {name: rand(4, 4, seed=i) for i, name in enumerate("abcdef")}


def test_a_plan_is_rebuilt_once_in_rank_0s_ready_order() -> None:
    options = {"first_bucket_mb": 1e-4, "bucket_cap_mb": 3e-4}

    def run(group: Any) -> Any:
        orders = ["cbafed", "abcdef", "fedcba"]
        with fddp.GradSync(square_params(), group=group, **options) as sync:
            step = sync.value_and_grad(ordered_loss)
            plans, grads = [sync.plan], []
            sync(square_params())
            assert sync.plan is plans[0], "a tree that is all there tells no order"
            for number in range(3):
                names = orders[(group.rank + number) % 3]
                grads.append(step(square_params(), list(names))[1])
                plans.append(sync.plan)
            return plans, grads

    results = fddp.loopback(2, run)
    for plans, grads in results:
        assert plans[0] == fddp.plan_buckets(square_params(), **options)
        # "cbafed" is rank 0's order of use in the first step.
        assert plans[1] == fddp.rebucket(plans[0], ["abcdef".index(name) for name in "defabc"])
        assert plans[1] is plans[2] is plans[3]
        for number, result in enumerate(grads):
            inputs = [(list(["cbafed", "abcdef", "fedcba"][(r + number) % 3]),) for r in range(2)]
            expected = mean_gradients(ordered_loss, square_params(), inputs, [1.0, 1.0])
            assert largest_difference(result, expected) < 1e-14
    assert same_bits([grads for _, grads in results])


@pytest.mark.parametrize("source", ["params", "meta", "numpy", "json"])
def test_a_plan_that_is_passed_in_is_used_as_given(source: str) -> None:
    trees: dict[str, Any] = {
        "params": square_params(),
        "json": square_params(),
        "meta": {k: v.to("meta") for k, v in square_params().items()},
        "numpy": {k: np.zeros(v.shape) for k, v in square_params().items()},
    }
    plan = fddp.plan_buckets(trees[source], order=[3, 1, 4, 0, 5, 2], bucket_cap_mb=[1e-4, 3e-4])
    if source == "json":
        plan = fddp.BucketPlan.from_json(plan.to_json())

    def run(group: Any) -> Any:
        with fddp.GradSync(plan, group=group) as sync:
            step = sync.value_and_grad(ordered_loss, with_info=True)
            for _ in range(2):
                _, grads, info = step(square_params(), list("abcdef"))
                assert sync.plan is plan
                assert len(info.timeline.buckets) == len(plan.buckets)
            nothing = dict.fromkeys("abcdef")
            return grads, sync(nothing if group.rank else grads)

    expected = mean_gradients(ordered_loss, square_params(), [(list("abcdef"),)] * 2, [1.0, 1.0])
    for grads, half in fddp.loopback(2, run):
        assert largest_difference(grads, expected) < 1e-14
        assert largest_difference(half, fddp.tree_map(lambda g: g / 2, expected)) < 1e-14
        assert all(leaf.device.type == "cpu" for leaf in half.values())


# Several at once


def test_two_syncs_do_not_mix_however_their_calls_interleave() -> None:
    def run(group: Any) -> list[float]:
        one = {"w": torch.ones(3)}
        with fddp.GradSync(one, group=group) as a, fddp.GradSync(one, group=group) as b:
            results: dict[str, Tensor] = {}

            def twenty(name: str, sync: fddp.GradSync, factor: float) -> None:
                total = torch.zeros(3)
                for step in range(20):
                    total += sync({"w": torch.full((3,), factor * (step + group.rank))})["w"]
                results[name] = total

            jobs = [("a", a, 1.0), ("b", b, 1000.0)]
            threads = [
                threading.Thread(target=twenty, args=job)
                for job in (jobs if group.rank else jobs[::-1])
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return [results["a"][0].item(), results["b"][0].item()]

    assert fddp.loopback(2, run) == [[200.0, 200000.0]] * 2
