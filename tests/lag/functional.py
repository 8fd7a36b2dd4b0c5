"""What the functional interface does on a device, each compared with one process on the CPU."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

import fddp
from fddp import periodic
from fddp.native import extension
from fddp.runtime import operations
from fddp.tree.pytree import flatten, tree_map
from tests.lag.rank import SMALL, Rank, means, placed, slow
from tests.support.backward_calls import call_in_backward
from tests.support.endings import ending
from tests.support.models import batch, mean_gradients, mlp, mlp_loss

if TYPE_CHECKING:
    from collections.abc import Callable


def value_and_grad(rank: Rank) -> None:
    """Buckets sent within backward, with and without information."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step, informed = (sync.value_and_grad(mlp_loss, with_info=flag) for flag in (False, True))
        for number in range(3):
            _, grads = step(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number))  # first: the other step waits for the device
            _, again, info = informed(params, rank.put(batch(rank.number, number)))
            rank.check(again, means(number))
            assert info.all_finite


def of_a_meta_plan(rank: Rank) -> None:
    """A plan that was made before it was known where its leaves are."""
    plan = fddp.plan_buckets(tree_map(lambda leaf: leaf.to("meta"), mlp()), **SMALL)
    params = rank.put(mlp())
    for report in ("now", "next"):
        with fddp.GradSync(plan, group=rank.group, report=report) as sync:
            for number in range(3):
                step = sync.value_and_grad(mlp_loss)
                _, grads = step(params, rank.put(batch(rank.number, number)))
                rank.check(grads, means(number))
                rank.check(sync(tree_map(slow, rank.put(means(number)))), means(number))


def in_graphs(rank: Rank) -> None:
    """Steps and operators on several buckets as parts of one graph."""
    torch._dynamo.reset()
    params = rank.put(mlp())
    cap = SMALL["bucket_cap_mb"]
    with (
        fddp.GradSync(params, group=rank.group, **SMALL) as sync,
        fddp.GradSync(params, group=rank.group, deterministic=True, **SMALL) as fixed,
        fddp.Communicator(rank.group, bucket_cap_mb=cap) as ranks,
    ):
        steps = [sync.value_and_grad(mlp_loss), fixed.value_and_grad(mlp_loss)]

        def step(params: Any, x: Tensor) -> list[Any]:
            by_operator = fddp.pmean(torch.func.grad(mlp_loss)(params, x), ranks)
            return [*(take(params, x)[1] for take in steps), by_operator]

        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for number in range(3):
            for grads in compiled(params, rank.put(batch(rank.number, number))):
                rank.check(grads, means(number))


def reported_later(rank: Rank) -> None:
    """Results that are returned before their report, and a step that fails."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, report="next", **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        for number in range(3):
            _, grads = step(params, rank.put(batch(rank.number, number)))
            assert sync._engine._unread is not None
            rank.check(grads, means(number))
        grads = step(params, rank.put(batch(rank.number, 3)))[1]
        if rank.number == 1:
            name = next(iter(grads))
            grads = {**grads, name: dict.fromkeys(grads[name])}
        failed = ending(lambda: sync(grads)).kinds[0]
        assert failed == ("NoGradientError" if rank.number == 1 else "no error"), failed
        assert ending(sync.check).kinds[0] == "PeerError"
        rank.check(step(params, rank.put(batch(rank.number, 4)))[1], means(4))


def mean_of_gradients(rank: Rank) -> None:
    """Gradients that exist, weighted."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        for number in range(3):
            grads = torch.func.grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            result = sync(grads, weight=rank.number + 1.0)
            del grads
            rank.check(result, means(number, weights=(1.0, 2.0)))


