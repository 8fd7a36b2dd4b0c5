"""Steps that are captured in a graph, whose replays give the bits of the same steps run eagerly."""

from __future__ import annotations

import itertools
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fddp
from fddp.tree.pytree import flatten, map_leaves
from tests.lag.rank import CAP, SMALL, Rank, gradients, mean_square, module
from tests.support.endings import Ending, ending
from tests.support.models import batch, mlp, mlp_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_numbers = itertools.count(100)


def own_stream(rank: Rank) -> torch.Stream:
    """A stream that is not also one of a backend, which torch lends a second time."""
    stream = torch.Stream(device=rank.device)
    if rank.device.type != "lag":
        return stream
    return torch.Stream(
        stream_id=next(_numbers), device_index=0, device_type=int(stream.device_type)
    )


@contextmanager
def capture(rank: Rank) -> Iterator[torch.accelerator.Graph]:
    """Capture what is issued in the block, on the current stream or in place of the default one."""
    graph, stream = torch.accelerator.Graph(), torch.accelerator.current_stream()
    torch.accelerator.synchronize()
    with own_stream(rank) if stream.stream_id == 0 else stream:
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


def on_host(tree: Any) -> list[Tensor]:
    """Copies of the leaves."""
    leaves: list[Tensor] = flatten(map_leaves(lambda leaf: leaf.cpu().clone(), tree))[0]
    return leaves


def check_equal(own: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, own, expected)), [own, expected]


def others(rank: Rank) -> list[Tensor]:
    """Tensors of the sizes of buckets, in memory that is free."""
    shapes = [(64,), (72,)] * 8
    return [torch.full(shape, 7.0, device=rank.device, dtype=torch.float64) for shape in shapes]


def check_replays(
    rank: Rank, sync: fddp.GradSync, step: Callable[[Tensor], Any], x: Tensor
) -> None:
    """Capture a step of an input, and replay it with other ones between eager steps, whose results
    last. Of the captured step only products of the results are kept."""
    for number in range(2):
        step(rank.put(batch(rank.number, number)))
    with capture(rank) as graph:
        results = step(x)
        doubled = map_leaves(lambda leaf: leaf * 2, results)
        del results
    sync.check()
    for number in range(2):
        # As many as there may be buffers in the pool.
        eager = [step(rank.put(batch(rank.number, number + k))) for k in range(2)]
        free = others(rank)
        before = on_host([eager, free])
        x.copy_(rank.put(batch(rank.number, number + 1)))
        graph.replay()
        again = step(x)
        check_equal([leaf / 2 for leaf in on_host(doubled)], on_host(again))
        check_equal(on_host([eager, free]), before)
        del eager, again, free  # so that later steps take their memory


