"""Steps of fddp on several streams and devices, each compared with one process on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)

import fddp
from fddp.native import extension
from fddp.tree.pytree import tree_map
from tests.lag.rank import (
    CAP,
    SMALL,
    Rank,
    gradients,
    mean_square,
    means,
    module,
    module_means,
    placed,
    slow,
)
from tests.support.backward_calls import call_in_backward
from tests.support.endings import ending
from tests.support.models import batch, mean_gradients, mlp, mlp_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def within(*streams: torch.Stream) -> Iterator[None]:
    """Make streams of several devices the current ones, between waits of both sides."""
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    with ExitStack() as stack:
        for outer, stream in zip(before, streams, strict=True):
            stream.wait_stream(outer)
            stack.callback(outer.wait_stream, stream)
            stack.enter_context(stream)
        yield


def on_both_devices(rank: Rank) -> tuple[Any, torch.device]:
    """Layers of which the last two are on a second device, and that device."""
    return placed(mlp(), rank.device, rank.other), rank.other


def on_sides(sides: tuple[torch.Stream, ...]) -> Callable[[Any, Tensor], Tensor]:
    """Loss of layers side by side, every other one on the side stream of its device."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        outputs = []
        for number, layer in enumerate(p.values()):
            weight = layer["weight"]
            home, side = torch.accelerator.current_stream(weight.device), sides[weight.device.index]
            moved = x.to(weight.device)
            side.wait_stream(home)
            moved.record_stream(side)
            with home if number % 2 else side:
                y = slow(moved @ weight + layer["bias"])
            y.record_stream(home)
            home.wait_stream(side)
            outputs.append(torch.tanh(y).to(x.device))
        return sum(outputs, x).square().mean()

    return loss_fn


def branches(p: Any, x: Tensor) -> Tensor:
    """As `on_sides`."""
    outputs = [torch.tanh(x @ layer["weight"] + layer["bias"]) for layer in p.values()]
    return sum(outputs, x).square().mean()


def two_devices_on_streams(rank: Rank) -> None:
    """Layers on two devices, on other streams than the default ones, with others at their side."""
    if torch.accelerator.device_count() < 2:
        return
    params, there = on_both_devices(rank)
    homes, sides = ([torch.Stream(device=d) for d in (rank.device, there)] for _ in range(2))
    two = {"bucket_cap_mb": 0.0016, "first_bucket_mb": 0.0016}
    for caps in (SMALL, two):
        with within(*homes), fddp.GradSync(params, group=rank.group, **caps) as sync:
            step = sync.value_and_grad(on_sides((*sides,)))
            for number in range(3):
                _, grads = step(params, rank.put(batch(rank.number, number)))
                rank.check(grads, means(number, loss=branches))


def check_released(rank: Rank, side: torch.Stream, take: Callable[[], Tensor | None]) -> None:
    """Compare a gradient of another stream, of twos, that is released while it is still read."""
    grad, large = take(), torch.ones(250, 250, device=side.device).double()
    assert grad is not None
    large @ large @ large
    seen = grad * 1
    del grad
    with side:  # whose free memory it would be
        for _ in range(6):
            torch.full((10, 3), 7.0, device=side.device, dtype=torch.float64)
    rank.check(seen, torch.full((10, 3), 2.0).double())


def taken_without_a_bucket(rank: Rank) -> None:
    """A gradient of another stream, of a leaf in no bucket."""
    leaves = extension.compiled.LeafSet([torch.ones(10, 3, device=rank.device).double()])
    side = torch.Stream(device=rank.device)
    for _ in range(3):
        leaves.arm(extension.compiled.BucketMembers([]), [1], [], lambda _: None)
        with within(side):
            (leaves.leaves[0] * 2).sum().backward()
        check_released(rank, side, lambda: leaves.take_one(0))


def taken_on_a_second_device(rank: Rank) -> None:
    """A gradient of another stream of a second device, whose current stream is not the default."""
    if torch.accelerator.device_count() < 2:
        return
    home, side = (torch.Stream(device=rank.other) for _ in range(2))
    places = rank.device, rank.other
    with within(home):
        leaves = extension.compiled.LeafSet([torch.ones(10, 3, device=d).double() for d in places])
        for _ in range(3):
            leaves.arm(extension.compiled.BucketMembers([[0, 1]]), [1, 1], [], lambda _: None)
            side.wait_stream(home)
            with side:
                (leaves.leaves[1] * 2).sum().backward()
            check_released(rank, side, lambda: leaves.take(0, keep=False)[1])