def noise(rank: Rank) -> None:
    """Squared norms by group of leaves, of gradients that the device is still to compute."""
    params = rank.put(mlp())

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return mlp_loss(tree_map(slow, p), x)

    def sq_norm(grads: Any, group: str) -> float:
        leaves, treedef = flatten(grads)
        pairs = zip(treedef.paths, leaves, strict=True)
        return sum(float(leaf.square().sum()) for path, leaf in pairs if path.endswith(group))

    def group_of(path: str) -> str:
        return path.rpartition(".")[2]

    with fddp.GradSync(params, group=rank.group, noise=group_of, **SMALL) as sync:
        step = sync.value_and_grad(loss_fn, with_info=True)
        for number in range(3):
            _, grads, info = step(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number))
            own = [torch.func.grad(mlp_loss)(mlp(), batch(other, number)) for other in range(2)]
            for group in ("weight", "bias"):
                norms = info.squared_norms[group]
                found = (norms.own, norms.total, norms.mean)
                squares = [sq_norm(each, group) for each in own]
                expected = squares[rank.number], sum(squares), sq_norm(means(number), group)
                for value, wanted in zip(found, expected, strict=True):
                    assert abs(value / wanted - 1.0) < 1e-9, (group, found, expected)


def branches(p: Any, x: Tensor) -> Tensor:
    """Loss of layers side by side."""
    total = x
    for layer in p.values():
        total = total + torch.tanh(x @ layer["weight"] + layer["bias"])
    return total.square().mean()


