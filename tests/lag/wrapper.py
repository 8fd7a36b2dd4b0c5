"""What the wrapper of a module does on a device, each compared with one process on the CPU."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

import fddp
from fddp.ddp.weights import Weights
from tests.lag.rank import CAP, EXACT, Rank, gradients, mean_square, module, module_means, slow
from tests.support.endings import ending
from tests.support.groups import init_rpc
from tests.support.models import batch, rand


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
        rank.check(gradients(net), module_means(number, mean_square))
        rows = fddp.all_gather(seen.pop(), rank.group).cpu()
        assert torch.equal(rows[0], rows[1])


def wrapped_with_views(rank: Rank) -> None:
    """Gradients as views of the buckets."""
    wrapped(rank, gradient_as_bucket_view=True)


class Moved(nn.Module):
    """Its input on another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self._device)


def on_two_devices(rank: Rank) -> tuple[nn.Sequential, nn.Sequential]:
    """A module on the host, and one like it with layers on two devices."""
    there = rank.other
    host = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8)).double()
    for number, p in enumerate(host.parameters()):
        p.data = rand(*p.shape, seed=number)
    first, _, last = copy.deepcopy(host)
    return host, nn.Sequential(first.to(rank.device), Moved(there), last.to(there))


def virtual_on_two_devices(rank: Rank) -> None:
    """A wrapper with virtual ranks, of a module with layers on two devices."""
    if torch.accelerator.device_count() < 2:
        return
    host, net = on_two_devices(rank)
    ddp = fddp.DistributedDataParallel(
        net, process_group=rank.group, virtual_ranks=4, bucket_cap_mb=CAP
    )
    for step in range(3):
        ddp.zero_grad()
        for number in ddp.carried_ranks:
            is_last = number == ddp.carried_ranks[-1]
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                mean_square(ddp, rank.put(batch(number, step))).backward()
        host.zero_grad()
        for number in range(4):
            (mean_square(host, batch(number, step)) / 4).backward()
        rank.check(gradients(net), gradients(host))


class Table(nn.Module):
    """A table of rows, with sparse gradients or dense ones, before a layer."""

    def __init__(self, device: torch.device, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 8, sparse=sparse).double().to(device)
        self.layer = nn.Linear(8, 8).double().to(device)

    def forward(self, index: Tensor) -> Tensor:
        return self.layer(self.table(index))


def wrapped_with_a_table(rank: Rank) -> None:
    """Sparse gradients of one parameter, accumulated over two micro-batches and of one."""

    def rows_of(number: int, owner: int) -> Tensor:
        return torch.tensor([1, 1 + owner, 4 + number, 4 + 2 * owner])

    def expected(numbers: tuple[int, ...]) -> dict[str, Tensor]:
        net = Table(torch.device("cpu"), sparse=False)
        for number in numbers:
            for owner in range(2):
                (mean_square(net, rows_of(number, owner)) / 2).backward()
        return gradients(net)

    net = Table(rank.device, sparse=True)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for numbers in ((0,), (0, 1), (2,)):
        ddp.zero_grad()
        for number in numbers[:-1]:
            with ddp.no_sync():
                mean_square(ddp, rank.put(rows_of(number, rank.number))).backward()
        mean_square(ddp, rank.put(rows_of(numbers[-1], rank.number))).backward()
        found = gradients(net)
        assert found["table.weight"].is_sparse
        found["table.weight"] = found["table.weight"].to_dense()
        rank.check(found, expected(numbers))


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
        rank.check(gradients(net), {name: first[name] + second[name] for name in first})


def weighted(rank: Rank) -> None:
    """Two micro-batches with weights, which are tensors of the device, and one of them 0."""
    weights = torch.tensor([[3.0, 2.0], [0.0, 5.0]])
    expected: dict[str, Tensor] = {}
    for owner, number in ((0, 0), (0, 1), (1, 1)):
        net = module(torch.device("cpu"))
        mean_square(net, batch(owner, number)).backward()
        for name, grad in gradients(net).items():
            own = grad * weights[owner, number] / weights.sum()
            expected[name] = expected.get(name, torch.zeros_like(grad)) + own
    net = module(rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for step in range(4):
        ddp.zero_grad(set_to_none=step < 2)
        for number in range(2):
            x = rank.put(batch(rank.number, number))
            if weights[rank.number, number] == 0.0:
                x.fill_(float("nan"))
            own = rank.put(weights[rank.number, number])
            with ddp.weighted(own), contextlib.nullcontext() if number else ddp.no_sync():
                mean_square(ddp, x).backward()
        rank.check(gradients(net), expected)


class Beside(nn.Module):
    """Layers side by side, each on a device."""

    def __init__(self, *devices: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8).double().to(each) for each in devices])

    def forward(self, x: Tensor) -> Tensor:
        found = [layer(x.to(layer.weight.device)).to(x.device) for layer in self.layers]
        return torch.stack(found).sum(0)


