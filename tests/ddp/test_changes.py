"""A wrapped module whose parameters, buffers or group change, and where ranks begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fddp
from tests.support.beside_stock import beside_stock
from tests.support.groups import rank_of
from tests.support.models import rand
from tests.support.parity_models import UndefinedGradients
from tests.support.ranks import RankPool
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    assert_close,
    batch,
    grads,
    mean_of,
    net,
    run_backward,
)

# Parameters


def unfrozen_on_one_rank(group: Any) -> tuple[str, list[str]]:
    """The error, and the names of gradients that the failed step left behind."""
    model = net()
    model.layers["l1"].requires_grad_(False)
    ddp = DDP(model, process_group=group)
    ddp(batch(rank_of(group))).sum().backward()
    ddp.zero_grad()
    if rank_of(group) == 0:
        model.layers["l1"].requires_grad_(True)
    with pytest.raises(fddp.FddpError) as caught:
        ddp(batch(rank_of(group))).sum().backward()
    left = [name for name, grad in grads(model).items() if grad is not None]
    return f"{type(caught.value).__name__}: {caught.value}", left


def test_parameters_that_change_on_one_rank_are_an_error_on_all() -> None:
    (first, on_first), (second, on_second) = fddp.loopback(2, unfrozen_on_one_rank)
    assert on_first == on_second == []
    assert "the parameters of the wrapped module have changed on rank 0" in first
    assert "but not on rank 1" in first
    assert second.startswith("PeerError")
    assert "ParametersChangedError: this rank's parameters have changed; freeze, unfreeze" in second


def unfrozen_before_a_bad_batch(group: Any, place: str) -> list[Any]:
    """Parameters change ahead of step 1, which fails on rank 1."""
    model, rank, found = net(), rank_of(group), []
    model.layers["l1"].requires_grad_(False)
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    for number in range(3):
        ddp.zero_grad()
        if number == 1:
            model.layers["l1"].requires_grad_(True)
        try:
            with ddp.in_step():
                if (number, rank, place) == (1, 1, "input"):
                    raise ValueError("no data here")
                out = ddp(batch(rank))
                if (number, rank, place) == (1, 1, "loss"):
                    raise ValueError("no data here")
                out.square().mean().backward()
        except (ValueError, fddp.FddpError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return [*found, ddp.steps.engine.step, grads(model)]


@pytest.mark.parametrize("place", ["input", "loss"])
def test_failed_step_is_reported_after_parameters_changed(place: str) -> None:
    first, second = fddp.loopback(2, unfrozen_before_a_bad_batch, place)
    assert first[0] == (
        "PeerError: rank 1 failed at step 1: ValueError: no data here; no gradients were produced "
        "on any rank; the group is in step and can go on"
    )
    assert second[0] == "ValueError: no data here"
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for *_, steps, found in (first, second):
        assert steps == 4, "a new plan counts on, and step 2 was repeated"
        assert_close(found, wanted)


def test_undefined_gradients_are_zeros_in_the_step_after_a_change() -> None:
    def run(group: Any) -> None:
        torch.manual_seed(0)
        model = UndefinedGradients(by_batch=False)
        ddp = DDP(model, process_group=group)
        for frozen in (True, False):
            model.last.requires_grad_(not frozen)
            ddp.zero_grad()
            run_backward(ddp, group)
            found = grads(model)
            for name in ("scales.1", "scales.3"):
                assert not found[name].any()
            assert (found["last.weight"] is None) == frozen

    fddp.loopback(2, run)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_gradients_to_which_nothing_is_added_are_kept(find: bool) -> None:
    def run(group: Any) -> None:
        model = UndefinedGradients(by_batch=False)
        ddp = DDP(model, process_group=group, find_unused_parameters=find)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        run_backward(ddp, group)
        kept = [
            name for name, grad in grads(model).items() if torch.equal(grad, torch.ones_like(grad))
        ]
        assert kept == ["scales.1", "scales.3"]

    fddp.loopback(2, run)


def test_a_new_layer_is_noticed_at_any_address() -> None:
    """New heads in the place of old ones, which may get the address of those."""

    def run(group: Any) -> None:
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        trunk = nn.Sequential(model["body"], model["head"])
        ddp = DDP(trunk, process_group=group)
        for number in range(8):
            ddp(torch.ones(1, 2) * (1 + group.rank)).sum().backward()
            assert ddp.module[1].weight.grad is not None
            ddp.zero_grad()
            if number % 2 == group.rank:
                _ballast = [nn.Linear(2, 2) for _ in range(3)]
            del model["head"], trunk[1]
            model["head"] = nn.Linear(2, 2)
            trunk.append(model["head"])

    fddp.loopback(2, run)


class Factor(torch.autograd.Function):
    """As in SyncBatchNorm, the gradient of the factor is undefined for an empty batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum(0) if len(x) else None