def on_streams(
    streams: tuple[torch.Stream, ...], late: tuple[int, ...]
) -> Callable[[Any, Tensor], Tensor]:
    """As `branches`, with the first layers on other streams. Layers in `late` take long."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream(x.device)
        own = (*streams, *[current] * (len(p) - len(streams)))
        inner, outputs = [], []
        for number, (stream, layer) in enumerate(zip(own, p.values(), strict=True)):
            stream.wait_stream(current)
            with stream:
                h = x @ layer["weight"] + layer["bias"]
                inner.append(slow(h) if number in late else h)
        # Apart, so that in backward no parameter's gradient waits for the stream of another layer.
        for stream, h in zip(own, inner, strict=True):
            with stream:
                outputs.append(torch.tanh(h))
            outputs[-1].record_stream(current)
        for stream in streams:
            current.wait_stream(stream)
        return sum(outputs, x).square().mean()

    return loss_fn


def several_streams(rank: Rank) -> None:
    """Gradients computed on several streams, by bucket or together, some of them late."""
    params = rank.put(mlp())
    streams = tuple(torch.Stream(device=rank.device) for _ in range(3))
    one, two = ({"bucket_cap_mb": mb, "first_bucket_mb": mb} for mb in (1.0, 0.0016))
    sides = (0, 1, 2)
    cases: list[tuple[dict[str, Any], tuple[int, ...]]]
    # The last bucket leaves after backward, which awaits all streams.
    cases = [(SMALL, sides), (one, sides), (two, sides), (two, (2,)), (two, (3,))]
    for cap, late in cases:
        with fddp.GradSync(params, group=rank.group, **cap) as sync:
            step = sync.value_and_grad(on_streams(streams, late))
            for number in range(3):
                _, grads = step(params, rank.put(batch(rank.number, number)))
                rank.check(grads, means(number, loss=branches))


def late_gradients(rank: Rank) -> None:
    """A leaf that is used in two checkpoints, whose second gradient comes after its bucket left."""
    params = rank.put(mlp(layers=2))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        def layer(h: Tensor) -> Tensor:
            return torch.tanh(h @ p["layer1"]["weight"] + p["layer1"]["bias"])

        def run(h: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=True)

        h = run(x @ p["layer0"]["weight"] + p["layer0"]["bias"])
        return run(h).square().mean()

    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step = sync.value_and_grad(loss_fn)
        for number in range(3):
            _, grads = step(params, rank.put(batch(rank.number, number)))
            inputs = [(batch(other, number),) for other in range(2)]
            rank.check(grads, mean_gradients(loss_fn, mlp(layers=2), inputs, [1.0, 1.0]))


def shards(rank: Rank) -> None:
    """A reduce-scatter and an all-gather of gradients."""
    params = rank.put(mlp())
    sharded: dict[str, Any] = {"algorithm": "reduce_scatter", **SMALL}
    with fddp.GradSync(params, group=rank.group, **sharded) as sync:
        for number in range(3):
            grads = torch.func.grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            part = sync.reduce_scatter(grads)
            del grads
            rank.check(sync.all_gather(part), means(number))


def gathered_after_a_failure(rank: Rank) -> None:
    """A reduce-scatter that one rank fails. The next call, an all-gather, raises its error."""
    params = rank.put(mlp())
    options: dict[str, Any] = {"algorithm": "reduce_scatter", "report": "next", **SMALL}
    with fddp.GradSync(params, group=rank.group, **options) as sync:
        shard = sync.shard(params)
        sync.reduce_scatter(params)
        sync.check()
        ending(partial(sync.reduce_scatter, {} if rank.number == 1 else params))
        found = ending(partial(sync.all_gather, shard))
        assert found.kinds[0] == "PeerError", found
        rank.check(sync.all_gather(shard), mlp())


def failed_in_a_hook(rank: Rank) -> None:
    """A hook that raises on one rank, which goes on with zeros in its place."""

    class Failing(fddp.hooks.Hook[tuple[()]]):
        name = "failing"
        fails = False

        def init(self, spec: Any) -> tuple[()]:
            return ()

        def apply(self, state: tuple[()], bucket: Any, all_reduce: Any) -> Any:
            if Failing.fails:
                raise ArithmeticError("in the hook")
            return all_reduce(bucket.buffer.clone()).map(lambda total: (total, ()))

    params = rank.put(mlp())
    grad = torch.func.grad(mlp_loss)
    with fddp.GradSync(params, group=rank.group, hook=Failing(), **SMALL) as sync:
        for number in range(3):
            grads = grad(params, rank.put(batch(rank.number, number)))
            Failing.fails = number == rank.number == 1
            found = ending(lambda: rank.check(sync(grads), means(number)))  # noqa: B023
            kind = ("PeerError", "ArithmeticError")[rank.number] if number == 1 else "no error"
            assert found.kinds[0] == kind, found


def reduced_in_another_dtype(rank: Rank) -> None:
    """Buckets of a dtype other than that of their leaves."""
    params = tree_map(Tensor.float, rank.put(mlp()))
    with fddp.GradSync(params, group=rank.group, reduce_dtype=torch.float64, **SMALL) as sync:
        for number in range(3):
            x = rank.put(batch(rank.number, number)).float()
            _, grads = sync.value_and_grad(mlp_loss)(params, x)
            assert {(leaf.device, leaf.dtype) for leaf in flatten(grads)[0]} == {
                (rank.device, torch.float32)
            }
            rank.check(tree_map(Tensor.double, grads), means(number), 1e-6)


def several_dtypes(rank: Rank) -> None:
    """Leaves of bfloat16, of another memory order, complex and conjugate ones, and None."""
    host = {
        "half": torch.full((300,), 3.0, dtype=torch.bfloat16),
        "float": torch.arange(6.0).reshape(2, 3).T,
        "complex": torch.full((4,), 1 + 2j).conj(),
        "none": None,
    }
    grads, params = rank.put(host), rank.put({**host, "none": torch.zeros(2)})
    with fddp.GradSync(params, group=rank.group, reduce_dtype=torch.float32) as sync:
        for _ in range(3):
            result, info = sync(grads, with_info=True)
            rank.check(result, {**host, "complex": host["complex"].resolve_conj()})
            assert info.grad_norm is not None
            assert abs(info.grad_norm - (300 * 9 + 55 + 20) ** 0.5) < 1e-3, info.grad_norm


def not_finite(rank: Rank) -> None:
    """A NaN on one rank, which is reported on both."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, nonfinite="raise", **SMALL) as sync:
        grads = torch.func.grad(mlp_loss)(params, rank.put(batch(rank.number, 0)))
        rank.check(sync(grads), means(0))
        if rank.number == 1:
            grads["layer1"]["bias"] = grads["layer1"]["bias"] * float("nan")
        found = ending(partial(sync, grads))
        assert found.kinds[0] == "NonFiniteError", found
        assert "layer1.bias" in found.text, found
        assert f"rank 1 has {grads['layer1']['bias'].numel()} NaN" in found.text, found


