"""Countable costs of a step: collectives, bytes over the wire, bucket memory.

Counted where they leave fddp (what the transport is asked for, what torch's backend is handed) and
where they leave the process (what the kernel says that its TCP connections have carried).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fddp
from fddp import periodic
from fddp.hooks import bf16_compress, error_feedback, int4, int8
from fddp.sync.engine import Engine
from fddp.transport.c10d.communicator import Communicator
from fddp.transport.liveness.bounded_store import StoreClientThread
from fddp.transport.operation import Operation
from fddp.transport.torch_private import store_of
from tests.support.python_steps import only_python
from tests.support.ranks import RankPool
from tests.support.wire import Traffic, connections, traffic_since

STEPS = 5
WARM_UP = 3  # plans are rebuilt after the first step, and two sets of bucket memory are in use then
#: about 1 MiB of gradients in four buckets
CAPS = {"bucket_cap_mb": 0.3, "first_bucket_mb": 0.2}

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather_in_place",
    "all_gather",
    "all_to_all_in_place",
    "broadcast",
)


class Counts(NamedTuple):
    """Of `STEPS` steps on one rank."""

    transport: str
    buckets_bytes: list[int]
    asked: list[tuple[str, int]]  # kind and bytes of operations that the transport was asked for
    handed: list[tuple[str, int]]  # of those that torch's backend was handed
    recorded: list[tuple[str, int]]  # of those in the flight recorder
    traffic: Traffic  # but for the store's
    store_requests: int
    allocations: int  # of bucket memory


def _model(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    params = {f"w{i}": torch.randn(256, 256, dtype=dtype) / 16.0 for i in range(4)}

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for weight in params.values():
            x = torch.tanh(x @ weight)
        return x.float().square().mean()

    return params, loss_fn


@contextmanager
def _handed() -> Iterator[list[tuple[str, int]]]:
    """Record the tensors handed to torch's backends within the block."""
    noted: list[tuple[str, int]] = []
    issue = Communicator.issue

    def note(self: Communicator, operation: Operation) -> Any:
        noted.append((operation.kind, operation.tensor.nbytes))
        return issue(self, operation)

    Communicator.issue = note  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        Communicator.issue = issue  # type: ignore[method-assign]


def _store_port() -> int:
    assert dist.group.WORLD is not None
    store: Any = store_of(dist.group.WORLD)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return int(store.port)


def _count(engine: Engine, step: Callable[[], object]) -> Counts:
    transport, pool = engine.transport, engine._pool
    for _ in range(WARM_UP):
        step()
    asked: list[tuple[str, int]] = []
    made: list[int] = []
    allocate = pool._allocate

    def noting(kind: str) -> Callable[..., Any]:
        ask = getattr(transport, kind)

        def note(tensor: Tensor, *rest: Any, **options: Any) -> Any:
            asked.append((kind, tensor.nbytes))
            return ask(tensor, *rest, **options)

        return note

    def note_memory(numel: int, *rest: Any) -> Tensor:
        made.append(numel)
        return allocate(numel, *rest)

    for kind in COLLECTIVES:
        setattr(transport, kind, noting(kind))
    pool._allocate = note_memory
    port = _store_port()
    call = mock.patch.object(
        StoreClientThread, "call", autospec=True, side_effect=StoreClientThread.call
    )
    with _handed() as handed, call as requests:
        before = connections(except_port=port)
        for _ in range(STEPS):
            step()
        carried = traffic_since(before, except_port=port)
    dist.barrier()  # a rank that closes its groups closes connections of the others
    plan = engine.program.plan
    sizes = [bucket.numel * getattr(torch, bucket.dtype).itemsize for bucket in plan.buckets]
    ops = [op for op in fddp.flight(engine).logs[0].ops if op.step >= engine.step - STEPS]
    recorded = [(op.kind, op.nbytes) for op in ops]
    return Counts(
        transport.name, sizes, asked, handed, recorded, carried, requests.call_count, len(made)
    )


def _functional(
    rank: int, world_size: int, transport: Any, dtype: torch.dtype, compiled: bool = False
) -> Counts:
    params, loss_fn = _model(dtype)
    x = torch.randn(8, 256, dtype=dtype)
    # Only the interpreter in Python asks the transport object itself.
    interpreter = nullcontext() if compiled else only_python()
    with interpreter, fddp.GradSync(params, transport=transport, **CAPS) as sync:
        synced_fn = sync.value_and_grad(loss_fn)
        grads: Any = None

        def step() -> None:
            nonlocal grads
            _, grads = synced_fn(params, x)

        return _count(sync._engine, step)


