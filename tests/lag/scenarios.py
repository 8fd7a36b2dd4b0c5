"""What fddp does on a device, each compared with one process on the CPU.

A scenario is a function of this rank. A value that is read or written out of order is NaN, or that
of another tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel.distributed import _MixedPrecision

import fddp
from fddp.tree.pytree import map_leaves
from tests import lag
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0001}
CAP = 0.0005
EXACT = 1e-12


@dataclass(frozen=True)
class Rank:
    """One rank of two, with a group whose backends serve the CPU and the device."""

    number: int
    group: dist.ProcessGroup
    device: torch.device

    def put(self, tree: Any) -> Any:
        """The tree on the device."""
        return map_leaves(lambda leaf: leaf.to(self.device), tree)

    def check(self, tree: Any, expected: Any, within: float = EXACT) -> None:
        """Compare a tree of the device, which later allocations may overwrite if it is not safe."""
        for shape in ((8, 8), (8,), (512,)):
            torch.full(shape, 7.0, device=self.device, dtype=torch.float64)
        difference = largest_difference(map_leaves(lambda leaf: leaf.cpu(), tree), expected)
        assert difference < within, difference


def means(step: int, params: Any = None, weights: tuple[float, float] = (1.0, 1.0)) -> Any:
    """Mean gradients of `mlp_loss` over both ranks' batches."""
    inputs = [(batch(rank, step),) for rank in range(2)]
    return mean_gradients(mlp_loss, mlp() if params is None else params, inputs, [*weights])


def module(device: torch.device) -> nn.Module:
    """A network of float64 with a buffer."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
    return nn.Sequential(*layers).double().to(device)


def module_means(step: int, forward: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """Mean gradients of the module's parameters over both ranks' batches."""
    found: dict[str, Tensor] = {}
    for rank in range(2):
        net = module(torch.device("cpu"))
        forward(net, batch(rank, step)).backward()
        for name, p in net.named_parameters():
            if p.grad is not None:
                found[name] = found.get(name, torch.zeros_like(p)) + p.grad / 2
    return found


def mean_square(net: nn.Module, x: Tensor) -> Tensor:
    """Loss of a network."""
    return net(x).square().mean()


def _gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


# Functional steps


def value_and_grad(rank: Rank) -> None:
    """Buckets sent within backward, with and without information."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step, informed = (sync.value_and_grad(mlp_loss, with_info=flag) for flag in (False, True))
        for number in range(3):
            _, grads = step(params, rank.put(batch(rank.number, number)))
            _, again, info = informed(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number))
            rank.check(again, means(number))
            assert info.all_finite