def check_hook(rank: Rank, hook: Any, place: torch.device, within: float) -> None:
    """Compare steps under a hook, on leaves of a device, with what it gives on the CPU."""
    host = mlp()
    params = tree_map(lambda leaf: leaf.to(place), host)
    options: dict[str, Any] = {"group": rank.group, "hook": hook, **SMALL}
    with fddp.GradSync(params, **options) as sync, fddp.GradSync(host, **options) as other:
        state, other_state = sync.init_state(), other.init_state()
        for number in range(3):
            x = batch(rank.number, number)
            _, grads, state = sync.value_and_grad(mlp_loss)(params, x.to(place), hook_state=state)
            _, expected, other_state = other.value_and_grad(mlp_loss)(
                host, x, hook_state=other_state
            )
            rank.check(grads, expected, within)


def compressed(rank: Rank) -> None:
    """Hooks of the library."""
    check_hook(rank, fddp.hooks.cast(torch.float16), rank.device, 1e-2)
    check_hook(rank, fddp.hooks.power_sgd(rank=2), rank.device, 1e-6)
    check_hook(rank, fddp.hooks.int8(), rank.device, 1e-1)


def operators(rank: Rank) -> None:
    """Collectives and their derivatives."""
    for number in range(3):
        x = rank.put(batch(rank.number, number))
        both = torch.stack([batch(0, number), batch(1, number)])
        rank.check(fddp.pmean(x * 2, rank.group), both.mean(0) * 2)
        rank.check(fddp.psum(x * 2, rank.group), both.sum(0) * 2)
        rank.check(fddp.pmax(x * 2, rank.group), both.amax(0) * 2)
        rank.check(fddp.all_gather(x * 2, rank.group), both * 2)
        rank.check(fddp.reduce_scatter(x[:2] * 2, rank.group), both.sum(0)[rank.number] * 2)
        swapped = torch.stack([part.view(2, 2, 8)[rank.number] for part in both])
        rank.check(fddp.all_to_all((x * 2).view(2, 2, 8), rank.group), swapped * 2)
        rank.check(fddp.broadcast_from(x * 2, 1, rank.group), both[1] * 2)
        grad = torch.func.grad(lambda v: fddp.pmean(v**2, rank.group).sum())(x)
        rank.check(grad, 2 * batch(rank.number, number))
        rank.check(fddp.broadcast({"x": x * 2}, group=rank.group), {"x": both[0] * 2})


def closed_in_flight(rank: Rank) -> None:
    """A step that fails with buckets in flight, and a closed sync."""
    params = rank.put(mlp())

    def fail() -> None:
        raise ArithmeticError("in backward")

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        first, *others = p.values()
        x = call_in_backward(torch.tanh(x @ first["weight"] + first["bias"]), fail)
        for layer in others:
            x = torch.tanh(x @ layer["weight"] + layer["bias"])
        return x.square().mean()

    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        for number in range(2):
            try:
                sync.value_and_grad(loss_fn)(params, rank.put(batch(rank.number, number)))
            except ArithmeticError:
                pass
            else:
                raise AssertionError("no error")
            _, grads = sync.value_and_grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number))