def _wrapped(rank: int, world_size: int, view: bool) -> Counts:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
    module = nn.Sequential(*layers)
    wrapped = fddp.DistributedDataParallel(
        module, bucket_cap_mb_list=[0.2, 0.3], gradient_as_bucket_view=view
    )
    x = torch.randn(8, 256)

    def step() -> None:
        module.zero_grad()
        wrapped(x).square().mean().backward()

    return _count(wrapped.steps.engine, step)


def _of(ranks: RankPool, world_size: int, fn: Callable[..., Counts], *args: Any) -> Counts:
    counts = ranks.run(world_size, fn, *args)
    if "shm" in args and counts[0].transport != "shm":
        pytest.skip("ranks can't share memory here")
    for each in counts:
        assert each.asked == counts[0].asked  # what one rank issues, all do
        if each.transport == "shm":
            # Not `received`: a rank that is done sends at its barrier while others still count.
            assert each.traffic.sent == each.store_requests == 0
    return counts[0]  # type: ignore[no-any-return]


def _payload(counts: Counts) -> int:
    return sum(nbytes for _, nbytes in counts.asked)


@pytest.mark.parametrize(
    ("world_size", "transport", "dtype"),
    [
        (2, "c10d", torch.float32),
        (3, "c10d", torch.float32),
        (2, "shm", torch.float32),
        (2, "c10d", torch.bfloat16),
        (2, "shm", torch.bfloat16),
    ],
)
def test_a_step_is_one_all_reduce_for_each_bucket(
    ranks: RankPool, world_size: int, transport: str, dtype: torch.dtype
) -> None:
    """Gloo carries the gradients and little else, and shared memory uses no sockets."""
    counts = _of(ranks, world_size, _functional, transport, dtype)
    own_word = dtype == torch.bfloat16
    assert counts.transport == transport
    assert len(counts.buckets_bytes) >= 3 - own_word
    assert {kind for kind, _ in counts.asked} == {"all_reduce"}
    # The control word rides behind the last bucket, unless it cannot be piggybacked; nothing else
    # comes on top of the gradients.
    assert len(counts.asked) == STEPS * (own_word + len(counts.buckets_bytes))
    words = _payload(counts) / STEPS - sum(counts.buckets_bytes)
    assert 0 < words < 1024
    assert not own_word or counts.asked[-1][1] < 1024
    assert counts.handed == (counts.asked if transport == "c10d" else [])
    if transport == "c10d" and not own_word:
        least = _payload(counts) * 2 * (world_size - 1) / world_size
        # Each of gloo's messages has a header.
        assert 0.99 * least <= counts.traffic.sent <= 1.02 * least
        assert 0.99 * least <= counts.traffic.received <= 1.02 * least


def _quantized(rank: int, world_size: int) -> Counts:
    grads = {f"w{i}": torch.randn(256, 256) for i in range(4)}
    with fddp.GradSync(grads, transport="c10d", hook=fddp.hooks.int8(), **CAPS) as sync:
        return _count(sync._engine, lambda: sync(grads))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_quantized_steps_carry_a_quarter_over_gloo(ranks: RankPool, world_size: int) -> None:
    counts = ranks.run(world_size, _quantized)
    all_reduce = STEPS * sum(counts[0].buckets_bytes) * 2 * (world_size - 1) / world_size
    for each in counts:
        assert each.traffic.sent <= 0.27 * all_reduce
        assert each.traffic.received <= 0.27 * all_reduce


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_compiled_steps_issue_the_same(ranks: RankPool, transport: str, dtype: torch.dtype) -> None:
    python = _of(ranks, 2, _functional, transport, dtype)
    compiled = _of(ranks, 2, _functional, transport, dtype, True)
    assert compiled.recorded == python.recorded
    assert compiled.handed == python.handed
    assert len(compiled.recorded) == len(python.asked)
    assert compiled.allocations == python.allocations == 0
    assert abs(compiled.traffic.sent - python.traffic.sent) <= 0.02 * python.traffic.sent