def mean_of_gradients(rank: Rank) -> None:
    """Gradients that exist, weighted."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        for number in range(3):
            grads = torch.func.grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            result = sync(grads, weight=rank.number + 1.0)
            del grads
            rank.check(result, means(number, weights=(1.0, 2.0)))


def several_streams(rank: Rank) -> None:
    """Gradients computed on two streams."""
    params = rank.put(mlp())
    side = torch.Stream(device=rank.device)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        current = torch.accelerator.current_stream()
        first, *others = p.values()
        side.wait_stream(current)
        with side:
            a = torch.tanh(x @ first["weight"] + first["bias"])
        a.record_stream(current)
        b = x
        for layer in others:
            b = torch.tanh(b @ layer["weight"] + layer["bias"])
        current.wait_stream(side)
        return (a * b).square().mean()

    def on_host(p: Any, x: Tensor) -> Tensor:
        first, *others = p.values()
        b = x
        for layer in others:
            b = torch.tanh(b @ layer["weight"] + layer["bias"])
        return (torch.tanh(x @ first["weight"] + first["bias"]) * b).square().mean()

    with fddp.GradSync(params, group=rank.group, **SMALL) as sync:
        step = sync.value_and_grad(loss_fn)
        for number in range(3):
            _, grads = step(params, rank.put(batch(rank.number, number)))
            inputs = [(batch(other, number),) for other in range(2)]
            rank.check(grads, mean_gradients(on_host, mlp(), inputs, [1.0, 1.0]))


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


def sparse(rank: Rank) -> None:
    """A sparse leaf beside a dense one."""
    host = {"table": torch.arange(30.0).double().reshape(10, 3), "w": torch.ones(3).double()}
    params = rank.put(host)

    def loss_fn(p: Any, index: Tensor) -> Tensor:
        rows = nn.functional.embedding(index, p["table"], sparse=True)
        return (rows * p["w"]).square().sum()

    def dense(p: Any, index: Tensor) -> Tensor:
        return (p["table"][index] * p["w"]).square().sum()

    indices = [torch.tensor([1, 1, 4]), torch.tensor([4, 7])]
    with fddp.GradSync(params, sparse=["table"], group=rank.group) as sync:
        for _ in range(2):
            _, grads = sync.value_and_grad(loss_fn)(params, rank.put(indices[rank.number]))
            grads["table"] = grads["table"].to_dense()
            expected = mean_gradients(dense, host, [(i,) for i in indices], [1.0, 1.0])
            rank.check(grads, expected, 1e-9)


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


def reduced_in_another_dtype(rank: Rank) -> None:
    """Buckets of a dtype other than that of their leaves."""
    params = rank.put(mlp())
    with fddp.GradSync(params, group=rank.group, reduce_dtype=torch.float32, **SMALL) as sync:
        for number in range(3):
            _, grads = sync.value_and_grad(mlp_loss)(params, rank.put(batch(rank.number, number)))
            rank.check(grads, means(number), 1e-6)


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
        try:
            sync(grads)
        except fddp.NonFiniteError as error:
            assert "layer1.bias" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a NaN passed")


def compressed(rank: Rank) -> None:
    """Hooks of the library."""
    params = rank.put(mlp())
    for hook, within in (
        (fddp.hooks.cast(torch.float16), 1e-2),
        (fddp.hooks.power_sgd(rank=8), 1e-6),
    ):
        with fddp.GradSync(params, group=rank.group, hook=hook, **SMALL) as sync:
            step, state = sync.value_and_grad(mlp_loss), sync.init_state()
            for number in range(3):
                x = rank.put(batch(rank.number, number))
                _, grads, state = step(params, x, hook_state=state)
                rank.check(grads, means(number), within)


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
        rank.check(fddp.broadcast_from(x * 2, 1, rank.group), both[1] * 2)
        grad = torch.func.grad(lambda v: fddp.pmean(v**2, rank.group).sum())(x)
        rank.check(grad, 2 * batch(rank.number, number))
        rank.check(fddp.broadcast({"x": x * 2}, group=rank.group), {"x": both[0] * 2})


def closed_in_flight(rank: Rank) -> None:
    """A step that fails with buckets in flight, and a closed sync."""
    params = rank.put(mlp())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("in backward")

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        first, *others = p.values()
        x = Fails.apply(torch.tanh(x @ first["weight"] + first["bias"]))
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


# The wrapper


def wrapped(rank: Rank, **options: Any) -> None:
    """Steps of a wrapped module, and the buffers that it broadcasts."""
    net = module(rank.device)
    if rank.number == 1:
        for p in net.parameters():
            p.data.zero_()  # replaced by those of rank 0
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP, **options)
    seen: list[Tensor] = []
    net[1].register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.clone()))
    for number in range(4):
        ddp.zero_grad()
        mean_square(ddp, rank.put(batch(rank.number, number))).backward()
        rank.check(_gradients(net), module_means(number, mean_square))
        rows = fddp.all_gather(seen.pop(), rank.group).cpu()
        assert torch.equal(rows[0], rows[1])


def wrapped_with_views(rank: Rank) -> None:
    """Gradients as views of the buckets."""
    wrapped(rank, gradient_as_bucket_view=True)


def accumulated(rank: Rank) -> None:
    """Two micro-batches, the first without communication."""
    net = module(rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            mean_square(ddp, rank.put(batch(rank.number, 0))).backward()
        mean_square(ddp, rank.put(batch(rank.number, 1))).backward()
        first, second = module_means(0, mean_square), module_means(1, mean_square)
        rank.check(_gradients(net), {name: first[name] + second[name] for name in first})


def hooked(rank: Rank) -> None:
    """Hooks of torch."""
    state = powerSGD_hook.PowerSGDState(
        rank.group, matrix_approximation_rank=8, start_powerSGD_iter=2
    )
    hooks: list[tuple[Any, Any, float]] = [
        (rank.group, default_hooks.allreduce_hook, EXACT),
        (rank.group, default_hooks.fp16_compress_hook, 1e-2),
        (state, powerSGD_hook.powerSGD_hook, 1e3),
    ]
    for own, hook, within in hooks:
        net = module(rank.device)
        ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
        ddp.register_comm_hook(own, hook)
        for number in range(3):
            ddp.zero_grad()
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
            rank.check(_gradients(net), module_means(number, mean_square), within)


def mixed(rank: Rank) -> None:
    """Mixed precision, whose casts run on a stream of their own."""
    made = _MixedPrecision(*[torch.float32] * 3)
    net = module(rank.device)
    ddp = fddp.DistributedDataParallel(
        net, process_group=rank.group, bucket_cap_mb=CAP, mixed_precision=made
    )
    for number in range(3):
        ddp.zero_grad()
        mean_square(ddp, rank.put(batch(rank.number, number))).backward()
        rank.check(_gradients(net), module_means(number, mean_square), 1e-4)


def joined(rank: Rank) -> None:
    """Uneven inputs."""
    net = module(rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    with ddp.join(divide_by_initial_world_size=False):
        for number in range(2 + rank.number):
            ddp.zero_grad()
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
            if number < 2:
                rank.check(_gradients(net), module_means(number, mean_square))


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    each.__name__: each
    for each in (
        *(value_and_grad, mean_of_gradients, several_streams, late_gradients, sparse, shards),
        *(
            reduced_in_another_dtype,
            several_dtypes,
            not_finite,
            compressed,
            operators,
            closed_in_flight,
        ),
        *(wrapped, wrapped_with_views, accumulated, hooked, mixed, joined),
    )
}


def run(
    number: int, names: tuple[str, ...], device_type: str, seeds: range
) -> dict[str, list[str]]:
    """Run scenarios on this rank, on "lag" with the delays of each seed; errors by scenario.

    The ranks are processes with a default group.
    """
    lags = device_type == "lag"
    if lags:
        lag.load()
    group = dist.new_group(backend=f"cpu:gloo,{device_type}:{'lag' if lags else 'gloo'}")
    device = torch.device(device_type, 0)
    failures: dict[str, list[str]] = {}
    for name in names:
        for seed in seeds:
            if lags:
                lag.load().seed(seed)
            try:
                SCENARIOS[name](Rank(number, group, device))
            except Exception as error:
                text = f"seed {seed}: {type(error).__name__}: {error}"
                failures.setdefault(name, []).append(text)
    return failures