def held(rank: Rank) -> None:
    """Results that are held while later steps run, also through a handle, and donated ones."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        results = []
        for number in range(4):
            handle = sync.start(
                torch.func.grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            )
            rank.overwrite_free()
            results.append(handle.wait())
        for number, result in enumerate(results):
            rank.check(result, means(number))
        sync.donate(results.pop())
        _, grads = sync.value_and_grad(mlp_loss)(params, rank.put(batch(rank.number, 4)))
        rank.check(grads, means(4))


def closed_with_handles(rank: Rank) -> None:
    """Handles in flight when their sync is closed: awaited, or abandoned because of an error."""
    params = rank.put(mlp())
    sharded: dict[str, Any] = {"algorithm": "reduce_scatter", **SMALL}
    for number in range(3):
        x = rank.put(batch(rank.number, number))
        with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
            handle = sync.start(torch.func.grad(mlp_loss)(params, x))
        rank.check(handle.wait(), means(number))
        with fddp.GradSync(params, group=rank.group, **sharded) as sync:
            handle = sync.start_all_gather(sync.shard(params))
        rank.check(handle.wait(), mlp())
        try:
            with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
                handle = sync.start(torch.func.grad(mlp_loss)(params, x))
                raise ArithmeticError("in the loop")
        except ArithmeticError:
            del handle
        ones = [torch.ones(8, 8).double(), torch.ones(8).double()] * 8
        kept = [torch.ones_like(each, device=rank.device) for each in ones]
        rank.check(kept, ones)


def micro_batches(rank: Rank) -> None:
    """Gradients of an earlier micro-batch."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        for number in range(3):
            first = torch.func.grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            earlier = tree_map(lambda leaf: leaf * 2, first)
            del first
            _, grads = step(
                params, rank.put(batch(rank.number, number + 1)), accumulated=(earlier, 2.0)
            )
            del earlier
            both = tree_map(lambda a, b: (2 * a + b) / 3, means(number), means(number + 1))
            rank.check(grads, both)


def scaled_by_schedules(rank: Rank) -> None:
    """Schedules that scale gradients before or after sums, which backends could average."""
    params = rank.put(mlp())
    plan = fddp.plan_buckets(params, **SMALL)
    for scaling in ("before", "after"):
        schedule = fddp.make_schedule(plan, fddp.Topology(data=2), scaling=scaling)
        with fddp.GradSync(schedule, group=rank.group) as sync:
            step = sync.value_and_grad(mlp_loss)
            for number in range(3):
                _, grads = step(params, rank.put(batch(rank.number, number)))
                rank.check(grads, means(number))


def uneven(rank: Rank) -> None:
    """A rank that has fewer batches."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        batches = [rank.put(batch(rank.number, number)) for number in range(2 + rank.number)]
        for number, x in enumerate(fddp.uneven(batches, sync)):
            _, grads = step(params, x)
            rank.check(grads, means(number, weights=(float(number < 2), 1.0)))


def deterministic(rank: Rank) -> None:
    """Sums along a tree."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, deterministic=True, **SMALL) as sync:
        for number in range(3):
            _, grads = sync.value_and_grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number))


def virtual_ranks(rank: Rank) -> None:
    """Five virtual ranks on two ranks."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, virtual_ranks=5, **SMALL) as sync:
        for number in range(2):
            step = sync.value_and_grad(mlp_loss)
            own = [rank.put(batch(v, number)) for v in sync.carried_ranks]
            _, grads = step(params, sync.virtual_batches(own))
            inputs = [(batch(v, number),) for v in range(5)]
            rank.check(grads, mean_gradients(mlp_loss, mlp(), inputs, [1.0] * 5))


def virtual_ranks_with_times(rank: Rank) -> None:
    """Virtual ranks in steps that record when collectives have ended."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, virtual_ranks=5, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss, with_info=True)
        for number in range(3):
            own = [rank.put(batch(v, number)) for v in sync.carried_ranks]
            with mock.patch.object(operations, "start", wraps=operations.start) as start:
                _, grads, info = step(params, sync.virtual_batches(own))
            assert all(call.kwargs["record_time"] for call in start.call_args_list)
            inputs = [(batch(v, number),) for v in range(5)]
            rank.check(grads, mean_gradients(mlp_loss, mlp(), inputs, [1.0] * 5))
            assert all(bucket.launch_s <= bucket.done_s for bucket in info.timeline.buckets)


def own_stream(rank: Rank) -> None:
    """Steps on a stream other than the default one, with layers on yet another."""
    params = rank.put(mlp())
    side, other = (torch.Stream(device=rank.device) for _ in range(2))
    side.wait_stream(torch.accelerator.current_stream(rank.device))
    with side, fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        beside = sync.value_and_grad(on_streams((other,), (0,)))
        for number in range(3):
            _, grads = step(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number))
            _, grads = beside(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number, loss=branches))