class FactorLayer(nn.Module):
    def __init__(self, factor: nn.Parameter) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return Factor.apply(x, self.factor)


@beside_stock()
def test_other_modules_with_the_same_parameters_are_no_change(ddp: Any, rank: int) -> Iterator[Any]:
    """A layer is replaced by one with the same parameter."""
    model = ddp(nn.Sequential(FactorLayer(nn.Parameter(torch.ones(2)))))
    engine = model.steps.engine if ddp is DDP else None
    model.module[0] = FactorLayer(model.module[0].factor)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(3 * rank, 2)).sum().backward()
        yield model.module[0].factor.grad.tolist()
    assert ddp is not DDP or model.steps.engine is engine


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_a_frozen_parameter_stays_in_the_plan_if_modules_change() -> None:
    """Rank 1 freezes a parameter, and all ranks replace its layer."""

    def run(group: Any) -> list[Any]:
        factors = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        model = DDP(
            nn.Sequential(*map(FactorLayer, factors)),
            process_group=group,
            find_unused_parameters=True,
        )
        engine = model.steps.engine
        seen = []
        for step in range(3):
            model.zero_grad()
            factors[0].requires_grad_(step == 2 or group.rank == 0)
            model.module[1] = FactorLayer(factors[1])
            model(torch.ones(2, 2)).sum().backward()
            seen.append([factor.grad.tolist() for factor in factors if factor.grad is not None])
        assert model.steps.engine is engine
        return seen

    due = [[[1.0, 1.0], [2.0, 2.0]]] * 2 + [[[2.0, 2.0], [2.0, 2.0]]]
    assert fddp.loopback(2, run) == [due] * 2


def test_hooks_see_the_parameters_as_they_are() -> None:
    def run(group: Any) -> None:
        seen: set[int] = set()

        def hook(state: Any, bucket: Any) -> Any:
            seen.update(map(id, bucket.parameters()))
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model = net()
        model.layers["l2"].requires_grad_(False)
        ddp = DDP(model, process_group=group)
        ddp.register_comm_hook(None, hook)
        for frozen in (True, False):
            model.layers["l2"].requires_grad_(not frozen)
            run_backward(ddp, group)
            assert seen == {id(p) for p in model.parameters() if p.requires_grad}

    fddp.loopback(2, run)


# The start


def test_parameters_and_buffers_start_as_rank_zeros() -> None:
    def run(group: Any) -> list[Any]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].running_mean += group.rank
        tied = nn.ModuleList([model, model[0]])
        DDP(tied, process_group=group)
        return [p.tolist() for p in (*model.parameters(), *model.buffers())]

    first, second = fddp.loopback(2, run)
    assert first == second


# Buffers


