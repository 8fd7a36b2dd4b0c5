"""Communicators of the operators: lifetimes, and operators beside what else communicates."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

import fddp
from fddp.collectives import communicator as communicators
from fddp.collectives.communicator import communicator_by_id, communicator_of
from tests.support.groups import rank_of
from tests.support.models import rand
from tests.support.on_ranks import on_processes, on_threads
from tests.support.polling import soon

ONE = torch.ones(2)


@pytest.mark.slow
@on_threads(2)
def test_a_group_has_one_communicator(group: Any) -> None:
    fddp.psum(ONE, group)
    own = communicator_of(group, None)
    fddp.pmean([ONE], group)
    assert communicator_of(group, None) is own
    assert communicator_by_id(own.number) is own
    assert (own.rank, own.world_size) == (rank_of(group), 2)
    with fddp.Communicator(group, timeout_s=30.0) as other:
        assert other.number != own.number
        assert other.transport.timeout_s == 30.0
        assert repr(other) == f"Communicator(rank {own.rank} of 2, {other.transport.name})"
        # Operators on two communicators do not mix, whatever their order on each rank.
        order = (own, other) if own.rank else (other, own)
        works = [threading.Thread(target=fddp.psum, args=(ONE, ranks)) for ranks in order]
        for work in works:
            work.start()
        for work in works:
            work.join()
    number = other.number
    del other, order, works
    gc.collect()
    with pytest.raises(fddp.ClosedError, match=f"communicator {number} of this process is gone"):
        communicator_by_id(number)
    # One that a failure has closed is opened anew.
    own.transport.close()
    dist_barrier(group)
    assert fddp.psum(ONE, group).tolist() == [2.0, 2.0]
    assert communicator_of(group, None) is not own


def dist_barrier(group: Any) -> None:
    """Over another communicator."""
    fddp.broadcast(ONE, group=group)


@on_processes(2)
def test_communicators_go_with_their_groups(rank: int, n: int) -> None:
    part = dist.new_group([0, 1])
    fddp.psum(ONE, part)
    fddp.psum(ONE)
    kept = weakref.ref(communicator_of(part, None))
    transport = communicator_of(part, None).transport
    known = len(communicators._of_groups._made)
    alone = dist.new_group([0, 1])
    fddp.psum(ONE, alone)
    released, gone = communicator_of(alone, None).transport, weakref.ref(alone)
    dist.destroy_process_group(alone)
    del alone
    gc.collect()
    assert gone() is None
    assert soon(lambda: released.closed_by)
    # torch keeps groups that it has destroyed, here and there.
    dist.destroy_process_group(part)
    if rank == 0:
        held = part
        assert held is part
    else:
        del part
    fddp.psum(ONE, dist.new_group([0, 1]))
    gc.collect()
    assert soon(lambda: kept() is None)
    assert soon(lambda: transport.closed_by)
    assert len(communicators._of_groups._made) == known


@on_processes(2)
def test_communicators_that_are_dropped(rank: int, n: int) -> None:
    fddp.psum(ONE)
    transports = []
    for _ in range(3):
        ranks = fddp.Communicator()
        fddp.psum(ONE, ranks)
        transports.append(ranks.transport)
        del ranks
    gc.collect()
    assert soon(lambda: all(transport.closed_by for transport in transports))


@pytest.mark.slow
def test_groups_of_loopback_leave_nothing() -> None:
    before = len(communicators._of_groups._made)
    fddp.loopback(3, lambda group: fddp.psum(ONE, group))
    gc.collect()
    assert len(communicators._of_groups._made) == before


@on_threads(1)
def test_call_sites_are_the_callers(group: Any) -> None:
    fddp.psum(ONE, group)
    grad(lambda x: fddp.pmean({"x": x}, group)["x"].sum())(ONE)
    sites = communicator_of(group, None).calls.by_site
    assert sorted(code.co_filename for code, _ in sites) == [__file__, __file__]


@on_threads(2)
def test_many_trees_at_one_place(group: Any) -> None:
    """Different trees at one call site, whose cached program must not be reused."""
    rank = rank_of(group)
    trees: list[Any] = [
        ONE,
        {"a": ONE},
        [ONE, None],
        [None, ONE],
        [ONE, ONE.double()],
        [ONE, ONE[:1]],
    ]
    trees += [{"a": ONE, "b": torch.ones(2, dtype=torch.int64)}, {"b": ONE, "a": ONE}, (ONE,), []]
    for _ in range(3):
        for tree in trees:
            own = fddp.tree_map(lambda x: x * (1 + rank), tree)
            found = fddp.psum(own, group)
            assert fddp.tree.pytree.flatten(found)[1] == fddp.tree.pytree.flatten(tree)[1]
            for x, y in zip(
                fddp.tree.pytree.flatten(found)[0], fddp.tree.pytree.flatten(tree)[0], strict=True
            ):
                assert (x is None) == (y is None)
                if x is not None:
                    assert x.dtype == y.dtype
                    assert torch.equal(x, 3 * y)


@on_processes(2)
def test_a_graph_on_one_rank_and_none_on_the_other(rank: int, n: int) -> None:
    """Calls are numbered alike in both, so that the ranks stay in step."""

    def step(x: Tensor) -> Tensor:
        return grad(lambda x: (fddp.sync_on_backward(x) * fddp.pmean(x) ** 2).sum())(x)

    x = ONE * (1 + rank)
    graph = make_fx(step)(x)  # which communicates, as all tracing with real tensors does
    wanted = step(x)
    for which in ((graph, step), (step, step), (step, graph), (graph, graph), (step, step)):
        torch.testing.assert_close(which[rank](x), wanted)


@on_threads(2)
def test_an_operator_in_the_loss_of_a_sync(group: Any) -> None:
    """With backward overlapped with buckets: the operator runs in the midst of them."""
    rank = rank_of(group)
    names = [f"w{k}" for k in range(8)]
    params = {name: rand(16, 16, seed=k, dtype=torch.float64) / 16 for k, name in enumerate(names)}
    x = rand(4, 16, seed=100 + rank, dtype=torch.float64)

    def loss_fn(params: dict[str, Tensor], x: Tensor, means: Any) -> Tensor:
        for k, name in enumerate(names):
            x = torch.tanh(x @ params[name])
            if k % 3 == 1:
                x = x - means(x.mean(0))  # normalised over all ranks' rows
        return (x**2).mean()

    with fddp.GradSync(params, group=group, bucket_cap_mb=0.003, first_bucket_mb=0.003) as sync:
        assert len(sync.plan.buckets) >= 4
        step = sync.value_and_grad(loss_fn, with_info=True)
        for _ in range(4):
            _, grads, info = step(params, x, lambda m: fddp.pmean(m, group))
        # Backward is not taken for one that may do anything: buckets leave in its midst.
        assert info.repaired == ()
        launches = [event for event in info.trace.events if getattr(event, "kind", "") == "launch"]
        first = info.trace.events.index(launches[0])
        assert first < len(info.trace.events) - len(launches) - 1

    # One process: all ranks' rows together.
    rows = torch.cat([rand(4, 16, seed=100 + r, dtype=torch.float64) for r in range(2)])

    def whole(params: dict[str, Tensor]) -> Tensor:
        return loss_fn(params, rows, lambda m: m)

    wanted = grad(whole)(params)
    for name in names:
        torch.testing.assert_close(grads[name], wanted[name], rtol=1e-10, atol=1e-12)


@on_threads(2)
def test_an_operator_in_a_hook(group: Any) -> None:
    """A hook may call operators: all ranks run hooks in one order."""
    rank = rank_of(group)
    grads = {"a": torch.full((3,), 1.0 + rank), "b": torch.full((2,), 10.0 * rank)}
    with (
        fddp.Communicator(group) as ranks,
        fddp.GradSync(grads, group=group, hook=Summing(ranks), bucket_cap_mb=[1e-6]) as sync,
    ):
        assert len(sync.plan.buckets) == 2
        found = sync(grads)
    assert found["a"].tolist() == [1.5] * 3
    assert found["b"].tolist() == [5.0] * 2


@dataclass(frozen=True)
class Summing(fddp.hooks.Hook[tuple[()]]):
    """Sums by an operator; its own all-reduce carries nothing that counts."""

    ranks: fddp.Communicator

    @property
    def name(self) -> str:
        return "Summing()"

    def init(self, spec: Any) -> tuple[()]:
        return ()

    def apply(self, state: tuple[()], bucket: Any, all_reduce: Any) -> Any:
        total = fddp.psum(bucket.buffer, self.ranks)
        return all_reduce(torch.zeros(1)).map(lambda _: (total, state))