def independent_streams(rank: Rank) -> None:
    """Steps on two streams that do not wait for each other."""
    params = rank.put(mlp())
    streams = [torch.Stream(device=rank.device) for _ in range(2)]
    totals: list[list[Tensor]] = []
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        given = [rank.put(means(number)) for number in range(6)]
        torch.accelerator.synchronize(rank.device)
        for number, grads in enumerate(given):
            with streams[number % 2]:
                result = sync(grads)
                for _ in range(8):
                    used = [leaf * 1 for layer in result.values() for leaf in layer.values()]
                totals.append(used)
                del result
        torch.accelerator.synchronize(rank.device)
        for number, used in enumerate(totals):
            expected = [leaf for layer in means(number).values() for leaf in layer.values()]
            rank.check(used, expected)


def two_devices(rank: Rank) -> None:
    """Layers on two devices, and a second model on the other device at the same time."""
    if torch.accelerator.device_count() < 2:
        return
    there = rank.other
    params = placed(mlp(), rank.device, there)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        for layer in p.values():
            x = torch.tanh(x.to(layer["weight"].device) @ layer["weight"] + layer["bias"])
        return x.square().mean()

    away = tree_map(lambda leaf: leaf.to(there), mlp())
    with (
        fddp.GradSync(params, group=rank.group, **SMALL) as sync,
        fddp.GradSync(away, group=rank.group, **SMALL) as second,
    ):
        step, beside = sync.value_and_grad(loss_fn), second.value_and_grad(mlp_loss)
        informed = sync.value_and_grad(loss_fn, with_info=True)
        for number in range(3):
            x = rank.put(batch(rank.number, number))
            _, grads, *infos = (informed if number == 2 else step)(params, x)
            _, others = beside(away, x.to(there))
            rank.check(grads, means(number))
            rank.check(others, means(number))
            norm = sum(leaf.square().sum().item() for leaf in flatten(means(number))[0]) ** 0.5
            assert all(abs(info.grad_norm - norm) < 1e-9 for info in infos), infos


def skipped(rank: Rank) -> None:
    """A NaN on one rank, for which all skip the step, or which all receive."""
    params = rank.put(mlp())
    with (
        fddp.GradSync(params, group=rank.group, nonfinite="skip", **SMALL) as skips,
        fddp.GradSync(params, group=rank.group, **SMALL) as propagates,
    ):
        grad = torch.func.grad(mlp_loss)
        for number in range(3):
            grads = grad(params, rank.put(batch(rank.number, number)))
            bad = tree_map(torch.clone, grads)
            if rank.number == 1:
                bad["layer1"]["bias"] *= float("nan")
            assert skips(bad)["layer0"]["bias"] is None
            rank.check(skips(grads), means(number))
            received = propagates(bad)
            assert received["layer1"]["bias"].isnan().all()
            del received["layer1"]["bias"]
            expected = means(number)
            del expected["layer1"]["bias"]
            rank.check(received, expected)


def averaged_periodically(rank: Rank) -> None:
    """Means of parameters that travel while further steps run."""
    schedule = periodic.local_sgd({"w": torch.zeros(300)}, 2, delay=1)
    params, expected = rank.put({"w": torch.full((300,), 1.0 + rank.number)}), 1.5
    with periodic.PeriodicSync(params, schedule, group=rank.group) as sync:
        state = sync.init(params)
        for _ in range(4):
            params, state = sync.step(params, state)
            params = {"w": params["w"] * 1}
            rank.overwrite_free()
        rank.check(params, {"w": torch.full((300,), expected)})