def weighted_on_two_devices(rank: Rank) -> None:
    """Passes with weights, which are counted once, before the first gradient of either device."""
    if torch.accelerator.device_count() < 2:
        return
    found, count = list[bool](), Weights._before_first

    def count_late(weights: Weights) -> None:
        time.sleep(0.1)
        found.append(any(p.grad is not None for p in net.parameters()))
        count(weights)

    host, net = Beside(*[torch.device("cpu")] * 2), Beside(rank.device, rank.other)
    with mock.patch.object(Weights, "_before_first", count_late):
        ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for number in range(3):
        ddp.zero_grad()
        with ddp.weighted(1.0 + rank.number):
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
        host.zero_grad()
        for owner in range(2):
            (mean_square(host, batch(owner, number)) * (1.0 + owner) / 3).backward()
        rank.check(gradients(net), gradients(host))
        assert found == [False] * (number + 1)


def frozen(rank: Rank) -> None:
    """A module whose first layer is frozen at first."""
    net = module(rank.device)
    net[0].requires_grad_(False)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for number in range(4):
        net[0].requires_grad_(number >= 2)
        ddp.zero_grad()
        mean_square(ddp, rank.put(batch(rank.number, number))).backward()
        found, expected = gradients(net), module_means(number, mean_square)
        assert ("0.weight" in found) == (number >= 2)
        rank.check(found, {name: expected[name] for name in found})


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
            rank.check(gradients(net), module_means(number, mean_square), within)


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
        rank.check(gradients(net), module_means(number, mean_square), 1e-4)


def joined(rank: Rank) -> None:
    """Uneven inputs, and futures of a hook on buffers, which also a rank without input awaits."""
    net, made, awaited = module(rank.device), [], []

    class Noted:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            awaited.append(self)
            self.work.wait()

    def average(group: Any, buffers: dict[str, Tensor]) -> list[Any]:
        numbers = [each for each in buffers.values() if each.is_floating_point()]
        works = [torch.distributed.all_reduce(n, group=group, async_op=True) for n in numbers]
        made.extend(map(Noted, works))
        return made[-len(works) :]

    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    ddp._register_buffer_comm_hook(rank.group, average, _BufferCommHookLocation.POST_FORWARD)
    with ddp.join(divide_by_initial_world_size=False):
        for number in range(2 + rank.number):
            ddp.zero_grad()
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
            if number < 2:
                rank.check(gradients(net), module_means(number, mean_square))
    assert len(made) > 0
    assert awaited == made


class Branches(nn.Module):
    """A module of which some layers run on other streams.

    Args:
        sides: layers on other streams.
    """

    def __init__(self, device: torch.device, sides: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]).double().to(device)
        self.streams = {n: torch.Stream(device=device) for n in sides if device.type != "cpu"}

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for number, layer in enumerate(self.layers):
            stream = self.streams.get(number)
            if stream is None:
                total = total + torch.tanh(layer(x))
                continue
            current = torch.accelerator.current_stream(x.device)
            stream.wait_stream(current)
            with stream:
                y = slow(torch.tanh(layer(x)))
            y.record_stream(current)
            current.wait_stream(stream)
            total = total + y
        return total


def branch_means(number: int) -> dict[str, Tensor]:
    """Mean gradients of `Branches`."""
    found: dict[str, Tensor] = {}
    for rank in range(2):
        net = Branches(torch.device("cpu"), ())
        mean_square(net, batch(rank, number)).backward()
        for name, grad in gradients(net).items():
            found[name] = found.get(name, 0) + grad / 2
    return found


def wrapped_on_streams(rank: Rank) -> None:
    """Modules of which the first or the last layers run on other streams."""
    for sides in ((0, 1), (3,), (0, 1, 2, 3)):
        net = Branches(rank.device, sides)
        ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
        for number in range(3):
            ddp.zero_grad()
            mean_square(ddp, rank.put(batch(rank.number, number))).backward()
            rank.check(gradients(net), branch_means(number))


def wrapped_within_a_stream(rank: Rank) -> None:
    """A module that was wrapped, and given hooks, within another stream than it is trained on:
    https://github.com/NVIDIA/Megatron-LM/issues/3670."""
    net, side = module(rank.device), torch.Stream(device=rank.device)
    side.wait_stream(torch.accelerator.current_stream(rank.device))
    with side:
        ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
        for p in net.parameters():
            p.register_hook(lambda grad: slow(grad) * 2)
    torch.accelerator.current_stream(rank.device).wait_stream(side)
    for number in range(3):
        ddp.zero_grad()
        mean_square(ddp, rank.put(batch(rank.number, number))).backward()
        doubled = {name: grad * 2 for name, grad in module_means(number, mean_square).items()}
        rank.check(gradients(net), doubled)


