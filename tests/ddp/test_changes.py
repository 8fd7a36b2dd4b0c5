"""A wrapped module whose parameters, buffers or group change, and where ranks begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from tests.support.groups import rank_of
from tests.support.models import rand
from tests.support.parity_models import UndefinedGradients
from tests.support.ranks import Launch, RankPool
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    WIDTH,
    assert_close,
    batch,
    grads,
    mean_of,
    net,
    run_backward,
)

# Parameters


def unfrozen(group: Any) -> list[Any]:
    model = net()
    model.layers["l1"].requires_grad_(False)
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    run_backward(ddp, group)
    frozen = grads(model)
    ddp.zero_grad()
    model.layers["l1"].requires_grad_(True)
    model.layers["l0"].requires_grad_(False)
    run_backward(ddp, group)
    both = [frozen, grads(model)]
    ddp.zero_grad()
    model.layers["l2"] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for p in model.layers["l2"].parameters():
            p.fill_(0.25)
    for number in range(2):
        ddp.zero_grad()
        run_backward(ddp, group, number)
    return [*both, grads(model), ddp.steps.engine.program.plan.paths]


def test_frozen_unfrozen_and_replaced_parameters(launch: Launch) -> None:
    def partly(frozen: str) -> dict[str, Any]:
        model = net()
        model.layers[frozen].requires_grad_(False)
        (sum(model(batch(r)).square().mean() for r in range(2)) / 2).backward()
        return grads(model)

    replaced = net()
    replaced.layers["l0"].requires_grad_(False)
    replaced.layers["l2"] = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for p in replaced.layers["l2"].parameters():
            p.fill_(0.25)
    (sum(replaced(batch(r, 1)).square().mean() for r in range(2)) / 2).backward()
    for first, second, third, paths in launch(2, unfrozen):
        assert_close(first, partly("l1"))
        assert_close(second, partly("l0"))
        assert_close(third, grads(replaced))
        assert "layers.l1.weight" in paths


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


def test_parameters_that_change_on_one_rank_are_an_error_on_all(launch: Launch) -> None:
    (first, on_first), (second, on_second) = launch(2, unfrozen_on_one_rank)
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
    return [*found, grads(model)]


@pytest.mark.parametrize("place", ["input", "loss"])
def test_failed_step_is_reported_after_parameters_changed(launch: Launch, place: str) -> None:
    first, second = launch(2, unfrozen_before_a_bad_batch, place)
    assert first[0] == (
        "PeerError: rank 1 failed at step 1: ValueError: no data here; no gradients were produced "
        "on any rank; the group is in step and can go on"
    )
    assert second[0] == "ValueError: no data here"
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for *_, found in (first, second):
        assert_close(found, wanted)


def undefined_after_unfreezing(group: Any) -> list[dict[str, Any]]:
    """Gradients before and after a parameter is unfrozen; some of them are undefined."""
    torch.manual_seed(0)
    model = UndefinedGradients(by_batch=False)
    model.last.requires_grad_(False)
    ddp = DDP(model, process_group=group)
    found = []
    for frozen in (True, False):
        model.last.requires_grad_(not frozen)
        ddp.zero_grad()
        run_backward(ddp, group)
        found.append(grads(model))
    return found


def test_undefined_gradients_are_zeros_in_the_step_after_a_change(launch: Launch) -> None:
    for before, after in launch(2, undefined_after_unfreezing):
        for name in ("scales.1", "scales.3"):
            assert not before[name].any()
            assert not after[name].any()
        assert before["last.weight"] is None
        assert after["last.weight"].any()


def heads(group: Any) -> bool:
    """New heads in the place of old ones, which may get the address of those."""
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    trunk = nn.Sequential(model["body"], model["head"])
    ddp = DDP(trunk, process_group=group)
    for number in range(8):
        ddp(torch.ones(1, 2) * (1 + rank_of(group))).sum().backward()
        if ddp.module[1].weight.grad is None:
            return False
        ddp.zero_grad()
        if number % 2 == rank_of(group):
            _ballast = [nn.Linear(2, 2) for _ in range(3)]
        del model["head"], trunk[1]
        model["head"] = nn.Linear(2, 2)
        trunk.append(model["head"])
    return True


def test_a_new_layer_is_noticed_at_any_address(launch: Launch) -> None:
    assert launch(2, heads) == [True, True]


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


def layer_replaced(rank: int, world_size: int) -> list[Any]:
    """Per class: gradients after a layer was replaced by one with the same parameter."""
    found = []
    for wrapped in (StockDDP, DDP):
        model = wrapped(nn.Sequential(FactorLayer(nn.Parameter(torch.ones(2)))))
        engine = model.steps.engine if wrapped is DDP else None
        model.module[0] = FactorLayer(model.module[0].factor)
        seen = []
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(3 * rank, 2)).sum().backward()
            seen.append(model.module[0].factor.grad.tolist())
        found.append(seen)
    return [*found, model.steps.engine is engine]


def frozen_and_replaced(group: Any) -> list[Any]:
    """Gradients after rank 1 froze a parameter and all ranks replaced its layer, and the engine."""
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
        factors[0].requires_grad_(step == 2 or rank_of(group) == 0)
        model.module[1] = FactorLayer(factors[1])
        model(torch.ones(2, 2)).sum().backward()
        seen.append([factor.grad.tolist() for factor in factors if factor.grad is not None])
    return [seen, model.steps.engine is engine]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_a_frozen_parameter_stays_in_the_plan_if_modules_change(launch: Launch) -> None:
    for seen, kept in launch(2, frozen_and_replaced):
        assert seen == [[[1.0, 1.0], [2.0, 2.0]]] * 2 + [[[2.0, 2.0], [2.0, 2.0]]]
        assert kept


def test_other_modules_with_the_same_parameters_are_no_change(ranks: RankPool) -> None:
    for stock, ours, kept in ranks.run(2, layer_replaced):
        assert ours == stock == [[1.5, 1.5]] * 3
        assert kept


def parameters_of_hooks(group: Any) -> set[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()

    def hook(state: Any, bucket: Any) -> Any:
        seen.add(tuple(id(p) for p in bucket.parameters()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = net()
    model.layers["l2"].requires_grad_(False)
    ddp = DDP(model, process_group=group)
    ddp.register_comm_hook(None, hook)
    ddp(batch(0)).square().mean().backward()
    model.layers["l2"].requires_grad_(True)
    ddp(batch(0)).square().mean().backward()
    ids = {id(p): n for n, p in model.named_parameters()}
    return {tuple(sorted(ids[i] for i in found)) for found in seen}


def test_hooks_see_the_parameters_as_they_are(launch: Launch) -> None:
    every = tuple(sorted(n for n, _ in net().named_parameters()))
    for seen in launch(2, parameters_of_hooks):
        assert every in seen


# The start


def start(group: Any) -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean += rank_of(group)
    tied = nn.ModuleList([model, model[0]])
    DDP(tied, process_group=group)
    return [p.tolist() for p in (*model.parameters(), *model.buffers())]


def test_parameters_and_buffers_start_as_rank_zeros(launch: Launch) -> None:
    first, second = launch(2, start)
    assert first == second


def other_shapes(group: Any, what: str) -> str:
    width = WIDTH + rank_of(group) if what == "shape" else WIDTH
    layers = [
        nn.Linear(WIDTH, width) for _ in range(1 + (rank_of(group) if what == "count" else 0))
    ]
    with pytest.raises(fddp.PlanMismatchError) as caught:
        DDP(nn.Sequential(*layers), process_group=group)
    return str(caught.value)


@pytest.mark.parametrize("what", ["shape", "count"])
def test_ranks_that_differ_are_an_error_on_all(launch: Launch, what: str) -> None:
    for text in launch(2, other_shapes, what):
        assert "rank 0 has" in text
        assert "rank 1 has" in text


# Buffers


class Scaled(nn.Module):
    """Needs its buffer in backward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0 + rank]))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def two_forwards(group: Any) -> list[Any]:
    model = Scaled(rank_of(group))
    ddp = DDP(model, process_group=group)
    before = model.scale
    one = ddp(torch.ones(1))
    is_same = model.scale is before
    if rank_of(group) == 0:
        model.scale = torch.tensor([5.0])  # reassigned: rank 1 gets it, too
    two = ddp(torch.ones(1))
    (one + two).sum().backward()
    return [is_same, model.scale.item(), model.weight.grad.item()]