def awaited_on_another_stream(rank: Rank) -> None:
    """A step that is started on one stream and awaited on another."""
    params, away = rank.put(mlp()), torch.Stream(rank.device)
    busy, home = rank.put(torch.ones(1)), torch.accelerator.current_stream(rank.device)
    for options in ({}, {"deterministic": True}, {"algorithm": "reduce_scatter"}):
        with fddp.GradSync(params, group=rank.group, **options, **SMALL) as sync:
            for number in range(3):
                grads = torch.func.grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
                if sync.schedule.result == "sharded_mean":
                    handle, expected = sync.start_all_gather(sync.shard(grads)), None
                else:
                    handle, expected = sync.start(grads), means(number)
                with away:
                    for _ in range(4):
                        slow(busy)
                    results = handle.wait()
                rank.overwrite_free()
                # The first check waits for the work of its stream.
                for stream in (away, home) if number == 1 else (home, away):
                    with stream:
                        if expected is not None:
                            rank.check(results, expected)
                home.wait_stream(away)


def dropped_in_use(rank: Rank) -> None:
    """A buffer of a pool that is taken or released on another stream than that of its memory, and
    dropped with work in flight, as by a step that fails."""
    away, busy = torch.Stream(rank.device), rank.put(torch.ones(1))
    form = 4096, torch.float64, rank.device
    for use in ("take", "take_last", "add"):
        released = extension.compiled.ReleasedBuffers()
        taken: Tensor | None = torch.empty(form[0], dtype=form[1], device=form[2])
        if use != "add":
            released.add(taken)
            taken = None
        away.wait_stream(torch.accelerator.current_stream(rank.device))
        with away:
            slow(busy)
            if use != "add":
                taken = released.take(*form) if use == "take" else released.take_last()
            assert taken is not None
            taken.fill_(5.0)
            if use == "add":
                released.add(taken)
            del taken, released
        other = torch.full((form[0],), 7.0, dtype=form[1], device=form[2])
        torch.accelerator.current_stream(rank.device).wait_stream(away)
        assert (other.cpu() == 7.0).all()


def elsewhere(rank: Rank) -> None:
    """Gradients that one rank has on another type of device than the plan's: passed, and found by
    backward."""
    grads = rank.put(mlp())
    for report, place in itertools.product(("now", "next"), ("cpu", "meta")):
        moved = tree_map(partial(torch.Tensor.to, device=place), grads)
        given = moved if rank.number == 1 else grads
        with fddp.GradSync(grads, group=rank.group, report=report, **SMALL) as sync:
            for step in (sync, sync.value_and_grad(_sum_of_leaves)):
                step(grads)
                found = ending(partial(step, given))
                if rank.number == 1:
                    assert found.kinds[0] == "TreeMismatchError", found
                elif report == "now":
                    assert found.kinds[0] == "PeerError", found
                if report == "next":
                    found = ending(sync.check)
                    assert found.kinds[0] == "PeerError", found
                assert "the gradient of leaf 'layer" in found.text, found
                assert f"is on {place} where its bucket is on {rank.device}" in found.text, found
                rank.check(sync(grads), mlp())


def _sum_of_leaves(params: Any) -> Tensor:
    return torch.stack([leaf.sum() for leaf in flatten(params)[0]]).sum()


def closed_with_work_in_flight(rank: Rank) -> None:
    """Buckets of a closed sync, which work on another stream than theirs still writes to."""
    params, away = rank.put(mlp()), torch.Stream(rank.device)
    for number in range(3):
        x = rank.put(batch(rank.number, number))
        sync = fddp.GradSync(params, group=rank.group, **SMALL)
        grads = torch.func.grad(mlp_loss)(params, x)
        sync(grads)
        away.wait_stream(torch.accelerator.current_stream(rank.device))
        with away:
            late = tree_map(lambda grad: slow(grad.detach()), grads)
            results = sync(late)
            results = tree_map(lambda result: result * 1, results)
        sync.close()
        del sync
        shapes = [(8, 8), (8,), (16,), (64,), (72,), (128,)]
        others = [
            torch.full(shape, 7.0, device=rank.device, dtype=torch.float64)
            for shape in shapes
            for _ in range(4)
        ]
        with away:
            rank.check(results, means(number))
        torch.accelerator.current_stream(rank.device).wait_stream(away)
        rank.check(others, [torch.full(shape, 7.0).double() for shape in shapes for _ in range(4)])