def trained_within_a_stream(rank: Rank) -> None:
    """Iterations with an optimizer, without a wait of the host, on another stream than that on
    which the module was wrapped."""
    for report in ("now", "next"):
        side = torch.Stream(device=rank.device)
        found = []
        for device in (rank.device, torch.device("cpu")):
            net = module(device)
            ddp = fddp.DistributedDataParallel(
                net, process_group=rank.group, bucket_cap_mb=CAP, report=report
            )
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            side.wait_stream(torch.accelerator.current_stream(rank.device))
            with side:
                for number in range(5):
                    optimizer.zero_grad()
                    mean_square(ddp, batch(rank.number, number).to(device)).backward()
                    optimizer.step()
            torch.accelerator.current_stream(rank.device).wait_stream(side)
            ddp.check()
            found.append(dict(net.named_parameters()))
        rank.check(*found)


def backward_within_a_stream(rank: Rank) -> None:
    """Backward passes, and reads of gradients, on another stream than forward passes. A hook has
    the last operation of the step take long."""
    net, side = module(rank.device), torch.Stream(device=rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)

    def mean_late(group: Any, bucket: Any) -> Any:
        sent = default_hooks.allreduce_hook(group, bucket)
        return sent.then(lambda future: slow(future.value()))

    ddp.register_comm_hook(rank.group, mean_late)
    for number in range(3):
        ddp.zero_grad()
        loss = mean_square(ddp, rank.put(batch(rank.number, number)))
        side.wait_stream(torch.accelerator.current_stream(rank.device))
        with side:
            loss.backward()
            rank.check(gradients(net), module_means(number, mean_square))


def backward_within_a_stream_of_a_second_device(rank: Rank) -> None:
    """Backward passes, and reads of gradients, within another stream of one of two devices, whose
    own is busy. Gradients are added there."""
    if torch.accelerator.device_count() < 2:
        return
    host, net = on_two_devices(rank)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    there = rank.other
    home, away = torch.accelerator.current_stream(there), torch.Stream(device=there)
    busy = torch.ones(1, device=there).double()
    for number in range(3):
        ddp.zero_grad(set_to_none=False)
        host.zero_grad()
        for each in range(2):
            (mean_square(host, batch(each, number)) / 2).backward()
        loss = mean_square(ddp, rank.put(batch(rank.number, number)))
        away.wait_stream(home)
        for _ in range(6):
            slow(busy)
        with away:
            torch.accelerator.set_device_index(rank.device.index)
            loss.backward()
            # First those of this device: reading the others would wait.
            rank.check(gradients(net[2]), gradients(host[2]))
            rank.check(gradients(net[0]), gradients(host[0]))
        home.wait_stream(away)