def taken_again(rank: Rank) -> None:
    """A second gradient of a bucket that was taken, which is computed on another stream."""
    leaves = extension.compiled.LeafSet([torch.ones(10, 3, device=rank.device).double()])
    home, side = torch.accelerator.current_stream(rank.device), torch.Stream(device=rank.device)
    for _ in range(3):
        leaves.arm(extension.compiled.BucketMembers([[0]]), [1], [], lambda _: None)
        (leaves.leaves[0] * 3).sum().backward()
        leaves.take(0, keep=False)
        side.wait_stream(home)
        with side:
            (slow(leaves.leaves[0]) * 2).sum().backward()
        check_released(rank, side, lambda: leaves.take(0, keep=False)[0])


def awaited_on_streams_of_two_devices(rank: Rank) -> None:
    """A step on leaves of two devices that is awaited on other streams than it began on."""
    if torch.accelerator.device_count() < 2:
        return
    params, there = on_both_devices(rank)
    places = {"layer0": rank.device, "layer2": there}
    aways = [torch.Stream(device=device) for device in places.values()]
    busy = [torch.ones(1, device=device).double() for device in places.values()]
    for options in ({}, {"deterministic": True}):
        with fddp.GradSync(params, group=rank.group, **options, **SMALL) as sync:
            for number in range(3):
                grads = tree_map(lambda p, m: slow(m.to(p.device)), params, means(number))
                handle = sync.start(grads)
                del grads
                with aways[0], aways[1]:
                    results = handle.wait()
                    for each in busy:
                        slow(each)
                    rank.check(results, means(number))
                torch.accelerator.synchronize(rank.device)


def used_on_independent_streams(rank: Rank) -> None:
    """Results read on two streams that do not wait for each other, whose memory a third takes."""
    params = rank.put(mlp())
    streams = [torch.Stream(device=rank.device) for _ in range(3)]
    given = [rank.put(means(number)) for number in range(4)]
    torch.accelerator.synchronize(rank.device)
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        for _ in range(3):
            used: list[Any] = []
            results = []
            for number, stream in enumerate(streams[:2]):
                with stream:
                    results.append(sync(given[number]))
            while results:
                with streams[len(results) - 1]:
                    for _ in range(2):
                        slow(given[0]["layer0"]["bias"])
                    used.append(tree_map(lambda leaf: leaf * 1, results.pop()))
            with streams[2]:
                later = [sync(given[number]) for number in (2, 3)]
                for number, result in zip((2, 3), later, strict=True):
                    rank.check(result, means(number))
            torch.accelerator.synchronize(rank.device)
            for number, result in zip((1, 0), used, strict=True):
                rank.check(result, means(number))
            del later, used, result
            torch.accelerator.synchronize(rank.device)


def failed_on_a_second_device(rank: Rank) -> None:
    """Steps that a rank fails before it has leaves, on a device that is not the current one, where
    the ranks are connected alone, or on both."""
    if torch.accelerator.device_count() < 2:
        return
    there = rank.other
    params = tree_map(lambda leaf: leaf.to(there), mlp())
    plan = fddp.plan_buckets(params, **SMALL)
    both, _ = on_both_devices(rank)
    for report, source in product(("now", "next"), (params, plan, both)):
        options: dict[str, Any] = {} if source is plan else SMALL
        sync = fddp.GradSync(source, group=rank.group, report=report, **options)
        grads = params if source is plan else source
        if source is both:
            labels = (f"{there.type}#{number}" for number in range(2))
            assert sync._engine.devices == dict(zip(labels, (rank.device, there), strict=True))
        if source is plan:  # which learns the device from gradients
            rank.check(sync(grads), mlp())
        for is_last in (False, True):
            for _ in range(2):  # also in the first step
                found = ending(partial(sync, {} if rank.number == 1 else grads))
                if report == "next":
                    found = ending(sync.check)
                kind = "TreeMismatchError" if (rank.number, report) == (1, "now") else "PeerError"
                assert found.kinds[0] == kind, found
                rank.check(sync(grads), mlp())
            if is_last:
                sync.close()
            else:  # and in the first one after
                sync = sync.rebuild(rank.group)