class Scaled(nn.Module):
    """Needs its buffer in backward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0 + rank]))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def test_a_second_forward_does_not_overwrite_saved_tensors() -> None:
    def run(group: Any) -> None:
        model = Scaled(group.rank)
        ddp = DDP(model, process_group=group)
        before = model.scale
        one = ddp(torch.ones(1))
        assert model.scale is before
        if group.rank == 0:
            model.scale = torch.tensor([5.0])  # reassigned: rank 1 gets it, too
        two = ddp(torch.ones(1))
        (one + two).sum().backward()
        assert model.scale.item() == 5.0
        assert model.weight.grad.item() == 7.0

    fddp.loopback(2, run)


# Wrappers


def other_group(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    ddp.register_comm_hook(None, fddp.hooks.bf16_compress)
    ddp(batch(rank)).square().mean().backward()
    ddp._update_process_group(dist.new_group([0, 1]))
    ddp.zero_grad()
    ddp(batch(rank)).square().mean().backward()
    return [ddp.steps.engine.hook == fddp.hooks.bf16_compress, str(grads(ddp.module))]


def test_another_group_keeps_the_hook(ranks: RankPool) -> None:
    first, second = ranks.run(2, other_group)
    assert first[0]
    assert first == second


# Strides


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2))
        self.double()
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(rand(*param.shape, seed=i) / 3)


def convert(module: nn.Module, step: int, rank: int) -> None:
    if step in (2, 4):
        module.to(memory_format=torch.channels_last if step == 2 else torch.contiguous_format)
    if step == 3 and rank == 1:
        module[0].weight.data = module[0].weight.data.transpose(0, 3).clone().transpose(0, 3)
    if step == 5:  # elements that do not lie side by side; gradients are then row-major
        module[0].weight.data = torch.cat([module[0].weight.data] * 2, 1)[:, :3]


def converted(group: Any, options: dict[str, Any]) -> list[Any]:
    module = Convolutions()
    ddp = DDP(module, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, fused=True)
    strides = []
    for step in range(7):
        convert(module, step, rank_of(group))
        optimizer.zero_grad()
        ddp(rand(2, 3, 6, 6, seed=10 * step + rank_of(group))).square().sum().backward()
        strides += [
            (p.grad.stride(), None if step >= 5 and p is module[0].weight else p.stride())
            for p in module.parameters()
        ]
        if step < 5:  # fused optimizers take dense parameters
            optimizer.step()
    return [{n: p.detach() for n, p in module.named_parameters()}, grads(module), strides]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": TINY_CAP_MB}],
    ids=["default", "views", "small caps"],
)
def test_gradients_have_the_strides_of_changed_parameters(options: dict[str, Any]) -> None:
    module = Convolutions()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(7):
        optimizer.zero_grad()
        for rank in range(2):
            (module(rand(2, 3, 6, 6, seed=10 * step + rank)).square().sum() / 2).backward()
        if step < 5:
            optimizer.step()
    for params, found, strides in fddp.loopback(2, converted, options):
        for name, param in module.named_parameters():
            torch.testing.assert_close(params[name], param.detach())
            torch.testing.assert_close(found[name], param.grad)
        assert all(of_param in (of_grad, None) for of_grad, of_param in strides)


def resized(group: Any) -> list[Any]:
    """Gradients after the memory of a parameter was replaced by one of another shape."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    ddp = fddp.DistributedDataParallel(model, process_group=group)
    found = []
    for width in (2, 5, 5, 3):
        model[0].weight.data = torch.ones(2, width)
        model[1].weight.data.fill_(2.0)
        ddp.zero_grad()
        ddp(torch.full((1, width), 1.0 + group.rank)).sum().backward()
        found.append(model[0].weight.grad.tolist())
    return found


def test_data_of_another_shape_is_followed() -> None:
    # The gradient is the input times 2, on average 3.
    want = [[[3.0] * width] * 2 for width in (2, 5, 5, 3)]
    assert fddp.loopback(2, resized) == [want] * 2


def whole_module(ddp: Any) -> None:
    ddp.double()


def inner_module(ddp: Any) -> None:
    ddp.module.double()


def each_parameter(ddp: Any) -> None:
    for param in ddp.parameters():
        param.grad = None
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().double()))


def swapped(group: Any, swap: Callable[[Any], None], ranks: Sequence[int]) -> Any:
    ddp = DDP(nn.Linear(2, 1).float(), process_group=group)
    inputs = torch.full((1, 2), 1.0 + group.rank)
    ddp(inputs).sum().backward()
    before = list(ddp.parameters())
    if group.rank in ranks:
        swap(ddp)
    found = []
    for _ in range(2):
        ddp.zero_grad()
        try:
            ddp(inputs.to(ddp.module.weight.dtype)).sum().backward()
        except fddp.errors.FddpError as error:
            return str(error)
        found.append((ddp.module.weight.grad.tolist(), ddp.module.weight.grad.dtype))
    assert all(map(is_, before, ddp.parameters()))
    return found


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("swap", [whole_module, inner_module, each_parameter])
def test_swapped_parameters_are_followed(swap: Callable[[Any], None]) -> None:
    for found in fddp.loopback(2, swapped, swap, range(2)):
        assert found == [([[1.5, 1.5]], torch.float64)] * 2
    for text in fddp.loopback(2, swapped, swap, [1]):
        assert "parameters" in text
        assert "changed" in text


class Sharing(nn.Module):
    """Counts in one buffer, of which another is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("first", self.counts[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.counts.add_(1.0)
        return self.layer(x) * self.first


def test_buffers_that_share_memory_go_on_sharing_it() -> None:
    def run(group: Any) -> list[float]:
        ddp = fddp.DistributedDataParallel(Sharing(), process_group=group)
        found = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
            found.append(ddp.module.layer.bias.grad[0].item())
        return found

    assert fddp.loopback(2, run) == [[1.0, 2.0, 3.0]] * 2