def raised_on_home(rank: Rank) -> None:
    """What a step has issued before it raises, read on the stream of its caller."""
    net, side = module(rank.device), torch.Stream(device=rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    mean_square(ddp, rank.put(batch(rank.number, 0))).backward()
    hooks = ddp.steps.parameters.hooks
    for _ in range(3):
        restored = torch.zeros(1, device=rank.device).double()

        def fail() -> None:
            restored.copy_(slow(torch.ones_like(restored)))  # noqa: B023
            raise ArithmeticError

        hooks.note_home()
        side.wait_stream(torch.accelerator.current_stream(rank.device))
        with side:
            assert ending(lambda: hooks.on_home_streams(fail)).kinds[0] == "ArithmeticError"
            rank.check({"restored": restored}, {"restored": torch.ones(1).double()})


def wrapped_in_contexts(rank: Rank) -> None:
    """Gradients in contexts of distributed autograd, on another stream than the step before, which
    used no parameter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module(rank.device)

        def forward(self, x: Tensor, *, use: bool = True) -> Tensor:
            return self.layers(x) if use else x * 1

    net = Net()
    before, here = (torch.Stream(device=rank.device) for _ in range(2))
    ddp = fddp.DistributedDataParallel(
        net, process_group=rank.group, bucket_cap_mb=CAP, find_unused_parameters=True
    )
    for p in net.parameters():
        p.register_hook(slow)
    store = [f"{tempfile.mkdtemp()}/store" if rank.number == 0 else ""]
    dist.broadcast_object_list(store, group=rank.group)
    init_rpc(rank.number, store[0])
    for number in range(3):
        x = rank.put(batch(rank.number, number)).requires_grad_()
        before.wait_stream(torch.accelerator.current_stream(rank.device))
        with before:
            ddp(x, use=False).sum().backward()
        here.wait_stream(torch.accelerator.current_stream(rank.device))
        with here, dist_autograd.context() as context:
            dist_autograd.backward(context, [mean_square(ddp, x)])
            found = dist_autograd.get_gradients(context)
            own = {name: found[p] for name, p in net.layers.named_parameters()}
            rank.check(own, module_means(number, mean_square))
    rpc.shutdown()


def delayed(rank: Rank) -> None:
    """Parameters that are averaged once another one has its gradient."""
    net = Branches(rank.device, (0, 3))
    ddp = fddp.DistributedDataParallel(
        net,
        process_group=rank.group,
        bucket_cap_mb=CAP,
        delay_all_reduce_named_params=[
            (f"layers.{n}.{name}", p)
            for n in (0, 3)
            for name, p in net.layers[n].named_parameters()
        ],
        param_to_hook_all_reduce=net.layers[0].weight,
    )
    for number in range(3):
        ddp.zero_grad()
        mean_square(ddp, rank.put(batch(rank.number, number))).backward()
        rank.check(gradients(net), branch_means(number))


def buffers_by_a_hook(rank: Rank) -> None:
    """Buffers that a hook averages while the forward pass runs."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8).double()
            self.register_buffer("mean", torch.zeros(300).double())
            self.seen = self.mean

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.mean * 1
            return self.layer(x)

    def average(group: Any, buffers: dict[str, Tensor]) -> list[Any]:
        options = torch.distributed.ReduceOp.SUM
        return [
            torch.distributed.all_reduce(b, options, group=group, async_op=True).get_future()
            for b in buffers.values()
        ]

    net = Counts().to(rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    ddp._register_buffer_comm_hook(rank.group, average, _BufferCommHookLocation.POST_FORWARD)
    for number in range(3):
        x, total = rank.put(batch(rank.number, number)), torch.full((300,), 3.0 + 2 * number)
        net.mean.fill_(1.0 + rank.number + number)
        ddp(x)
        loss = mean_square(ddp, x)
        rank.check({"mean": net.seen}, {"mean": total})
        loss.backward()
        rank.check({"mean": net.mean}, {"mean": total * 2})


def moved_inputs(rank: Rank) -> None:
    """Inputs on the host and on another device, which the wrapper moves."""
    net = module(rank.device)
    ddp = fddp.DistributedDataParallel(
        net, device_ids=[rank.device.index], process_group=rank.group, bucket_cap_mb=CAP
    )
    places = [torch.device("cpu"), rank.other]
    for number in range(4):
        ddp.zero_grad()
        x = batch(rank.number, number).to(places[number % 2])
        mean_square(ddp, x).backward()
        del x
        rank.check(gradients(net), module_means(number, mean_square))


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("in backward")


def failed_in_flight(rank: Rank) -> None:
    """A backward pass that fails on one rank while buckets travel, then steps of two modules."""

    def fail_behind(layer: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(_fail)

    nets = [module(rank.device) for _ in range(2)]
    ddps = [
        fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
        for net in nets
    ]
    for number in range(3):
        x = rank.put(batch(rank.number, number))
        if rank.number == 1:
            handle = nets[0][0].register_forward_hook(fail_behind)
        try:
            with ddps[0].in_step():
                mean_square(ddps[0], x).backward()
        except (ArithmeticError, fddp.PeerError):
            pass
        else:
            raise AssertionError("no error")
        if rank.number == 1:
            handle.remove()
        losses = []
        for ddp in ddps:
            ddp.zero_grad()
            losses.append(mean_square(ddp, x))
        for net, loss in zip(nets, losses, strict=True):
            loss.backward()
            rank.check(gradients(net), module_means(number, mean_square))


def aborted(rank: Rank) -> None:
    """A backward pass that fails on one rank, outside of `in_step`. What the caller does with the
    gradients then lasts."""

    net = module(rank.device)
    ddp = fddp.DistributedDataParallel(net, process_group=rank.group, bucket_cap_mb=CAP)
    for number in range(8):
        x = rank.put(batch(rank.number, number))
        ddp.zero_grad()
        loss = mean_square(ddp, x)
        if rank.number == 1:
            handle = net[0].weight.register_hook(_fail)
        try:
            loss.backward()
        except (ArithmeticError, fddp.PeerError):
            pass
        else:
            raise AssertionError("no error")
        own = [torch.full_like(p, 5.0) for p in net.parameters()]
        for p, grad in zip(net.parameters(), own, strict=True):
            p.grad = grad
        if rank.number == 1:
            handle.remove()
        loss = mean_square(ddp, x)  # which waits for the end of the pass
        assert all(p.grad is grad for p, grad in zip(net.parameters(), own, strict=True))
        ddp.zero_grad()
        loss.backward()
        rank.check(gradients(net), module_means(number, mean_square))
