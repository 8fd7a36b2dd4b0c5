"""Hooks in `GradSync`: where they are taken, how their state travels, and what goes wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.functional import embedding

import fddp
from fddp.core.protocol.calls import Method
from fddp.hooks import (
    AllReduce,
    Bucket,
    BucketSpec,
    Future,
    Hook,
    HookError,
    TorchHook,
    allreduce,
    bf16_compress,
    fp16_compress,
    int8,
    power_sgd,
    top_k,
)
from fddp.runtime.contributions import Contributions
from tests.support.hook_models import (
    SMALL,
    Halves,
    Same,
    grads,
    late_loss,
    name_of,
    params,
    same_leaves,
    weight,
    weighted_sum,
)
from tests.support.models import (
    batch,
    largest_difference,
    mean_gradients,
    mlp,
    mlp_loss,
    rand,
    same_bits,
)
from tests.support.on_ranks import on_threads
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.ranks import TRANSPORTS, Launch

EXACT = [allreduce, Same(), Halves(), top_k(1.0), power_sgd(100)]
MESH = fddp.Topology(host=2, local=2)


# Every way to synchronise


@pytest.mark.parametrize("hook", EXACT, ids=name_of)
def test_steps_during_backward(launch: Launch, hook: Hook[Any]) -> None:
    runs = launch(2, gradients_during_backward, hook)
    for step in range(4):
        wanted = mean_gradients(
            mlp_loss,
            mlp(),
            [(batch(r, step),) for r in range(2)],
            [weight(r, step) for r in (0, 1)],
        )
        assert largest_difference(runs[0][0][step], wanted) < 1e-12
    assert same_bits([means for means, _ in runs])
    assert [packed for _, packed in runs] == [runs[0][1]] * 2


def gradients_during_backward(group: Any, hook: Hook[Any]) -> Any:
    with fddp.GradSync(mlp(), group=group, hook=hook, **SMALL) as sync:
        number = iter(range(4))
        step = sync.value_and_grad(
            mlp_loss, with_info=True, weight_fn=lambda p, x: weight(sync.rank, next(number))
        )
        state, means = sync.init_state(), []
        for n in range(4):
            loss, mean, state, info = step(mlp(), batch(sync.rank, n), hook_state=state)
            assert not loss.requires_grad
            means.append(mean)
        return means, info.total_weight


@on_threads(2)
def test_return_values_with_a_hook(group: Any) -> None:
    own = {"w": torch.ones(3)}
    with fddp.GradSync(own, group=group, hook=top_k(0.5)) as sync:
        state = sync.init_state()
        assert len(sync.update(own, state)) == 2
        assert isinstance(sync.update(own, state, with_info=True)[2], fddp.SyncInfo)
        step = sync.value_and_grad(lambda p: (p["w"].sum(), "aux"), has_aux=True)
        (loss, aux), mean, new = step(own, hook_state=state)
        assert (loss.item(), aux, set(mean)) == (3.0, "aux", {"w"})
        assert not same_leaves(new, state)
    for hook in (None, bf16_compress):
        with fddp.GradSync(own, group=group, hook=hook) as sync:
            assert sync.init_state() == ()
            assert sync.update(own, ())[1] == ()
            step = sync.value_and_grad(lambda p: p["w"].sum())
            assert len(step(own)) == 2
            assert step(own, hook_state=())[2] == ()
            assert set(sync(own)) == set(sync.reduce_(own)) == {"w"}


def test_hierarchical_hooks_see_this_ranks_shard_in_the_group_along_the_outer_axis() -> None:
    seen: dict[int, Any] = {}

    class Spy(Same):
        def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Any:
            place = (all_reduce.rank, all_reduce.world_size)
            views = {
                p: tuple(g.shape)
                for p, g in zip(bucket.spec.paths, bucket.gradients(), strict=True)
            }
            return all_reduce.all_gather(torch.tensor([float(all_reduce.rank)])).then(
                lambda row: (
                    seen.setdefault(int(bucket.buffer[0]), (place, row.view(-1).tolist(), views)),
                    super(Spy, self).apply(state, bucket, all_reduce),
                )[1]
            )

    own = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0, 10.0)}

    def run(group: Any) -> None:
        sync = fddp.GradSync(own, group=group, mesh=MESH, algorithm="hierarchical", hook=Spy())
        with sync:
            sync({name: leaf * 2 for name, leaf in own.items()})

    fddp.loopback(4, run)
    # Leaf b lies first, as in backward; a is cut after its first element.
    first, second = (seen[key] for key in sorted(seen, reverse=True))
    assert first[1:] == ([0.0, 1.0], {"b": (4,), "a": (1,)})
    assert second[1:] == ([0.0, 1.0], {"a": (5,)})


@pytest.mark.parametrize("scaling", ["before", "after", "average"])
@pytest.mark.parametrize("hook", [allreduce, Halves(), fp16_compress], ids=name_of)
@on_threads(3)
def test_every_scaling_gives_the_same_mean(group: Any, scaling: Any, hook: Hook[Any]) -> None:
    plan = fddp.plan_buckets(params(), bucket_cap_mb=0.001)
    schedule = fddp.make_schedule(plan, fddp.Topology(world=3), scaling=scaling)
    with fddp.GradSync(schedule, group=group, hook=hook) as sync:
        state = sync.init_state()
        for n in range(3):
            weights = [weight(r, n) for r in range(3)]
            own = grads(group.rank, n)
            mean, state = sync.update(own, state, weight=weights[group.rank])
            shares = [heavy / sum(weights) for heavy in weights]
            wanted = weighted_sum([grads(r, n) for r in range(3)], shares)
            assert largest_difference(mean, wanted) < (0.01 if hook is fp16_compress else 1e-12)


@on_threads(3)
def test_every_scaling_leaves_the_same_residual(group: Any) -> None:
    own, residuals = {"w": torch.tensor([1.0, 10.0, 3.0 + group.rank])}, []
    for scaling in ("before", "after", "average"):
        plan, topology = fddp.plan_buckets(own), fddp.Topology(world=3)
        schedule = fddp.make_schedule(plan, topology, scaling=scaling)
        with fddp.GradSync(schedule, group=group, hook=top_k(0.3)) as sync:
            _, (state,) = sync.update(own, sync.init_state())
            residuals.append(state["residual"])
    for residual in residuals:
        torch.testing.assert_close(residual, torch.tensor([1.0, 0.0, 3.0 + group.rank]))


@on_threads(2)
def test_uneven_inputs(group: Any) -> None:
    own, means = {"w": torch.tensor([1.0, 10.0])}, []
    with fddp.GradSync(own, group=group, hook=top_k(0.5)) as sync:
        step, state = sync.value_and_grad(lambda p, x: (p["w"] * x).sum()), sync.init_state()
        for x in fddp.uneven([torch.tensor([2.0, 3.0])] * (1 + 2 * group.rank), sync):
            _, mean, state = step(own, x, hook_state=state)
            means.append(mean["w"].tolist())
    # Rank 0 still owes 2.0 from the first round; it comes in the second.
    assert means == [[0.0, 3.0], [6.0, 0.0], [0.0, 6.0]]


@on_threads(2)
def test_sparse_buckets_bypass_hooks(group: Any) -> None:
    tables = {"rows": torch.ones(10, 4), "w": torch.ones(4)}

    def loss_fn(p: Any, token: Tensor) -> Tensor:
        return (embedding(token, p["rows"], sparse=True) * p["w"]).sum()

    with fddp.GradSync(tables, group=group, sparse=["rows"], hook=top_k(0.25)) as sync:
        state = sync.init_state()
        assert sorted(map(bool, state)) == [False, True]
        token = torch.tensor([3 + group.rank])
        _, mean, state = sync.value_and_grad(loss_fn)(tables, token, hook_state=state)
        assert mean["rows"].to_dense().sum(dim=1).tolist() == [0] * 3 + [2.0] * 2 + [0] * 5
        assert mean["w"].count_nonzero() == 1


def test_late_gradients_travel_as_they_are() -> None:
    """A leaf that a re-entrant checkpoint uses again after its bucket has left."""
    own = {f"w{i}": rand(4, 4, seed=i) for i in range(4)}

    def run(group: Any, hook: Hook[Any] | None) -> Any:
        caps = {"bucket_cap_mb": 0.0002, "first_bucket_mb": 0.0001}  # one leaf each
        with fddp.GradSync(own, group=group, hook=hook, **caps) as sync:
            step = sync.value_and_grad(late_loss, with_info=True)
            state, results = sync.init_state(), []
            for n in range(3):
                x = batch(group.rank, n, width=4)
                _, mean, state, info = step(own, x, n == 1 and group.rank == 1, hook_state=state)
                results.append((mean, info.repaired))
            return results

    plain, exact = (fddp.loopback(2, run, hook)[0] for hook in (None, power_sgd(100)))
    assert [repaired for _, repaired in exact] == [repaired for _, repaired in plain]
    assert any(repaired for _, repaired in exact)
    for (mean, _), (wanted, _) in zip(exact, plain, strict=True):
        assert largest_difference(mean, wanted) < 1e-12


# Plans


NEW_PLANS = [(bf16_compress, True), (TorchHook(None, noop_hook), True), (top_k(0.5), False)]


@pytest.mark.parametrize(("hook", "rebuilds"), NEW_PLANS)
@on_threads(2)
def test_plans_stay_where_a_hook_keeps_state(group: Any, hook: Hook[Any], rebuilds: bool) -> None:
    own = {"used last": rand(40, 40, seed=0), "used first": rand(40, 40, seed=1)}

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ p["used first"] @ p["used last"]).sum()

    with fddp.GradSync(own, group=group, hook=hook, **SMALL) as sync:
        step, state, orders = sync.value_and_grad(loss_fn), sync.init_state(), []
        for n in range(3):
            orders.append([sync.plan.paths[leaf] for leaf in sync.plan.order])
            _, _, state = step(own, batch(group.rank, n, width=40), hook_state=state)
    registered, arrived = ["used first", "used last"], ["used last", "used first"]
    assert orders == [registered, *[arrived if rebuilds else registered] * 2]


@on_threads(2)
def test_stateful_hook_forbids_a_plan_change(group: Any) -> None:
    own = {"w": torch.ones(4)}
    with fddp.GradSync(own, group=group, hook=top_k(0.5)) as sync:
        step = sync.value_and_grad(lambda p: p["w"].sum())
        state = sync.init_state()
        with pytest.raises(ValueError, match="plan can't change under error_feedback"):
            sync.tune(lambda: step(own, hook_state=state))
        step(own, hook_state=state)


# What goes wrong


@on_threads(2)
def test_missing_hook_state_is_refused(group: Any) -> None:
    own = {"w": torch.ones(4)}
    with fddp.GradSync(own, group=group, hook=top_k(0.5)) as sync:
        step = sync.value_and_grad(lambda p: p["w"].sum())
        for call in (sync, sync.reduce_):
            with pytest.raises(ValueError, match=r"pass the state on by update\(grads, state"):
                call(own)
        with pytest.raises(ValueError, match="pass the state on by hook_state="):
            step(own)
        sync.update(own, sync.init_state())


WRONG_STATES: dict[str, Any] = {
    "is a tuple of 3, one for each bucket, got 2": lambda state: state[:2],
    "one for each bucket, got a list": list,
    r"for bucket 0 has the leaves \['residual'\]": lambda state: ({"residual": 1}, *state[1:]),
    r"has a float64 tensor of shape \(1,\) on cpu as leaf 'residual', expected a float64": (
        lambda state: (state[0] | {"residual": torch.zeros(1, dtype=torch.float64)}, *state[1:])
    ),
    "has a int as leaf 'residual', expected a": (
        lambda state: (state[0] | {"residual": 1}, *state[1:])
    ),
}


def test_a_state_that_does_not_fit(launch: Launch) -> None:
    assert launch(2, hand_in_wrong) == [
        [name] * len(WRONG_STATES) for name in ("TreeMismatchError", "PeerError")
    ]


def hand_in_wrong(group: Any) -> list[str]:
    own = {f"w{i}": torch.ones(200, dtype=torch.float64) for i in range(3)}
    found = []
    with fddp.GradSync(own, group=group, hook=top_k(0.5), **SMALL) as sync:
        state = sync.init_state()
        assert len(state) == 3
        for pattern, spoil in WRONG_STATES.items():
            given = spoil(state) if sync.rank == 0 else state
            with pytest.raises(fddp.FddpError, match=pattern) as caught:
                sync.update(own, given)
            with pytest.raises(fddp.FddpError, match=pattern):
                sync.value_and_grad(lambda p: p["w0"].sum())(own, hook_state=given)
            sync.update(own, state)
            found.append(type(caught.value).__name__)
    return found


@on_threads(2)
def test_state_where_there_is_no_hook(group: Any) -> None:
    own = {"w": torch.ones(4)}
    for hook in (None, bf16_compress):
        with fddp.GradSync(own, group=group, hook=hook) as sync:
            with pytest.raises(fddp.TreeMismatchError, match="no hook keeps state"):
                sync.update(own, ({"residual": torch.zeros(4)},))
            sync.update(own, ())


@pytest.mark.parametrize("hook", [top_k(0.3), power_sgd(1), Halves()], ids=name_of)
def test_a_failed_step_keeps_the_state(hook: Hook[Any]) -> None:
    def run(group: Any, fails: bool) -> Any:
        with fddp.GradSync(params(), group=group, hook=hook, **SMALL) as sync:
            _, state = sync.update(grads(sync.rank, 0), sync.init_state())
            if fails:
                with pytest.raises(fddp.FddpError):
                    sync.update(grads(sync.rank, 1), state, weight=-1.0 if sync.rank else 1.0)
            return sync.update(grads(sync.rank, 2), state)

    smooth, bumpy = (fddp.loopback(2, run, fails) for fails in (False, True))
    for (mean, state), (other, other_state) in zip(smooth, bumpy, strict=True):
        assert same_bits([mean, other])
        assert same_leaves(state, other_state)


def test_a_function_is_no_hook() -> None:
    def run(group: Any) -> None:
        fddp.GradSync({"w": torch.ones(4)}, group=group, hook=lambda *_: None)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"a fddp.hooks.Hook or 'auto', got a function; .*Torch"):
        fddp.loopback(2, run)


def test_schedules_that_have_no_place_for_a_hook() -> None:
    plan = fddp.plan_buckets({"w": torch.ones(1000)})
    world = fddp.Topology(world=2)
    pieces = fddp.make_schedule(plan, world, split_mb=0.001)
    shards = fddp.make_schedule(plan, world, algorithm="reduce_scatter", split_mb=0.001)

    def run(group: Any, source: Any, algorithm: Any, hook: Hook[Any]) -> None:
        fddp.GradSync(source, group=group, algorithm=algorithm, hook=hook)

    with pytest.raises(ValueError, match=r"has 4 for bucket 0 \(w\); use algorithm='all_reduce'"):
        fddp.loopback(2, run, pieces, "all_reduce", bf16_compress)
    with pytest.raises(ValueError, match=r"bf16_compress replaces .* the schedule has 0"):
        fddp.loopback(2, run, plan, "reduce_scatter", bf16_compress)
    with pytest.raises(ValueError, match=r"divides bucket 0 \(w\) into several; use no split_mb"):
        fddp.loopback(2, run, shards, "all_reduce", int8())


@dataclass(frozen=True)
class Wrong(Hook[Any]):
    """Returns or keeps what is of no use."""

    what: str

    def init(self, spec: BucketSpec) -> Any:
        return "text" if self.what == "state" else ()

    def apply(
        self, state: Any, bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, Any]]:
        if self.what == "raises":
            raise ArithmeticError("no root")
        result: Any = {"short": bucket.buffer[1:].clone(), "number": 3}.get(self.what)
        return all_reduce(bucket.buffer).map(lambda total: (result, state))


@dataclass(frozen=True)
class Forgetful(Hook[None]):
    """A sum, with a state that says nothing."""

    def init(self, spec: BucketSpec) -> None:
        return None

    def apply(
        self, state: None, bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, None]]:
        return all_reduce(bucket.buffer.clone()).map(lambda total: (total, None))


def test_a_state_may_be_none() -> None:
    def run(group: Any) -> Any:
        own = {"w": torch.ones(4)}
        with fddp.GradSync(own, group=group, hook=Forgetful()) as sync:
            return sync.update(own, sync.init_state())

    for mean, state in fddp.loopback(2, run):
        assert torch.equal(mean["w"], torch.ones(4))
        assert state == (None,)


def test_hooks_that_return_no_result() -> None:
    def run(group: Any, what: str) -> None:
        own = {"w": torch.ones(4)}
        with fddp.GradSync(own, group=group, hook=Wrong(what)) as sync:
            sync(own)

    with pytest.raises(HookError, match=r"bucket 0 \(w\) of step 0: .* buffer has, 4, got 3"):
        fddp.loopback(2, run, "short")
    with pytest.raises(HookError, match="4, got int"):
        fddp.loopback(2, run, "number")
    with pytest.raises(ArithmeticError, match="no root"):
        fddp.loopback(2, run, "raises")
    with pytest.raises(
        TypeError, match="must be a tree of tensors, numbers and None; the tree itself is a str"
    ):
        fddp.loopback(2, run, "state")


@pytest.mark.parametrize("launch", TRANSPORTS, indirect=True)
def test_a_hook_that_raises_on_one_rank_does_not_leave_the_others_waiting(launch: Launch) -> None:
    """Its next collective does not match the one that the others wait for."""
    for index in (0, 1):
        own, *others = launch(3, raise_on_one, index)
        assert own[:2] == ("ArithmeticError", None)
        assert [kind for kind, *_ in others] == ["RankLostError"] * 2
        assert [ranks for _, ranks, _ in others] == [(0,)] * 2
        assert all(took_s < PROMPT_S for *_, took_s in others)


def raise_on_one(group: Any, index: int) -> Any:
    class OnRank(Same):
        def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Any:
            if all_reduce.rank == 0 and bucket.spec.index == index:
                raise ArithmeticError("no root")
            return super().apply(state, bucket, all_reduce)

    options: Any = {"group": group, "timeout_s": LONG_S, **SMALL}
    sync = fddp.GradSync(mlp(), hook=OnRank(), **options)
    begin_s = time.perf_counter()
    with pytest.raises((ArithmeticError, fddp.FddpError)) as caught:
        sync.value_and_grad(mlp_loss)(mlp(), batch(sync.rank, 0))
    took_s = time.perf_counter() - begin_s
    with fddp.GradSync(mlp(), **options) as again:  # while a debugger might hold the error
        again.value_and_grad(mlp_loss)(mlp(), batch(sync.rank, 0))
    with pytest.raises(fddp.ClosedError):
        sync(mlp())
    return type(caught.value).__name__, getattr(caught.value, "ranks", None), took_s


# The engine's own state, as the wrapper uses it


@on_threads(2)
def test_set_hook_carries_state_from_step_to_step(group: Any) -> None:
    own = {"w": torch.tensor([4.0, 3.0])}
    with fddp.GradSync(own, group=group) as sync:
        engine = sync._engine
        engine.set_hook(top_k(0.5))
        for wanted in ([4.0, 0.0], [0.0, 6.0]):
            step = engine.open(Method.CALL, with_stats=False)
            step.begin(Contributions([own["w"]], 1.0), [own["w"]])
            assert engine.finish(step).leaves[0].tolist() == wanted
        assert engine.hook_states[0]["residual"].tolist() == [4.0, 0.0]  # type: ignore[index]
        engine.set_hook(None)
        assert engine.hook_states is None
        assert sync(own)["w"].tolist() == [4.0, 3.0]


@on_threads(2)
def test_ranks_compare_hooks(group: Any) -> None:
    own, rank = {"w": torch.ones(4)}, group.rank
    differ = (
        r"hook is error_feedback\(TopK\(fraction=0.1\)\) on rank 0 and .*0.2\)\) on rank 1; pass"
    )
    with pytest.raises(fddp.PlanMismatchError, match=differ):
        fddp.GradSync(own, group=group, hook=top_k(0.1 * (1 + rank)))
    with fddp.GradSync(own, group=group) as sync:
        with pytest.raises(fddp.PlanMismatchError, match=r"the hook is Int8.* on rank 0 and None"):
            sync._engine.set_hook(None if rank else int8())
        sync._engine.set_hook(int8())
