"""Parameters that are gathered during the next forward pass: bits, waits, early reads, failures."""

from __future__ import annotations

import gc
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fddp
from fddp import Topology
from fddp.runtime.state import BucketState
from fddp.sync.gathering import Gathering
from fddp.testing import param_trees, topologies
from fddp.tree.pytree import flatten
from tests.support.endings import BoomError, Ending, ending
from tests.support.models import batch, descend, largest_difference, mlp, mlp_loss, same_bits
from tests.support.ranks import HOSTS, Launch, RankPool, launch_fixture, on_hosts, run_fresh

launch = launch_fixture("c10d", "shm", "loopback")

SMALL = {"bucket_cap_mb": 0.0003, "first_bucket_mb": 0.0001}
SHARDS: Any = {"algorithm": "reduce_scatter", **SMALL}
STEPS = 4


def arrived(gathering: Gathering) -> str:
    """Number of buckets that have arrived, as of all."""
    found = re.search(r"(\d+ of \d+) buckets", repr(gathering))
    assert found is not None, repr(gathering)
    return found[1]


def train(group: Any, mesh: Topology, ahead: bool, loss_fn: Callable[..., Tensor]) -> Any:
    """Parameters after a few steps of sharded descent with momentum."""
    params: Any = mlp()
    with fddp.GradSync(params, group=group, mesh=mesh, **SHARDS) as sync:
        own = sync.shard(params)
        velocity = fddp.tree_map(torch.zeros_like, own)
        step = sync.value_and_grad(loss_fn)
        losses = []
        for number in range(STEPS):
            loss, grads = step(params, batch(sync.rank, number))
            velocity = fddp.tree_map(lambda v, g: 0.9 * v + g, velocity, grads)
            own = descend(own, velocity, 0.1)
            params = sync.start_all_gather(own) if ahead else sync.all_gather(own)
            losses.append(loss.item())
        if ahead:
            assert not params.is_done
            params = params.wait()
        return losses, params


def reversed_loss(params: Any, x: Tensor) -> Tensor:
    """Uses the leaves in an order that the plan does not expect."""
    return mlp_loss(dict(reversed(params.items())), x)


def partial_loss(params: Any, x: Tensor) -> Tensor:
    """Uses the first layer only, through a method and an operator."""
    return x.matmul(params["layer0"]["weight"]).add(params["layer0"]["bias"]).square().mean()


