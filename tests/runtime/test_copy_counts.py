"""Allocations, copies, page faults and Python objects of a step. No times."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fddp
from fddp.native.buffer_pool import BufferPool
from fddp.runtime.step import Step
from fddp.transport import Transport
from fddp.transport.loopback import LoopbackTransport

LAYERS, WIDTH = 6, 64
WARM_UP, STEPS = 4, 5


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the buckets that were asked of the transport."""
    sizes: list[int] = []
    for transport in (Transport, LoopbackTransport):
        empty = transport.empty

        def counting(self: Any, numel: int, *args: Any, empty: Any = empty) -> Tensor:
            sizes.append(numel)
            return empty(self, numel, *args)  # type: ignore[no-any-return]

        monkeypatch.setattr(transport, "empty", counting)
    return sizes


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def functional(group: Any, **options: Any) -> Iterator[Any]:
    """Steps as a loop takes them: gradients are held until the next step has returned."""
    apply, params, buffers = fddp.functionalize(model())
    x = torch.randn(4, WIDTH)
    with fddp.GradSync(
        params, group=group, bucket_cap_mb=0.03, first_bucket_mb=0.01, **options
    ) as sync:
        step = sync.value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())
        while True:
            _, grads = step(params)
            yield sync, grads


def dropped(group: Any) -> Iterator[Any]:
    for sync, grads in functional(group):
        sync.donate(grads)
        yield sync


def cast(group: Any) -> Iterator[Any]:
    params = {f"w{i}": torch.ones(1000, dtype=torch.bfloat16) for i in range(3)}
    with fddp.GradSync(params, group=group, reduce_dtype=torch.float32) as sync:
        grads: Any = None
        while True:
            grads = sync(params)
            yield grads


def sharded(group: Any) -> Iterator[Any]:
    params = {f"w{i}": torch.ones(1000) for i in range(3)}
    with fddp.GradSync(params, group=group, algorithm="reduce_scatter") as sync:
        shards: Any = None
        while True:
            shards = sync.reduce_scatter(params)
            yield shards


def wrapped(
    group: Any, *, view: bool = False, none: bool = True, zero: bool = True
) -> Iterator[Any]:
    module = model()
    ddp = fddp.DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=0.03, gradient_as_bucket_view=view
    )
    x = torch.randn(4, WIDTH)
    while True:
        if zero:
            module.zero_grad(set_to_none=none)
        ddp(x).square().mean().backward()
        yield module


LOOPS: dict[str, tuple[Callable[[Any], Iterator[Any]], int]] = {
    # with the number of sets of buckets that take turns
    "functional": (functional, 2),
    "donated": (dropped, 1),
    "cast": (cast, 1),
    "sharded": (sharded, 1),
    "wrapper": (wrapped, 1),
    "wrapper, views": (lambda group: wrapped(group, view=True), 1),
    "wrapper, views, kept": (lambda group: wrapped(group, view=True, none=False), 1),
    "wrapper, views, accumulated": (lambda group: wrapped(group, view=True, zero=False), 1),
    "wrapper, kept": (lambda group: wrapped(group, none=False), 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_no_memory_is_made_after_the_first_steps(
    name: str, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, sets = LOOPS[name]
    addresses: dict[Any, set[int]] = {}
    acquire, reclaim = BufferPool.acquire, BufferPool.reclaim

    def noting(self: BufferPool, key: Any, *args: Any, **options: Any) -> Tensor:
        buffer = acquire(self, key, *args, **options)
        addresses.setdefault(key, set()).add(buffer.data_ptr())
        return buffer

    def keeping(self: BufferPool, *args: Any) -> Tensor | None:
        buffer = reclaim(self, *args)
        if buffer is not None:
            addresses.setdefault(args[0], set()).add(buffer.data_ptr())
        return buffer

    def run(group: Any) -> None:
        steps = loop(group)
        held = [next(steps) for _ in range(WARM_UP)][-1:]
        made.clear()
        addresses.clear()
        for _ in range(STEPS):
            held = [next(steps)]
        assert held
        steps.close()

    monkeypatch.setattr(BufferPool, "acquire", noting)
    monkeypatch.setattr(BufferPool, "reclaim", keeping)
    fddp.loopback(1, run)
    assert made == [], "of the transport"
    buckets = {key: found for key, found in addresses.items() if isinstance(key, int)}
    assert buckets
    assert {len(found) for found in buckets.values()} == {sets}
    casts = [found for key, found in addresses.items() if not isinstance(key, int)]
    assert all(len(found) <= 2 for found in casts)


def test_an_element_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into its bucket. Results are what was reduced there: nothing is written after that."""
    written: list[str] = []
    for module, name in (
        ("fddp.runtime.contributions", "pack_"),
        ("fddp.runtime.contributions", "pack_add_"),
        ("fddp.runtime.results", "pack_"),
        ("fddp.runtime.results", "scale_"),
        ("fddp.runtime.results", "unpack_"),
    ):
        monkeypatch.setattr(f"{module}.{name}", lambda *_, name=name, **__: written.append(name))
    packed: list[int] = []
    new_memory = Step.new_memory

    def run(group: Any) -> None:
        buffers: dict[int, Tensor] = {}

        def noting(self: Step, bucket: int) -> Tensor:
            buffer = buffers[bucket] = new_memory(self, bucket)
            return buffer

        monkeypatch.setattr(Step, "new_memory", noting)
        steps = functional(group)
        for _ in range(WARM_UP):
            sync, grads = next(steps)
        for bucket, spec in enumerate(sync.plan.buckets):
            start = buffers[bucket].data_ptr()
            for leaf, offset in zip(spec.leaves, spec.offsets, strict=True):
                grad = grads[sync.plan.paths[leaf]]
                packed.append(grad.numel())
                assert grad.data_ptr() == start + 4 * offset
        steps.close()

    fddp.loopback(1, run)
    assert written == []
    assert sum(packed) == LAYERS * (WIDTH + 1) * WIDTH


@pytest.mark.skipif(sys.platform != "linux", reason="counts faults of a thread")
def test_usual_loop_allocates_no_pages() -> None:
    nbytes = 32 << 20
    grads = {f"w{i}": torch.ones(nbytes // 32) for i in range(8)}

    def run(group: Any) -> int:
        with fddp.GradSync(grads, group=group, bucket_cap_mb=8) as sync:
            results = [sync(grads) for _ in range(WARM_UP)][-1:]
            start = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            for _ in range(STEPS):
                results = [sync(grads)]
            assert results
            return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - start

    (faults,) = fddp.loopback(1, run)
    assert faults < 0.05 * STEPS * nbytes / resource.getpagesize()


def test_packing_makes_no_python_tensors_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost an object, and a share of a garbage collection."""
    taken: list[int] = []
    monkeypatch.setattr(
        "fddp.runtime.contributions.BackwardContributions.sources",
        lambda _, program, bucket, **options: taken.append(bucket) or [],
    )

    def run(group: Any) -> None:
        for loop in (functional(group), wrapped(group)):
            for _ in range(3):
                next(loop)
            loop.close()

    fddp.loopback(1, run)
    assert taken == []
