"""Bad input for shards: errors on every rank, after which the group is still usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from fddp import Topology
from fddp.testing import assert_mean
from tests.support.endings import Ending, ending

GRID = Topology(host=2, local=2)


def params() -> dict[str, Tensor]:
    return {"a": torch.ones(3), "b": torch.full((2,), 2.0)}


@pytest.mark.parametrize("algorithm", ["all_reduce", "hierarchical", "reduce_scatter"])
@pytest.mark.parametrize("culprits", [(1,), (0, 1, 2, 3)], ids=["one", "all"])
def test_methods_of_another_algorithm(algorithm: Any, culprits: tuple[int, ...]) -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(params(), group=group, mesh=GRID, algorithm=algorithm) as own:
            whole = {"sync(grads)": own, "reduce_(grads)": own.reduce_}
            shards = {
                "reduce_scatter(grads)": own.reduce_scatter,
                "all_gather(shards)": own.all_gather,
            }
            is_sharded = algorithm == "reduce_scatter"
            right = own.reduce_scatter if is_sharded else own
            for name, wrong in (whole if is_sharded else shards).items():
                call = wrong if group.rank in culprits else right
                end = ending(lambda: call(params()))  # noqa: B023 - called at once
                found = end.text if group.rank in culprits else end.failures[1]
                assert end.kinds[0] == ("ValueError" if group.rank in culprits else "PeerError")
                assert f"{name} needs a GradSync whose schedule gives a " in found
                assert "build it with another algorithm" in found
            if not is_sharded:
                assert ending(lambda: own.shard(params())).kinds[0] == "ValueError"
            assert_mean(own, [params()] * 4)

    fddp.loopback(4, run)


SHARDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "whole leaves": (lambda shards: params(), "of the shards is float32 of shape"),
    "of another dtype": (
        lambda shards: {**shards, "b": shards["b"].double()},
        "leaf 'b' of the shards is float64 of shape",
    ),
    "no tensors": (
        lambda shards: {**shards, "a": 3.0},
        "leaf 'a' of the shards is a float where this rank owns",
    ),
    "of another structure": (
        lambda shards: {"a": shards["a"]},
        "shards does not have the expected leaves",
    ),
}


def gather_wrongly(group: Any, name: str) -> tuple[Ending, list[float]]:
    with fddp.GradSync(params(), group=group, algorithm="reduce_scatter") as own:
        shards = own.reduce_scatter(params())
        wrong = SHARDS[name][0](shards) if own.rank == 1 else shards
        end = ending(lambda: own.all_gather(wrong))
        assert_mean(own, [params()] * own.world_size)
        return end, own.all_gather(shards)["a"].tolist()


@pytest.mark.parametrize("name", SHARDS)
def test_shards_that_a_rank_does_not_own(name: str) -> None:
    for rank, (end, whole) in enumerate(fddp.loopback(2, gather_wrongly, name)):
        text = end.text if rank == 1 else end.failures[1]
        assert end.kinds[0] == ("TreeMismatchError" if rank == 1 else "PeerError")
        assert SHARDS[name][1] in text
        assert whole == [1.0] * 3


def test_a_shard_that_is_none_on_some_ranks() -> None:
    def leave_out(group: Any) -> Ending:
        with fddp.GradSync(params(), group=group, algorithm="reduce_scatter") as own:
            shards = own.shard(params())
            missing = {**shards, "a": None} if own.rank == 0 else shards
            end = ending(lambda: own.all_gather(missing))
            assert own.all_gather({**shards, "a": None})["a"] is None
            assert_mean(own, [params()] * own.world_size)
            return end

    for end in fddp.loopback(2, leave_out):
        assert end.kinds[0] == "TreeMismatchError"
        assert "leaf 'a' of the shards is None on 1 of 2 ranks" in end.text
        assert "pass its shard on every rank, or None on all" in end.text


def test_different_calls_are_reported() -> None:
    def run(group: Any) -> Ending:
        with fddp.GradSync(params(), group=group, algorithm="reduce_scatter", timeout_s=5) as own:
            shards = own.shard(params())
            if group.rank == 0:
                return ending(lambda: own.all_gather(shards))
            return ending(lambda: own.reduce_scatter(params()))

    for end in fddp.loopback(2, run):
        assert "DesyncError" in end.kinds