MESHES = [Topology(host=2, local=2), Topology(world=3), Topology(world=2), Topology(world=1)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bits_are_those_of_gathers_at_the_end_of_steps(launch: Launch, mesh: Topology) -> None:
    for loss_fn in (mlp_loss, reversed_loss):
        plain = launch(mesh.world_size, train, mesh, False, loss_fn)
        ahead = launch(mesh.world_size, train, mesh, True, loss_fn)
        assert [losses for losses, _ in plain] == [losses for losses, _ in ahead]
        assert same_bits([params for _, params in (*plain, *ahead)])


def test_bits_across_hosts_of_several_ranks(ranks: RankPool) -> None:
    mesh = Topology(host=2, local=2)
    for name in HOSTS:
        plain = ranks.run(4, on_hosts, name, train, mesh, False, mlp_loss)
        ahead = ranks.run(4, on_hosts, name, train, mesh, True, mlp_loss)
        assert plain[0][0] == ahead[0][0]
        assert same_bits([params for _, params in (*plain, *ahead)])


def test_leaves_that_are_not_used_are_gathered_too() -> None:
    mesh = Topology(world=2)
    plain = fddp.loopback(2, train, mesh, False, partial_loss)
    ahead = fddp.loopback(2, train, mesh, True, partial_loss)
    assert same_bits([params for _, params in (*plain, *ahead)])


def uneven_loss(params: Any, x: Tensor) -> Tensor:
    """Uses other leaves on ranks with other inputs."""
    if x.sum() > 0:
        return mlp_loss(params, x)
    return mlp_loss({"layer1": params["layer1"]}, x)


def test_ranks_may_use_different_leaves() -> None:
    """Collectives are launched in one order all the same, also those of a second axis."""
    mesh = Topology(host=2, local=2)
    sums = [batch(rank, number).sum() > 0 for rank in range(4) for number in range(STEPS)]
    assert len(set(map(bool, sums))) == 2
    plain = fddp.loopback(4, train, mesh, False, uneven_loss)
    ahead = fddp.loopback(4, train, mesh, True, uneven_loss)
    assert same_bits([params for _, params in (*plain, *ahead)])


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
            gathering = sync.start_all_gather(shards)
            for shard in flatten(shards)[0]:
                if shard is not None:
                    shard.zero_()  # it was sent already
            found = gathering.wait()
            assert same_bits([found, sync.all_gather(sync.shard(tree))])
            assert same_bits([gathering.wait(), found])

    fddp.loopback(topology.world_size, run)


# Waits


def test_each_leaf_is_awaited_before_its_first_use() -> None:
    def run(group: Any) -> list[str]:
        params = {f"layer{i}": torch.full((4, 4), 0.5) for i in range(4)}
        plan = fddp.plan_buckets(params, bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
        seen = []

        def loss_fn(p: Any, x: Tensor) -> Tensor:
            seen.append(arrived(gathering))
            for leaf in p.values():
                assert leaf.shape == (4, 4)
                assert leaf.requires_grad
                assert isinstance(leaf, Tensor)
                before = arrived(gathering)
                x = x @ leaf
                seen.append(f"{before}: {arrived(gathering)}")
            return x.sum()

        with fddp.GradSync(plan, group=group, algorithm="reduce_scatter") as sync:
            gathering = sync.start_all_gather(sync.shard(params))
            loss, grads = sync.value_and_grad(loss_fn)(gathering, torch.ones(1, 4))
            assert gathering.is_done
            plain, expected = sync.value_and_grad(chained)(params, torch.ones(1, 4))
            assert same_bits([grads, expected])
            assert loss == plain
            return seen

    seen = fddp.loopback(2, run)
    expected = ["0 of 4", "0 of 4: 1 of 4", "1 of 4: 2 of 4", "2 of 4: 3 of 4", "3 of 4: 4 of 4"]
    assert seen == [expected, expected]


def chained(p: Any, x: Tensor) -> Tensor:
    for leaf in p.values():
        x = x @ leaf
    return x.sum()


def test_a_slow_bucket_holds_up_no_earlier_layer() -> None:
    """The other rank sends the last layer only once this rank has used the first."""
    import threading

    first_used = threading.Event()

    def run(group: Any) -> Any:
        params = {"first": torch.ones(4, 4), "last": torch.ones(4, 4)}

        def loss_fn(p: Any, x: Tensor) -> Tensor:
            x = x @ p["first"]
            if group.rank == 0:
                first_used.set()
            return (x @ p["last"]).sum()

        with fddp.GradSync(params, group=group, timeout_s=20.0, **SHARDS) as sync:
            launch = sync._engine.transport.all_gather_in_place
            calls = []

            def slow(*args: Any, **kwargs: Any) -> Any:
                calls.append(args)
                if group.rank == 1 and len(calls) == 2:
                    assert first_used.wait(10.0)
                return launch(*args, **kwargs)

            sync._engine.transport.all_gather_in_place = slow  # type: ignore[method-assign]
            gathering = sync.start_all_gather(sync.shard(params))
            return sync.value_and_grad(loss_fn)(gathering, torch.ones(1, 4))[0].item()

    assert fddp.loopback(2, run) == [64.0, 64.0]


def test_further_all_gathers_start_before_they_are_needed() -> None:
    """In one order on ranks that use their leaves at different times."""
    import random
    import time

    def run(group: Any) -> tuple[list[Any], list[int]]:
        params = {f"layer{i}": torch.full((4, 4), 0.5) for i in range(5)}
        plan = fddp.plan_buckets(params, bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
        launched: list[Any] = []
        further = []
        delays = random.Random(group.rank)

        def loss_fn(p: Any, x: Tensor) -> Tensor:
            for leaf in p.values():
                x = x @ leaf
                further.append(sum(axes == ("local",) for axes, _ in launched))
                while not all(work.done for _, work in launched):
                    time.sleep(1e-3)
                time.sleep(0.01 * delays.random())
            return x.sum()

        mesh = Topology(host=2, local=2)
        with fddp.GradSync(plan, group=group, mesh=mesh, algorithm="reduce_scatter") as sync:
            start = sync._engine.transport.all_gather_in_place

            def noted(buffer: Tensor, *, axes: Any, **options: Any) -> Any:
                launched.append((axes, start(buffer, axes=axes, **options)))
                return launched[-1][1]

            sync._engine.transport.all_gather_in_place = noted  # type: ignore[method-assign]
            gathering = sync.start_all_gather(sync.shard(params))
            sync.value_and_grad(loss_fn)(gathering, torch.ones(1, 4))
            assert same_bits([gathering.wait(), params])
        return [axes for axes, _ in launched], further

    for axes, further in fddp.loopback(4, run):
        assert axes == [("host",)] * 5 + [("local",)] * 5
        assert further[1:] == [5, 5, 5, 5], "of each bucket, at the second use of one"


class Doubled(torch.autograd.Function):
    """Reads a parameter within its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.mT, 2 * x.mT @ grad


class Chain(torch.nn.Module):
    """Layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.recurrent = torch.nn.GRU(4, 4, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.recurrent(self.norm(self.first(x))[None])
        return self.attention(x, x, x, need_weights=False)[0].square().sum()  # type: ignore[no-any-return]


MODULE = Chain()
APPLY, _, _ = fddp.functionalize(MODULE)


def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.script(scripted)


def by_method(p: Any, x: Tensor) -> Tensor:
    return x.matmul(p["first.weight"]).sum() + p["first.bias"].square().sum()


def by_function(p: Any, x: Tensor) -> Tensor:
    return Doubled.apply(x, p["first.weight"]).square().sum()  # type: ignore[no-any-return, no-untyped-call]


def by_checkpoint(p: Any, x: Tensor) -> Tensor:
    inner = checkpoint(lambda w: (x @ w).tanh(), p["first.weight"], use_reentrant=False)
    outer = checkpoint(lambda w: (inner @ w).tanh(), p["first.weight"], use_reentrant=True)
    return outer.sum()  # type: ignore[no-any-return]


def by_transform(p: Any, x: Tensor) -> Tensor:
    inner = torch.func.grad(lambda w: (x @ w).tanh().sum())(p["first.weight"])
    rows = torch.func.vmap(lambda row: (row @ p["first.weight"]).sum())(x)
    return inner.square().sum() + rows.square().sum()


def by_script(p: Any, x: Tensor) -> Tensor:
    return SCRIPTED(x, p["first.weight"]).sum()  # type: ignore[no-any-return]


def by_functional_call(p: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(MODULE, p, (x,))  # type: ignore[no-any-return]


def by_functionalize(p: Any, x: Tensor) -> Tensor:
    return APPLY(p, {}, x)[0]  # type: ignore[no-any-return]


def by_container(p: Any, x: Tensor) -> Tensor:
    return (
        torch.cat([x, p["first.weight"]]).square().sum()
        + torch.stack([p["first.bias"], p["norm.weight"]]).sum()
    )


def by_value(p: Any, x: Tensor) -> Tensor:
    """The value of a leaf decides."""
    scale = p["first.bias"].detach().numpy().sum() + float(p["norm.weight"].sum().item())
    copied = p["norm.bias"].clone()
    buffer = io.BytesIO()
    torch.save(p["norm.weight"].detach(), buffer)
    return (x @ p["first.weight"]).sum() * float(scale) + copied.square().sum() + buffer.tell()


WAYS = [
    by_method,
    by_function,
    by_checkpoint,
    by_transform,
    by_script,
    by_functional_call,
    by_functionalize,
    by_container,
    by_value,
]


@pytest.mark.parametrize("loss_fn", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_use_a_leaf_waits_for_it(
    restores: None, loss_fn: Callable[..., Tensor]
) -> None:
    params = {name: leaf.detach().clone() for name, leaf in MODULE.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 3, 4, generator=generator)

    def run(group: Any) -> None:
        x = inputs[group.rank]
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            step = sync.value_and_grad(loss_fn)
            expected = step(params, x)
            found = step(poisoned(sync, params), x)
            assert abs(found[0] - expected[0]) < 1e-5
            if loss_fn is not by_script:  # its second run is optimised
                assert same_bits([found[1], expected[1]])
            assert largest_difference(found[1], expected[1]) < 1e-5

    fddp.loopback(1, run)
    # Modules are not for several threads: on processes, see the tests of bits.
    if loss_fn not in (by_functional_call, by_functionalize):
        fddp.loopback(2, run)


def poisoned(sync: fddp.GradSync, params: Any) -> Gathering:
    """An all-gather whose memory holds NaN until a bucket is awaited."""
    gathering = sync.start_all_gather(sync.shard(params))
    step = gathering._step
    step.transport.all_reduce(torch.zeros(1)).wait("others")  # all of it has arrived by now
    for state in step.buckets:
        for position in [*state.works]:
            state.wait(step, position)
        assert state.buffer is not None
        KEPT[step, state.program.index] = state.buffer.clone()
        state.buffer.fill_(float("nan"))
    return gathering


KEPT: dict[tuple[Any, int], Tensor] = {}
"""Contents of poisoned buckets, by step and bucket."""


@pytest.fixture
def restores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Poisoned buckets get their contents when they are unpacked."""
    unpack = BucketState.unpack

    def restored(self: BucketState, step: Any, position: int, op: Any) -> None:
        if (step, op.bucket) in KEPT:
            assert self.buffer is not None
            self.buffer.copy_(KEPT.pop((step, op.bucket)))
        unpack(self, step, position, op)

    monkeypatch.setattr(BucketState, "unpack", restored)
    yield
    assert not KEPT


def compiled_loss(p: Any, x: Tensor) -> Tensor:
    return torch.compile(chained, backend="aot_eager")(p, x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_waits_too(restores: None) -> None:
    params = {f"layer{i}": torch.full((4, 4), 0.25) for i in range(3)}

    def run(group: Any) -> None:
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            step = sync.value_and_grad(compiled_loss)
            x = torch.ones(1, 4)
            assert same_bits([step(poisoned(sync, params), x)[1], step(params, x)[1]])

    fddp.loopback(1, run)


# Early reads


def test_what_reads_parameters_waits_for_all() -> None:
    def run(group: Any) -> None:
        params = mlp()
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            own = sync.shard(params)

            def start() -> Gathering:
                gathering = sync.start_all_gather(own)
                assert not gathering.is_done
                return gathering

            readers: list[Callable[[Gathering], object]] = [
                lambda gathering: gathering.wait(),
                lambda gathering: sync.all_gather(own),
                lambda gathering: sync.reduce_scatter(params),
                lambda gathering: sync.start_all_gather(own),
                lambda gathering: sync.value_and_grad(mlp_loss)(params, batch(0, 0)),
                lambda gathering: ending(lambda: sync.value_and_grad(boom)(gathering)),
                lambda gathering: ending(lambda: sync.reduce_scatter({"other": torch.ones(1)})),
            ]
            for read in readers:
                gathering = start()
                read(gathering)
                assert gathering.is_done
                assert same_bits([gathering.wait(), params])
            gathering = start()
            after = sync.rebuild(group)
            assert gathering.is_done
        assert same_bits([gathering.wait(), params])
        with after:
            last = after.start_all_gather(own)
        assert last.is_done
        assert same_bits([last.wait(), params])
        after.close()

    def boom(p: Any) -> Tensor:
        raise BoomError(7, "in forward")

    fddp.loopback(2, run)


def test_steps_within_the_loss_function_come_after_the_gather() -> None:
    def run(group: Any) -> list[float]:
        params = {"a": torch.arange(6.0), "b": torch.ones(6)}
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            inner = sync.value_and_grad(lambda p: (p["a"] * p["b"]).sum())

            def loss_fn(p: Any) -> Tensor:
                value = (p["a"] * p["b"]).sum()
                _, grads = inner(params)
                whole = sync.all_gather(grads)
                return value * whole["b"].sum()

            gathering = sync.start_all_gather(sync.shard(params))
            _, grads = sync.value_and_grad(loss_fn)(gathering)
            return sync.all_gather(grads)["b"].tolist()  # type: ignore[no-any-return]

    expected = [15.0 * i for i in range(6)]
    assert fddp.loopback(2, run) == [expected, expected]


def test_a_dropped_gathering_is_finished_by_the_next_step() -> None:
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


def test_a_gathering_of_another_sync_is_awaited_first() -> None:
    def run(group: Any) -> None:
        params = mlp()
        with (
            fddp.GradSync(params, group=group, **SHARDS) as sharded,
            fddp.GradSync(params, group=group) as plain,
        ):
            gathering = sharded.start_all_gather(sharded.shard(params))
            _, found = plain.value_and_grad(mlp_loss)(gathering, batch(plain.rank, 0))
            _, expected = plain.value_and_grad(mlp_loss)(params, batch(plain.rank, 0))
            assert gathering.is_done
            assert same_bits([found, expected])

    fddp.loopback(2, run)


def test_virtual_ranks_share_one_gathering() -> None:
    def run(group: Any, ahead: bool) -> Any:
        params: Any = mlp()
        with fddp.GradSync(params, group=group, virtual_ranks=4, **SHARDS) as sync:
            step = sync.value_and_grad(mlp_loss)
            own = sync.shard(params)
            for number in range(2):
                batches = sync.virtual_batches(lambda v, number=number: batch(v, number))  # type: ignore[misc]
                _, grads = step(params, batches)
                own = descend(own, grads, 0.1)
                params = sync.start_all_gather(own) if ahead else sync.all_gather(own)
            return params.wait() if ahead else params

    plain = fddp.loopback(2, run, False)
    assert same_bits([*plain, *fddp.loopback(2, run, True)])


def test_leaves_in_no_bucket_are_there_at_once() -> None:
    def run(group: Any) -> None:
        params = {"w": torch.ones(4), "own": torch.full((3,), 1.0 + group.rank), "n": None}
        select = {"select": lambda path: path != "own"}
        with fddp.GradSync(params, group=group, **SHARDS, **select) as sync:
            gathering = sync.start_all_gather(sync.shard(params))
            step = sync.value_and_grad(lambda p: p["w"].sum() * p["own"].sum())
            loss, grads = step(gathering)
            assert loss == 12.0 * (1 + group.rank)
            assert grads["own"].tolist() == [4.0] * 3
            assert same_bits([gathering.wait(), params])

    fddp.loopback(2, run)


# Failures


def test_a_wrong_shard_on_one_rank_is_an_error_on_all() -> None:
    def run(group: Any) -> list[Ending]:
        params = mlp()
        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            own = sync.shard(params)
            wrong = (
                own if group.rank else {**own, "layer0": {"weight": torch.ones(1), "bias": None}}
            )
            step = sync.value_and_grad(mlp_loss)
            seen = []
            for read in (lambda g: g.wait(), lambda g: step(g, batch(0, 0))):
                gathering = sync.start_all_gather(wrong)
                seen += [ending(lambda g=gathering, r=read: r(g)), ending(gathering.wait)]  # type: ignore[misc]
            assert same_bits([sync.start_all_gather(own).wait(), params]), "it stays usable"
            return seen

    first, second = fddp.loopback(2, run)
    assert {seen.kinds[0] for seen in first} == {"TreeMismatchError"}
    assert all("rank 0 at step" in seen.text and "layer0.weight" in seen.text for seen in first)
    assert {seen.kinds[0] for seen in second} == {"PeerError"}
    assert all("rank 0" in seen.text for seen in second)


def test_an_error_in_the_loss_function_of_one_rank_reaches_all() -> None:
    def run(group: Any) -> tuple[Ending, Ending]:
        params = mlp()

        def loss_fn(p: Any, x: Tensor) -> Tensor:
            if group.rank == 1:
                raise BoomError(3, "before the first use")
            return mlp_loss(p, x)

        with fddp.GradSync(params, group=group, **SHARDS) as sync:
            gathering = sync.start_all_gather(sync.shard(params))
            step = sync.value_and_grad(loss_fn)
            seen = ending(lambda: step(gathering, batch(sync.rank, 0)))
            assert same_bits([gathering.wait(), params])
            again = ending(lambda: step(gathering, batch(sync.rank, 0)))
            return seen, again

    first, second = fddp.loopback(2, run)
    assert [seen.kinds[0] for seen in first] == ["PeerError"] * 2
    assert [seen.kinds[0] for seen in second] == ["BoomError"] * 2


def test_other_algorithms_have_no_shards() -> None:
    def run(group: Any) -> None:
        with (
            fddp.GradSync(mlp(), group=group) as sync,
            pytest.raises(ValueError, match=r"all_gather.* needs a GradSync whose schedule gives"),
        ):
            sync.start_all_gather(mlp())

    fddp.loopback(1, run)


def lose_a_rank(rank: int, world_size: int, transport: str, where: str) -> Any:
    """The last rank ends before or after it has started the all-gather of a step."""
    params: Any = mlp()
    sync = fddp.GradSync(params, transport=transport, timeout_s=10.0, **SHARDS)
    step = sync.value_and_grad(mlp_loss)
    own = sync.shard(params)
    step(sync.start_all_gather(own), batch(rank, 0))
    if rank == world_size - 1 and where == "before":
        os._exit(3)
    gathering = sync.start_all_gather(own)
    if rank == world_size - 1:
        os._exit(3)
    seen = ending(lambda: step(gathering, batch(rank, 1)))
    closed = ending(lambda: step(params, batch(rank, 1)))
    return seen, closed, ending(gathering.wait)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_lost_rank_is_named(transport: str, where: str) -> None:
    *others, lost = run_fresh(3, lose_a_rank, transport, where, timeout_s=60.0)
    assert lost.exitcode == 3
    for outcome in others:
        assert outcome.error is None, outcome.error
        seen, closed, waited = outcome.result
        assert seen.kinds[0] == "RankLostError", seen
        assert "rank 2" in seen.text
        assert closed.kinds[0] == "ClosedError"
        if where == "before":
            assert waited.kinds[0] == "RankLostError"
            assert "rank 2" in waited.text