@pytest.mark.parametrize("view", [False, True])
def test_a_wrapped_step_issues_the_same(ranks: RankPool, view: bool) -> None:
    counts = _of(ranks, 2, _wrapped, view)
    assert len(counts.buckets_bytes) >= 3
    assert len(counts.asked) == STEPS * len(counts.buckets_bytes)
    # A bucket gets its second memory where the transport's thread still refers to the first.
    assert counts.allocations <= len(counts.buckets_bytes)
    if counts.transport == "shm":
        assert counts.handed == []


class VirtualCounts(NamedTuple):
    """Of a step over virtual ranks on one rank."""

    nbytes: int  # that it sends
    sent: int  # partial sums that it sends
    left: int  # sums of its host of two ranks that are left
    whole: int  # bytes of the buckets


def _over_virtual_ranks(rank: int, world_size: int, count: int, **options: Any) -> VirtualCounts:
    params, loss_fn = _model()
    x = torch.randn(8, 256)
    options |= {"transport": "c10d", **CAPS}
    with fddp.GradSync(params, virtual_ranks=count, **options) as sync:
        step, batches = sync.value_and_grad(loss_fn), sync.virtual_batches(lambda _: x)
        counts = _count(sync._engine, lambda: step(params, batches))
        virtual = sync.schedule.virtual
        assert virtual is not None
        left = len(virtual.roots(2)[rank // 2]) if options.get("mesh") else 0
        sizes = sum(counts.buckets_bytes)
        return VirtualCounts(counts.traffic.sent // STEPS, virtual.sent[rank], left, sizes)


def _over_virtual_ranks_of_hosts(rank: int, world_size: int, count: int) -> VirtualCounts:
    mesh = fddp.Topology(host=2, local=2)
    return _over_virtual_ranks(rank, world_size, count, mesh=mesh, algorithm="hierarchical")


@pytest.mark.parametrize(("count", "sums"), [(2, (1, 1)), (8, (1, 1)), (3, (1, 2)), (7, (2, 2))])
def test_ranks_send_their_partial_sums(ranks: RankPool, count: int, sums: tuple[int, int]) -> None:
    """The other rank's shard of each, and the sum of its own shard; not the rows that pad."""
    found = ranks.run(2, _over_virtual_ranks, count)
    assert tuple(counts.sent for counts in found) == sums
    for nbytes, sent, _, whole in found:
        assert 0.99 <= nbytes / (whole / 2 * (1 + sent)) <= 1.03


@pytest.mark.parametrize(("count", "sums"), [(4, (1, 1)), (5, (1, 2)), (10, (2, 3)), (16, (1, 1))])
def test_ranks_of_hosts_send_what_is_left(
    ranks: RankPool, count: int, sums: tuple[int, int]
) -> None:
    """Within a host half of the rank's sums, and half of the mean; across hosts a quarter of those
    that are left of the host's, and a quarter of the mean."""
    found = ranks.run(4, _over_virtual_ranks_of_hosts, count)
    assert tuple(counts.left for counts in found) == (sums[0], sums[0], sums[1], sums[1])
    for nbytes, sent, left, whole in found:
        assert 0.99 <= nbytes / (whole * ((sent + 1) / 2 + (left + 1) / 4)) <= 1.03


def _periodic(rank: int, world_size: int, period: int, hook: Any) -> tuple[int, int]:
    """Bytes sent in ten periods, and the bytes of the parameters."""
    params, _ = _model()
    schedule, outer = periodic.diloco(params, period), periodic.sgd()
    options = {"outer": outer, "hook": hook, "transport": "c10d"}
    with periodic.PeriodicSync(params, schedule, **options) as sync:
        state = sync.init(params)
        for _ in range(3 * period):
            params, state = sync.step(params, state)
        dist.barrier()
        before = connections(except_port=_store_port())
        for _ in range(10 * period):
            params, state = sync.step(params, state)
        sent = traffic_since(before, except_port=_store_port()).sent
        dist.barrier()  # before any rank closes its group
        return sent, sum(fragment.nbytes for fragment in schedule.fragments)


@pytest.mark.parametrize(
    ("hook", "share"),
    [
        (None, 1.0),
        (bf16_compress, 1 / 2),
        (error_feedback(int8()), 1.02 / 4),
        (int4(128), 1.07 / 8),
    ],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_outer_gradients_are_sent_once_in_a_period(
    ranks: RankPool, hook: Any, share: float
) -> None:
    """Compared with an all-reduce of float32 in every step."""
    period = 7
    for sent, nbytes in ranks.run(2, _periodic, period, hook):
        assert 0.97 * share * nbytes <= sent / 10 <= 1.03 * share * nbytes