def captured(rank: Rank) -> None:
    """Steps of a loss function, and of gradients, which are started and awaited."""
    params, x = rank.put(mlp(layers=2)), rank.put(batch(rank.number, 0))
    grad = torch.func.grad(mlp_loss)
    with fddp.GradSync(params, group=rank.group, report="next", **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        check_replays(rank, sync, lambda x: step(params, x)[1], x)
        check_replays(rank, sync, lambda x: sync.start(grad(params, x)).wait(), x)


def captured_in_other_ways(rank: Rank) -> None:
    """Chains of collectives, and results in memory of their own."""
    params = map_leaves(Tensor.float, rank.put(mlp(layers=2)))
    x = rank.put(batch(rank.number, 0))
    ways: list[dict[str, Any]] = [{"reduce_dtype": torch.float64}, {"deterministic": True}]
    for options in ways:
        own: dict[str, Any] = {"group": rank.group, "report": "next", **options, **SMALL}
        with fddp.GradSync(params, **own) as sync:
            step = sync.value_and_grad(mlp_loss)
            check_replays(rank, sync, lambda x, step=step: step(params, x.float())[1], x)  # type: ignore[misc]


def captured_after_a_rebuild(rank: Rank) -> None:
    """The first step of a rebuilt one, which has connected its ranks."""
    grads = rank.put(mlp())
    before = fddp.GradSync(grads, group=rank.group, report="next", **SMALL)
    for _ in range(2):
        before(grads)
    with before.rebuild(rank.group) as sync:
        with capture(rank) as graph:
            results = sync(grads)
        grads["layer1"]["bias"].fill_(1.0 + rank.number)
        graph.replay()
        check_equal(on_host(results), on_host(sync(grads)))


def captured_skips(rank: Rank) -> None:
    """Zeros and a flag for a NaN of one rank, in replays with and without one."""
    grads = rank.put(mlp())
    own: dict[str, Any] = {"group": rank.group, "report": "next", "nonfinite": "skip", **SMALL}
    with fddp.GradSync(grads, **own) as sync:
        sync(grads)
        with capture(rank) as graph:
            results = sync(grads)
        flag = sync.found_inf
        assert flag is not None
        sync.check()
        for is_bad in (True, False, True):
            spoiled = is_bad and rank.number == 1
            grads["layer1"]["bias"].fill_(float("nan") if spoiled else 1.0)
            graph.replay()
            again = sync(grads)
            check_equal(on_host([results, flag]), on_host([again, sync.found_inf]))
            assert flag.item() == is_bad
            assert (results["layer1"]["weight"].count_nonzero() == 0).item() == is_bad


def captured_shards(rank: Rank) -> None:
    """A reduce-scatter and an all-gather in one graph."""
    params, x = rank.put(mlp(layers=2)), rank.put(batch(rank.number, 0))
    grad = torch.func.grad(mlp_loss)
    own: dict[str, Any] = {"group": rank.group, "report": "next", **SMALL}
    with fddp.GradSync(params, algorithm="reduce_scatter", **own) as sync:
        check_replays(
            rank, sync, lambda x: sync.all_gather(sync.reduce_scatter(grad(params, x))), x
        )


def captured_operators(rank: Rank) -> None:
    """Collectives with their derivatives, which connect ranks at the first call."""
    group = dist.new_group(backend="lag:nccl")
    x = rank.put(batch(rank.number, 0))

    def mean_of_square(x: Tensor) -> Tensor:
        return fddp.pmean(x**2, group).sum()

    def call(x: Tensor) -> list[Tensor]:
        grad = torch.func.grad(mean_of_square)(x)
        return [grad, fddp.all_gather(x * 2, group), fddp.broadcast(x * 3, group=group)]

    with capture(rank):
        found = ending(lambda: call(x))
    assert found.kinds[0] == "TransformError", found
    assert "call it once before the capture" in found.text, found
    call(x)
    with capture(rank) as graph:
        results = call(x)
    for number in range(3):
        x.copy_(rank.put(batch(rank.number, number)))
        graph.replay()
        check_equal(on_host(call(x)), on_host(results))


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    mean_square(ddp, x).backward()
    optimizer.step()


def captured_module(rank: Rank) -> None:
    """Iterations of a wrapped module with buffers, and of its optimizer, beside eager ones, on one
    stream: gradients are accumulated on that of the constructor, and the default is not captured.
    """
    with own_stream(rank):
        for as_view in (False, True):
            check_module(rank, gradient_as_bucket_view=as_view)


def check_module(rank: Rank, **options: Any) -> None:
    options |= {"process_group": rank.group, "bucket_cap_mb": CAP, "report": "next"}
    nets = [module(rank.device) for _ in range(2)]
    ddps = [fddp.DistributedDataParallel(net, **options) for net in nets]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    x = rank.put(batch(rank.number, 0))
    for ddp, optimizer in zip(ddps, optimizers, strict=True):
        ddp.keep_sync_info()  # of all steps but the captured one
        for number in range(2):
            train(ddp, optimizer, rank.put(batch(rank.number, number)))
    optimizers[0].zero_grad()
    with capture(rank) as graph:
        train(ddps[0], optimizers[0], x)
    means = gradients(nets[0])
    for number in range(2, 4):
        x.copy_(rank.put(batch(rank.number, number)))
        graph.replay()
        train(ddps[1], optimizers[1], x)
        check_equal(on_host(nets[0].state_dict()), on_host(nets[1].state_dict()))
        check_equal(on_host(means), on_host(gradients(nets[1])))
    del means
    optimizers[0].zero_grad()  # leaves the gradients to the graph alone
    free = others(rank)
    before = on_host(free)
    graph.replay()
    train(ddps[1], optimizers[1], x)
    check_equal(on_host(nets[0].state_dict()), on_host(nets[1].state_dict()))
    check_equal(on_host(free), before)
    for ddp in ddps:
        ddp.check()


def refused(rank: Rank) -> None:
    """Steps that can't be captured: an error on all ranks, with nothing in the graph."""
    with own_stream(rank):  # also that of earlier steps
        check_refused(rank)


def check_refused(rank: Rank) -> None:
    params, x = rank.put(mlp()), rank.put(batch(rank.number, 0))
    grads = rank.put(mlp())

    def attempt(call: Callable[[], object], *, captures: bool = True) -> Ending:
        if not captures:
            return ending(call)
        with capture(rank):
            return ending(call)

    def check(found: Ending, kind: str, text: str) -> None:
        assert found.kinds[0] == kind, found
        assert text in found.text, found

    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        for _ in range(2):
            check(attempt(lambda: step(params, x)), "TransformError", "pass report='next'")
            check(attempt(lambda: sync.start(grads)), "TransformError", "pass report='next'")
            expected = on_host(step(params, x)[1])
        # Ranks that capture nothing do not wait for the one that does.
        found = attempt(lambda: step(params, x), captures=rank.number == 1)
        check(found, ("PeerError", "TransformError")[rank.number], "pass report='next'")
        check_equal(on_host(step(params, x)[1]), expected)
        handle = sync.start(grads)
        check(attempt(handle.wait), "TransformError", "call wait() where start() was called")
        check_equal(on_host(handle.wait()), on_host(grads))
    with fddp.GradSync(params, group=rank.group, report="next", **SMALL) as sync:
        check(attempt(lambda: sync(grads)), "TransformError", "take one before the capture")
        check(ending(sync.check), "PeerError", "take one before the capture")
        check_equal(on_host(sync(grads)), on_host(grads))
        informed = sync.value_and_grad(mlp_loss, with_info=True)
        check(attempt(lambda: informed(params, x)), "TransformError", "with_info=True")
        check(ending(sync.check), "PeerError", "with_info=True")
    own: dict[str, Any] = {"group": rank.group, "report": "next", "nonfinite": "raise", **SMALL}
    with fddp.GradSync(params, **own) as sync:
        sync(grads)
        for _ in range(2):
            check(attempt(lambda: sync(grads)), "TransformError", "nonfinite='raise'")
            check(ending(sync.check), "PeerError", "nonfinite='raise'")
            check_equal(on_host(sync(grads)), on_host(grads))
    table, index = rank.put(torch.ones(10, 3).double()), rank.put(torch.tensor([1, 4]))
    with fddp.GradSync({"table": table}, sparse=["table"], group=rank.group, report="next") as sync:
        of_rows = sync.value_and_grad(rows_loss)
        of_rows({"table": table}, index)
        found = attempt(lambda: of_rows({"table": table}, index))
        check(found, "TransformError", "make them dense")
        check(ending(sync.check), "PeerError", "make them dense")
    with fddp.GradSync(params, group=rank.group, report="next") as sync:
        sync(grads)
        transport = sync._engine.transport
        assert transport.orders_by_streams([rank.device.type])
        assert not transport.orders_by_streams(["cpu"])
        with mock.patch.object(type(transport), "orders_by_streams", return_value=False):
            check(attempt(lambda: sync(grads)), "TransformError", "the host carries out")
        check(ending(sync.check), "PeerError", "the host carries out")
    mixed = {"here": rank.put(torch.ones(3)), "there": torch.ones(3)}
    for policy in ("propagate", "skip"):
        own = {"group": rank.group, "report": "next", "nonfinite": policy}
        with fddp.GradSync(mixed, **own) as sync:
            sync(mixed)
            check(attempt(lambda: sync(mixed)), "TransformError", "leaves on the CPU")
            check(ending(sync.check), "PeerError", "leaves on the CPU")
            check_equal(on_host(sync(mixed)), on_host(mixed))


def interrupted(rank: Rank) -> None:
    """Reports and steps that a capture comes in between: an error on all ranks, and no hang."""
    params, x = rank.put(mlp()), rank.put(batch(rank.number, 0))
    grads, own = rank.put(mlp()), {"group": rank.group, "report": "next", **SMALL}
    with fddp.GradSync(params, nonfinite="raise", **own) as sync:
        sync(grads)
        with capture(rank):
            found = ending(sync.check)
        assert found.kinds[0] == "TransformError", found
        assert "call check() before the capture" in found.text, found
        sync.check()
        check_equal(on_host(sync(grads)), on_host(grads))
    sync = fddp.GradSync(params, **own)
    sync(grads)
    handles = []
    with suppress(RuntimeError), capture(rank):  # has work that was not joined
        handles.append(sync.start(grads))
    found = ending(handles[0].wait)
    assert found.kinds[0] == "TransformError", found
    assert "end a step in the capture in which it began" in found.text, found
    assert ending(lambda: sync(grads)).kinds[0] == "ClosedError"
    sync = sync.rebuild(rank.group)
    check_equal(on_host(sync(grads)), on_host(grads))
    sync.close()
    # A backward pass that was aborted on one rank, before a forward pass that is captured.
    net = module(rank.device)
    with own_stream(rank):
        ddp = fddp.DistributedDataParallel(
            net, process_group=rank.group, bucket_cap_mb=CAP, report="next"
        )
        for _ in range(2):
            net.zero_grad()
            mean_square(ddp, x).backward()
        expected = on_host(gradients(net))
        net.zero_grad()
        handle = net[0].weight.register_hook(_fail) if rank.number == 1 else None
        found = ending(mean_square(ddp, x).backward)
        assert found.kinds[0] == ("no error", "ZeroDivisionError")[rank.number], found
        if handle is not None:
            handle.remove()
        net.zero_grad()
        with capture(rank), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the step was given up
            found = ending(lambda: mean_square(ddp, x))
        assert found.kinds[0] == "PeerError", found
        assert "backward was aborted" in found.text, found
        mean_square(ddp, x).backward()
        ddp.check()
        check_equal(on_host(gradients(net)), expected)


def _fail(grad: Tensor) -> None:
    raise ZeroDivisionError


def rows_loss(params: dict[str, Tensor], index: Tensor) -> Tensor:
    rows = nn.functional.embedding(index, params["table"], sparse=True)
    return rows.square().sum()


def refused_module(rank: Rank) -> None:
    """As `refused`, of a wrapped module."""
    with own_stream(rank):
        check_refused_module(rank)


def check_refused_module(rank: Rank) -> None:
    x, net = rank.put(batch(rank.number, 0)), module(rank.device)

    def iterate(ddp: nn.Module) -> None:
        mean_square(ddp, x).backward()

    def attempt(ddp: nn.Module, *, captures: bool = True) -> Ending:
        if not captures:
            return ending(lambda: iterate(ddp))
        with capture(rank):
            return ending(lambda: iterate(ddp))

    for in_step in (False, True):
        ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
        iterate(ddp)
        before = on_host(gradients(net))
        net.zero_grad()
        with capture(rank):
            if in_step:
                found = ending(lambda: _in_step(ddp, lambda: iterate(ddp)))  # noqa: B023
            else:
                found = ending(lambda: iterate(ddp))  # noqa: B023
        assert found.kinds[0] == "TransformError", found
        assert "pass report='next'" in found.text, found
        found = attempt(ddp, captures=rank.number == 0)
        assert found.kinds[0] == ("TransformError", "PeerError")[rank.number], found
        iterate(ddp)
        check_equal(on_host(gradients(net)), before)
        net.zero_grad()
    # A forward pass that was not captured.
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for _ in range(2):
        loss = mean_square(ddp, x)
        with capture(rank):
            found = ending(loss.backward)
        assert found.kinds[0] == "TransformError", found
        assert "pass report='next'" in found.text, found
        net.zero_grad()
        iterate(ddp)
        check_equal(on_host(gradients(net)), before)
        net.zero_grad()
    ddp = fddp.DistributedDataParallel(
        net, process_group=rank.group, bucket_cap_mb=CAP, report="next"
    )
    iterate(ddp)
    found = attempt(ddp)
    assert "zero_grad(set_to_none=True)" in found.text, found
    assert ending(ddp.check).kinds[0] == "PeerError"
    for param in net.parameters():  # in memory of the caller, which no step reuses
        param.grad = torch.zeros_like(param)
    found = attempt(ddp)
    assert found.kinds[0] == "no error", found


def _in_step(ddp: Any, call: Callable[[], object]) -> None:
    with ddp.in_step():
        call()


def captured_on_one_rank(rank: Rank) -> None:
    """A step that one rank captures, and the other one runs: an error of both, which closes."""
    group = dist.new_group(backend="lag:nccl")
    params, x = rank.put(mlp()), rank.put(batch(rank.number, 0))
    sync = fddp.GradSync(params, group=group, report="next", **SMALL)
    step = sync.value_and_grad(mlp_loss)
    step(params, x)
    if rank.number == 0:
        with capture(rank):
            step(params, x)
    else:
        step(params, x)
    found = ending(sync.check)
    assert found.kinds[0] == "DesyncError", found
    assert "captured in a graph" in found.text, found
    assert ending(lambda: step(params, x)).kinds[0] == "ClosedError"