def made_on_a_second_device(rank: Rank) -> None:
    """Shards, and sums over virtual ranks of a plan, on a device that is not the current one."""
    if torch.accelerator.device_count() < 2:
        return
    there = rank.other
    params = tree_map(lambda leaf: leaf.to(there), mlp())
    with fddp.GradSync(params, group=rank.group, algorithm="reduce_scatter", **SMALL) as sync:
        shard = sync.shard(params)
        part = tree_map(torch.sub, shard, sync.reduce_scatter(params))
        rank.check(sync.all_gather(shard), mlp())
        rank.check(sync.all_gather(part), tree_map(torch.zeros_like, mlp()))
    plan = fddp.plan_buckets(params, **SMALL)
    with fddp.GradSync(plan, group=rank.group, virtual_ranks=5) as sync:
        step = sync.value_and_grad(mlp_loss)
        for number in range(2):
            own = [batch(virtual, number).to(there) for virtual in sync.carried_ranks]
            _, grads = step(params, sync.virtual_batches(own))
            inputs = [(batch(virtual, number),) for virtual in range(5)]
            rank.check(grads, mean_gradients(mlp_loss, mlp(), inputs, [1.0] * 5))


def hooks_on_a_second_device(rank: Rank) -> None:
    """Hooks with state for leaves on a device that is not the current one, also after a rebuild,
    compared with what they give on the CPU."""
    if torch.accelerator.device_count() < 2:
        return
    there = rank.other
    host = mlp()
    params = tree_map(lambda leaf: leaf.to(there), host)
    with_feedback = fddp.hooks.error_feedback(fddp.hooks.int8())
    for hook, within in ((fddp.hooks.power_sgd(rank=2), 1e-6), (with_feedback, 1e-1)):
        options: dict[str, Any] = {"group": rank.group, "hook": hook, **SMALL}
        with fddp.GradSync(host, **options) as other:
            sync = fddp.GradSync(params, **options)
            for number in range(2):
                x = batch(rank.number, number)
                _, grads, _ = sync.value_and_grad(mlp_loss)(
                    params, x.to(there), hook_state=sync.init_state()
                )
                _, expected, _ = other.value_and_grad(mlp_loss)(
                    host, x, hook_state=other.init_state()
                )
                rank.check(grads, expected, within)
                if number == 0:
                    sync = sync.rebuild(rank.group)
            sync.close()


def used_on_streams_of_a_second_device(rank: Rank) -> None:
    """As `independent_streams`, on a device that is not the current one."""
    if torch.accelerator.device_count() < 2:
        return
    there = rank.other
    params = tree_map(lambda leaf: leaf.to(there), mlp())
    streams = [torch.Stream(device=there) for _ in range(2)]
    given = [tree_map(lambda leaf: leaf.to(there), means(number)) for number in range(6)]
    torch.accelerator.synchronize(there)
    used: list[Any] = []
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        for number, grads in enumerate(given):
            with streams[number % 2]:
                torch.accelerator.set_device_index(0)
                result = sync(grads)
                for _ in range(8):
                    copies = tree_map(lambda leaf: leaf * 1, result)
                used.append(copies)
                del result
        torch.accelerator.synchronize(there)
        for number, each in enumerate(used):
            rank.check(each, means(number))


def repaired_with_slow_kernels(rank: Rank) -> None:
    """A leaf that is used once more in each step, so that one of its gradients is late, behind
    kernels that take long."""
    params = rank.put(mlp(layers=2))

    def loss_of(times: int) -> Callable[[Any, Tensor], Tensor]:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            def layer(h: Tensor) -> Tensor:
                return slow(torch.tanh(h @ p["layer1"]["weight"] + p["layer1"]["bias"]))

            h = x @ p["layer0"]["weight"] + p["layer0"]["bias"]
            for _ in range(times):
                h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=True)
            return h.square().mean()

        return loss_fn

    for options in ({}, {"deterministic": True}):
        with fddp.GradSync(params, group=rank.group, **options, **SMALL) as sync:
            for number in range(1, 5):
                loss_fn, x = loss_of(number), rank.put(batch(rank.number, number))
                _, grads = sync.value_and_grad(loss_fn)(params, x)
                inputs = [(batch(other, number),) for other in range(2)]
                host = mlp(layers=2)
                rank.check(grads, mean_gradients(loss_fn, host, inputs, [1.0, 1.0]))


