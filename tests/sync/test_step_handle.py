"""Handles of all-gathers: bits, order among the steps of a `GradSync`, failures."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp import Topology
from fddp.sync.step_handle import StepHandle
from fddp.testing import param_trees, topologies
from tests.support.endings import BoomError, Ending, ending
from tests.support.models import batch, descend, mlp, mlp_loss, same_bits
from tests.support.ranks import Launch, launch_fixture, run_fresh

launch = launch_fixture("c10d", "shm", "loopback")

SMALL = {"bucket_cap_mb": 0.0003, "first_bucket_mb": 0.0001}
SHARDS: Any = {"algorithm": "reduce_scatter", **SMALL}
STEPS = 4


def train(group: Any, mesh: Topology, is_async: bool) -> Any:
    """Parameters after a few steps of sharded descent with momentum."""
    params: Any = mlp()
    with fddp.GradSync(params, group=group, mesh=mesh, **SHARDS) as sync:
        own = sync.shard(params)
        velocity = fddp.tree_map(torch.zeros_like, own)
        step = sync.value_and_grad(mlp_loss)
        losses = []
        for number in range(STEPS):
            loss, grads = step(params, batch(sync.rank, number))
            velocity = fddp.tree_map(lambda v, g: 0.9 * v + g, velocity, grads)
            own = descend(own, velocity, 0.1)
            if is_async:
                handle = sync.start_all_gather(own)
                assert not handle.is_done
                params = handle.wait()
                assert handle.is_done
            else:
                params = sync.all_gather(own)
            losses.append(loss.item())
        return losses, params


MESHES = [Topology(host=2, local=2), Topology(world=3), Topology(world=2), Topology(world=1)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bits_are_those_of_all_gather(launch: Launch, mesh: Topology) -> None:
    waited = launch(mesh.world_size, train, mesh, False)
    started = launch(mesh.world_size, train, mesh, True)
    assert [losses for losses, _ in waited] == [losses for losses, _ in started]
    assert same_bits([params for _, params in (*waited, *started)])


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_any_tree_is_gathered_to_the_bit(data: st.DataObject) -> None:
    topology, tree = data.draw(topologies(max_ranks=6)), data.draw(param_trees())
    split_mb = data.draw(st.sampled_from([None, 2e-5]))

    def run(group: Any) -> None:
        plan = fddp.plan_buckets(tree, **SMALL)
        schedule = fddp.make_schedule(plan, topology, algorithm="reduce_scatter", split_mb=split_mb)
        with fddp.GradSync(schedule, group=group) as sync:
            shards = sync.shard(tree)
            handle = sync.start_all_gather(shards)
            found = handle.wait()
            assert same_bits([found, sync.all_gather(shards)])
            assert same_bits([handle.wait(), found])

    fddp.loopback(topology.world_size, run)


def test_collectives_run_before_they_are_awaited() -> None:
    def run(group: Any) -> int:
        params = {f"layer{i}": torch.ones(4, 4) for i in range(3)}
        plan = fddp.plan_buckets(params, bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
        with fddp.GradSync(plan, group=group, algorithm="reduce_scatter") as sync:
            transport, launched = sync._engine.transport, []
            launch = transport.all_gather_in_place

            def noted(buffer: Tensor, **options: Any) -> Any:
                launched.append(buffer)
                return launch(buffer, **options)

            transport.all_gather_in_place = noted  # type: ignore[method-assign]
            handle = sync.start_all_gather(sync.shard(params))
            count = len(launched)
            handle.wait()
            assert len(launched) == count
            return count

    assert fddp.loopback(2, run) == [3, 3]


# Order among the steps of a GradSync


def test_the_next_call_finishes_an_all_gather_in_flight() -> None:
    def run(group: Any) -> None:
        params = mlp()
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            own = sync.shard(params)

            def start() -> StepHandle:
                handle = sync.start_all_gather(own)
                assert not handle.is_done
                return handle

            calls: list[Callable[[StepHandle], object]] = [
                lambda handle: handle.wait(),
                lambda handle: sync.all_gather(own),
                lambda handle: sync.reduce_scatter(params),
                lambda handle: sync.start_all_gather(own),
                lambda handle: sync.value_and_grad(mlp_loss)(params, batch(0, 0)),
                lambda handle: ending(lambda: sync.reduce_scatter({"other": torch.ones(1)})),
            ]
            for call in calls:
                handle = start()
                call(handle)
                assert handle.is_done
                assert same_bits([handle.wait(), params])
            handle = start()
            after = sync.rebuild(group)
            assert handle.is_done
        assert same_bits([handle.wait(), params])
        with after:
            last = after.start_all_gather(own)
        assert last.is_done
        assert same_bits([last.wait(), params])
        after.close()

    fddp.loopback(2, run)


def test_a_dropped_handle_is_finished_by_the_next_step() -> None:
    def run(group: Any) -> None:
        params = mlp()
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            if group.rank == 0:
                sync.start_all_gather(sync.shard(params))
                gc.collect()
            else:
                kept = sync.start_all_gather(sync.shard(params))
            sync.value_and_grad(mlp_loss)(params, batch(sync.rank, 0))
            if group.rank:
                assert same_bits([kept.wait(), params])

    fddp.loopback(2, run)


def test_an_error_does_not_wait_for_a_step_in_flight() -> None:
    """Other ranks may not have started it."""

    def run(group: Any) -> bool:
        grads, handles = {"w": torch.ones(2)}, []

        def fail() -> None:
            with fddp.GradSync(grads, group=group, timeout_s=5.0) as sync:
                if group.rank == 0:
                    handles.append(sync.start(grads))
                raise BoomError(1, "after the start")

        assert ending(fail).kinds[0] == "BoomError"
        return any(handle.is_done for handle in handles)

    assert fddp.loopback(2, run) == [False, False]


def test_within_a_loss_function_it_ends_at_once() -> None:
    """The collectives of the step come next, at different times on different ranks."""

    def run(group: Any) -> None:
        params, mesh = mlp(), Topology(host=2, local=2)
        with fddp.GradSync(params, group=group, mesh=mesh, **SHARDS) as sync:
            own = sync.shard(params)

            def loss_fn(p: Any, x: Tensor) -> Tensor:
                handle = sync.start_all_gather(own)
                assert handle.is_done
                assert same_bits([handle.wait(), params])
                return mlp_loss(p, x)

            own_batch = batch(sync.rank, 0)
            _, found = sync.value_and_grad(loss_fn)(params, own_batch)
            _, expected = sync.value_and_grad(mlp_loss)(params, own_batch)
            assert same_bits([found, expected])

    fddp.loopback(4, run)


# Failures


def test_a_wrong_shard_on_one_rank_is_an_error_on_all() -> None:
    def run(group: Any) -> list[Ending]:
        params = mlp()
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            own = sync.shard(params)
            wrong = (
                own if group.rank else {**own, "layer0": {"weight": torch.ones(1), "bias": None}}
            )
            seen = []
            handle = sync.start_all_gather(wrong)
            seen += [ending(handle.wait), ending(handle.wait)]
            handle = sync.start_all_gather(wrong)
            if group.rank:
                seen.append(ending(handle.wait))
            sync.value_and_grad(mlp_loss)(params, batch(sync.rank, 0))
            if not group.rank:
                seen.append(ending(handle.wait))
            assert same_bits([sync.start_all_gather(own).wait(), params]), "it stays usable"
            return seen

    first, second = fddp.loopback(2, run)
    assert [seen.kinds[0] for seen in first] == ["TreeMismatchError"] * 3
    assert all("rank 0 at step" in seen.text and "layer0.weight" in seen.text for seen in first)
    assert [seen.kinds[0] for seen in second] == ["PeerError"] * 3
    assert all("rank 0" in seen.text for seen in second)


def test_a_transform_on_one_rank_is_an_error_on_all() -> None:
    def run(group: Any) -> list[str]:
        params = {"w": torch.ones(4)}
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            own, handles = sync.shard(params), []

            def started(x: Tensor) -> Tensor:
                handles.append(sync.start_all_gather(own))
                return x.sum()

            if group.rank:
                started(torch.ones(1))
            else:
                torch.func.grad(started)(torch.ones(1))
            return [ending(handle.wait).kinds[0] for handle in handles]

    assert fddp.loopback(2, run) == [["TransformError"], ["PeerError"]]


def lose_a_rank(rank: int, world_size: int, transport: str) -> Any:
    """The last rank ends before it has started the second all-gather."""
    params: Any = mlp()
    sync = fddp.GradSync(params, transport=transport, timeout_s=10.0, **SHARDS)
    own = sync.shard(params)
    sync.start_all_gather(own).wait()
    if rank == world_size - 1:
        os._exit(3)
    handle = sync.start_all_gather(own)
    waited = ending(handle.wait)
    closed = ending(lambda: sync.all_gather(own))
    return waited, closed, ending(handle.wait)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_lost_rank_is_named(transport: str) -> None:
    *others, lost = run_fresh(3, lose_a_rank, transport, timeout_s=60.0)
    assert lost.exitcode == 3
    for outcome in others:
        assert outcome.error is None, outcome.error
        waited, closed, again = outcome.result
        for seen in (waited, again):
            assert seen.kinds[0] == "RankLostError", seen
            assert "rank 2" in seen.text
        assert closed.kinds[0] == "ClosedError"