def test_a_second_forward_does_not_overwrite_saved_tensors(launch: Launch) -> None:
    assert launch(2, two_forwards) == [[True, 5.0, 7.0], [True, 5.0, 7.0]]


# Wrappers


def wrapped_again(group: Any) -> dict[str, Any]:
    model = net()
    for _ in range(3):
        ddp = DDP(model, process_group=group)
        run_backward(ddp, group)
        ddp.zero_grad()
        del ddp
    ddp = DDP(model, process_group=group)
    run_backward(ddp, group)
    return grads(model)


def test_a_module_can_be_wrapped_again(launch: Launch) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for found in launch(2, wrapped_again):
        assert_close(found, wanted)


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
def test_gradients_have_the_strides_of_changed_parameters(
    launch: Launch, options: dict[str, Any]
) -> None:
    module = Convolutions()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(7):
        optimizer.zero_grad()
        for rank in range(2):
            (module(rand(2, 3, 6, 6, seed=10 * step + rank)).square().sum() / 2).backward()
        if step < 5:
            optimizer.step()
    for params, found, strides in launch(2, converted, options):
        for name, param in module.named_parameters():
            torch.testing.assert_close(params[name], param.detach())
            torch.testing.assert_close(found[name], param.grad)
        assert all(of_param in (of_grad, None) for of_grad, of_param in strides)