def repaired_on_a_stream(rank: Rank) -> None:
    """As `repaired_with_slow_kernels`, with late gradients of a stream at the side."""
    params, side = rank.put(mlp(layers=2)), torch.Stream(device=rank.device)

    def loss_of(times: int) -> Callable[[Any, Tensor], Tensor]:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            weight, bias = p["layer1"].values()

            def add_gradients() -> None:
                for _ in range(times):
                    with beside(weight), torch.enable_grad():
                        (slow(weight) * 2).sum().backward()

            h = x @ p["layer0"]["weight"] + p["layer0"]["bias"]
            h = call_in_backward(h, add_gradients)
            with beside(h):
                y = torch.tanh(h @ weight + bias)
            if not y.is_cpu:
                y.record_stream(torch.accelerator.current_stream(y.device))
            return y.square().mean()

        return loss_fn

    def beside(tensor: Tensor) -> AbstractContextManager[None]:
        if tensor.is_cpu:
            return nullcontext()
        tensor.record_stream(side)
        return within(side)

    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        for number in range(5):
            loss_fn, x = loss_of(number), rank.put(batch(rank.number, number))
            _, grads = sync.value_and_grad(loss_fn)(params, x)
            inputs = [(batch(other, number),) for other in range(2)]
            rank.check(grads, mean_gradients(loss_fn, mlp(layers=2), inputs, [1.0, 1.0]))


def reconciled(rank: Rank) -> None:
    """The newest state, in several chunks, made and read on a stream of its own."""
    side = torch.Stream(device=rank.device)
    for number in range(3):
        with (
            within(side),
            mock.patch("fddp.collectives.replicas.chunked_broadcast.PIECE_BYTES", 1000),
        ):
            value = slow(torch.full((300,), 1.0 + rank.number, device=rank.device).double())
            found, step = fddp.reconcile({"w": value}, rank.group, step=number + rank.number)
            assert step == number + 1
            rank.check(found, {"w": torch.full((300,), 2.0).double()})


def finalized(rank: Rank) -> None:
    """Steps that the caller closes on another stream than that of their backward pass, which has
    sent the last bucket, or has left it unsent within `in_step`."""
    net, away = module(rank.device), torch.Stream(device=rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    ddp.require_manual_backward_finalization = True
    for p in net.parameters():
        p.register_hook(slow)
    for number in range(4):
        ddp.zero_grad()
        with ddp.in_step() if number % 2 else nullcontext():
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
            with away:
                ddp.finalize_backward()
                rank.check(gradients(net), module_means(number, mean_square))
        torch.accelerator.current_stream(rank.device).wait_stream(away)


class Descent:
    """An optimizer of torch's hooks that step by bucket."""

    def step_param(self, param: Tensor, grad: Tensor) -> None:
        param.data.add_(grad, alpha=-0.1)


def optimized_in_backward(rank: Rank) -> None:
    """Optimizers that step in backward, by parameter and by bucket."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    for way in ("parameter", "bucket"):
        net, host = module(rank.device), module(torch.device("cpu"))
        if way == "parameter":
            _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
        if way == "bucket":
            state = _OptimizerHookState(Descent())
            hook = _hook_then_optimizer(default_hooks.allreduce_hook, state)
            ddp.register_comm_hook(rank.group, hook)
        optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
        for number in range(3):
            ddp.zero_grad()
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
            optimizer.zero_grad()
            for other in range(2):
                (mean_square(host, batch(other, number)) / 2).backward()
            optimizer.step()
            own = {name: p.detach() for name, p in net.named_parameters()}
            rank.check(own, {name: p.detach() for name, p in host.named_parameters()})
