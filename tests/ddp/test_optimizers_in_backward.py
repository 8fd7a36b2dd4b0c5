"""Hooks that run when a parameter has its gradient, under the wrapper: they see the mean."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.models import rand
from tests.support.wrapped_net import DDP

RANKS, STEPS, WIDTH = 2, 4, 6
TINY_CAP_MB = 1e-5  # a bucket for each parameter


class Net(nn.Module):
    """Layers, one of which is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(rand(*param.shape, seed=number))

    def forward(self, x: Tensor, leave_out: bool = False) -> Tensor:
        for layer in self.layers[1 if leave_out else 0 :]:
            x = torch.tanh(layer(x))
        return x


def batch(rank: int, step: int) -> Tensor:
    return rand(4, WIDTH, seed=100 * step + rank)


def train_in_backward(module: nn.Module, momentum: float = 0.9) -> list[int]:
    """Let an optimizer of each parameter step in backward and free the gradient, as torch's
    tutorial and torchtune do. Return the list of parameters whose hooks have run."""
    params = list(module.parameters())
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=momentum) for p in params}
    ran: list[int] = []

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()
        ran.append(next(i for i, p in enumerate(params) if p is param))

    for param in params:
        param.register_post_accumulate_grad_hook(step)
    return ran


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def one_process(*, skips: bool = False) -> list[Tensor]:
    """The same training in one process, with the batches of all ranks."""
    net = Net()
    train_in_backward(net)
    for step in range(STEPS):
        outs = [net(batch(r, step), skips and r == 1) for r in range(RANKS)]
        (sum(out.square().mean() for out in outs) / RANKS).backward()  # type: ignore[union-attr]
    return weights(net)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": TINY_CAP_MB},
    "views": {"gradient_as_bucket_view": True},
    "unused announced": {"find_unused_parameters": True},
    "unused left out": {"skip_all_reduce_unused_params": True, "bucket_cap_mb": TINY_CAP_MB},
    "static": {"static_graph": True},
    "non-finite": {"nonfinite": "skip"},
    "lazy": {"lazy_bucket_allocation": True},
    "virtual": {"virtual_ranks": RANKS},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("first", ["hooks", "wrapper"])
def test_optimizers_in_hooks_train_as_in_one_process(name: str, first: str) -> None:
    def run(group: Any) -> list[Tensor]:
        net = Net()
        if first == "hooks":
            train_in_backward(net)
        ddp = DDP(net, process_group=group, **OPTIONS[name])
        if first == "wrapper":
            train_in_backward(net)
        for step in range(STEPS):
            ddp(batch(group.rank, step)).square().mean().backward()
            assert all(p.grad is None for p in net.parameters())
        return weights(net)

    first_rank, second_rank = fddp.loopback(RANKS, run)
    torch.testing.assert_close(first_rank, second_rank, rtol=0, atol=0)
    torch.testing.assert_close(first_rank, one_process())


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_a_rank_that_does_not_use_a_parameter_runs_its_hooks() -> None:
    def run(group: Any) -> tuple[list[Tensor], list[int]]:
        net = Net()
        ran = train_in_backward(net)
        ddp = DDP(net, process_group=group, find_unused_parameters=True)
        for step in range(STEPS):
            ddp(batch(group.rank, step), group.rank == 1).square().mean().backward()
        return weights(net), ran

    (one, ran), (two, also_ran) = fddp.loopback(RANKS, run)
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.testing.assert_close(one, one_process(skips=True))
    assert ran == also_ran  # in one order
    assert sorted(ran) == sorted(STEPS * list(range(6)))


def test_virtual_ranks_run_hooks_once_a_step() -> None:
    def run(group: Any) -> list[Tensor]:
        net = Net()
        ran = train_in_backward(net)
        ddp = DDP(net, process_group=group, virtual_ranks=RANKS)
        for step in range(STEPS):
            with ddp.no_sync():
                ddp(batch(0, step)).square().mean().backward()
            ddp(batch(1, step)).square().mean().backward()
        assert len(ran) == STEPS * 6
        return weights(net)

    torch.testing.assert_close(fddp.loopback(1, run)[0], one_process())


def test_delayed_parameters_are_averaged_although_their_trigger_has_hooks() -> None:
    def run(group: Any) -> list[float]:
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        delayed, trigger = net[1].weight, net[0].weight
        ddp = DDP(
            net,
            process_group=group,
            delay_all_reduce_named_params=[("1.weight", delayed)],
            param_to_hook_all_reduce=trigger,
        )
        seen: list[float] = []
        trigger.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        with torch.no_grad():
            delayed.fill_(1.0)
            trigger.fill_(1.0)
        ddp(torch.tensor([[1.0 + group.rank]])).sum().backward()
        return [*seen, delayed.grad.item()]

    assert fddp.loopback(RANKS, run) == [[1.5, 1.5]] * 2


# When hooks run


def linear(group: Any, **options: Any) -> tuple[Any, nn.Linear]:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return DDP(layer, process_group=group, **options), layer


def run_step(ddp: Any, rank: int) -> None:
    """Whose gradient is 1 on rank 0, and 2 on rank 1."""
    ddp(torch.tensor([[1.0 + rank]])).sum().backward()


def test_hooks_run_on_the_thread_of_backward_whenever_they_were_added() -> None:
    def run(group: Any) -> list[Any]:
        ddp, layer = linear(group)
        seen: list[Any] = []

        def note(param: Tensor) -> None:
            assert param is layer.weight
            assert param.grad is not None
            seen.append((param.grad.item(), threading.get_ident() == caller))

        caller = threading.get_ident()
        out = ddp(torch.tensor([[1.0 + group.rank]]))
        handle = layer.weight.register_post_accumulate_grad_hook(note)  # after forward
        out.sum().backward()
        layer.weight.register_post_accumulate_grad_hook(note)  # a second one
        ddp.zero_grad()
        run_step(ddp, group.rank)
        handle.remove()
        ddp.zero_grad()
        run_step(ddp, group.rank)
        return seen

    assert fddp.loopback(RANKS, run) == [[(1.5, True)] * 4] * 2


def test_hooks_replaced_as_a_whole_are_deferred_too() -> None:
    def run(group: Any) -> list[float]:
        ddp, layer = linear(group)
        seen: list[float] = []
        for _ in range(2):
            layer.weight._post_accumulate_grad_hooks = None
            layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
            ddp.zero_grad()
            run_step(ddp, group.rank)
        return seen

    assert fddp.loopback(RANKS, run) == [[1.5, 1.5]] * 2


def test_hooks_outlive_the_wrapper_and_serve_the_next() -> None:
    def run(group: Any) -> list[float]:
        seen: list[float] = []
        layer = linear(group)[1]
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        for _ in range(2):
            layer.weight.grad = None
            run_step(DDP(layer, process_group=group), group.rank)
            layer.weight.grad = None
            layer(torch.tensor([[1.0 + group.rank]])).sum().backward()
        return seen

    assert fddp.loopback(RANKS, run) == [[1.5, 1.0] * 2, [1.5, 2.0] * 2]


def test_two_wrappers_of_one_module_share_its_hooks() -> None:
    def run(group: Any) -> list[float]:
        seen: list[float] = []
        ddp, layer = linear(group)
        other = DDP(layer, process_group=group)
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        for wrapper in (ddp, other, ddp, other):
            layer.weight.grad = None
            run_step(wrapper, group.rank)
        layer.weight.register_post_accumulate_grad_hook(clear)
        run_step(ddp, group.rank)
        run_step(other, group.rank)
        assert layer.weight.grad is None
        return seen

    assert fddp.loopback(RANKS, run) == [[1.5] * 4 + [3.0, 1.5]] * 2


def test_hooks_of_a_failed_or_skipped_step_do_not_run() -> None:
    def run(group: Any) -> int:
        ddp, layer = linear(group, nonfinite="skip")
        ran = train_in_backward(layer)
        try:
            with ddp.in_step():
                loss = ddp(torch.ones(1, 1)).sum()
                if group.rank == 1:
                    raise ValueError("a bad batch")
                loss.backward()
        except (ValueError, fddp.PeerError):
            pass
        (ddp(torch.ones(1, 1)).sum() * (float("nan") if group.rank else 1.0)).backward()
        assert ddp.skipped
        assert not ran
        run_step(ddp, group.rank)
        return len(ran)

    assert fddp.loopback(RANKS, run) == [1, 1]


def test_an_error_in_a_hook_is_raised_by_backward_and_training_goes_on() -> None:
    def run(group: Any) -> list[str]:
        ddp, layer = linear(group)
        said = []

        def fail(param: Tensor) -> None:
            if group.rank == 1 and not said:
                raise ValueError("of a hook")

        layer.weight.register_post_accumulate_grad_hook(fail)
        for _ in range(2):
            try:
                ddp.zero_grad()
                run_step(ddp, group.rank)
                said.append(f"{layer.weight.grad.item()}")
            except ValueError as error:
                said.append(str(error))
        return said

    assert fddp.loopback(RANKS, run) == [["1.5", "1.5"], ["of a hook", "1.5"]]


# Passes without a step


def test_under_no_sync_hooks_see_the_local_sum_so_far() -> None:
    def run(group: Any) -> list[float]:
        ddp, layer = linear(group)
        seen: list[float] = []
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        with ddp.no_sync():
            run_step(ddp, group.rank)
        run_step(ddp, group.rank)
        return seen

    assert fddp.loopback(RANKS, run) == [[1.0, 3.0], [2.0, 3.0]]


def clear(param: Tensor) -> None:
    param.grad = None


def decay(param: Tensor) -> None:
    with torch.no_grad():
        param.mul_(0.9)


@pytest.mark.parametrize("hook", [clear, decay], ids=["clears", "changes"])
def test_under_no_sync_a_hook_that_trains_is_an_error_on_every_rank(
    hook: Callable[[Tensor], None],
) -> None:
    def run(group: Any, policy: Any) -> None:
        ddp, layer = linear(group, local_gradients=policy)
        layer.weight.register_post_accumulate_grad_hook(hook)
        with ddp.no_sync():
            if policy == "allow":
                run_step(ddp, group.rank)
                return
            said = f"^rank {group.rank}: a post-accumulate-grad hook of weight changed"
            with pytest.raises(fddp.errors.ReplicationError, match=said) as raised:
                run_step(ddp, group.rank)
            assert raised.value.path == "weight"

    for policy in ("warn", "raise", "allow"):
        fddp.loopback(RANKS, run, policy)


def test_under_manual_finalization_hooks_run_at_once_and_may_not_train() -> None:
    def run(group: Any) -> list[Any]:
        ddp, layer = linear(group)
        ddp.require_manual_backward_finalization = True
        seen: list[Any] = []

        def note(param: Tensor) -> None:
            seen.append(param.grad.item())

        handle = layer.weight.register_post_accumulate_grad_hook(note)
        run_step(ddp, group.rank)
        ddp.finalize_backward()
        handle.remove()
        layer.weight.register_post_accumulate_grad_hook(clear)
        with pytest.raises(fddp.errors.ReplicationError, match="hook of weight"):
            run_step(ddp, group.rank)
        return seen

    assert fddp.loopback(RANKS, run) == [[1.0], [2.0]]


# The table of docs/ddp.md


def test_what_each_kind_of_hook_sees() -> None:
    def run(group: Any) -> dict[str, list[float | None]]:
        seen: dict[str, list[float | None]] = {}

        def note(name: str, value: Tensor | None) -> None:
            seen.setdefault(name, []).append(None if value is None else value.item())

        ddp, layer = linear(group)
        weight = layer.weight
        node = get_gradient_edge(weight).node
        weight.register_hook(lambda grad: note("register_hook", grad))
        weight.register_post_accumulate_grad_hook(lambda p: note("post accumulate", p.grad))
        node.register_prehook(lambda grads: note("prehook of the edge", grads[0]))
        node.register_hook(lambda _, grads: note("hook of the edge", grads[0]))
        layer.register_full_backward_hook(lambda m, i, o: note("module", m.weight.grad))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: note("optimizer", weight.grad))
        ddp(torch.tensor([[1.0 + group.rank]], requires_grad=True)).sum().backward()
        optimizer.step()
        return seen

    for rank, seen in enumerate(fddp.loopback(RANKS, run)):
        own = [1.0 + rank]
        assert seen == {
            "register_hook": own,
            "prehook of the edge": own,
            "hook of the edge": own,
            "module": [None],
            "post accumulate": [1.5],
            "optimizer": [1.5],
        }


# Unusual programs


def test_hooks_may_call_the_wrapper() -> None:
    """To evaluate, and to run a step of another loss."""

    def run(group: Any) -> list[float]:
        ddp, layer = linear(group, gradient_as_bucket_view=True)
        seen: list[float] = []

        def evaluate(param: Tensor) -> None:
            with torch.no_grad():
                seen.append(ddp(torch.ones(1, 1)).item())
            if group.rank == 0 and param.grad is not None:
                seen.append(param.grad.item())

        handle = layer.weight.register_post_accumulate_grad_hook(evaluate)
        for _ in range(2):
            run_step(ddp, group.rank)
        handle.remove()
        rest = [2]

        def train(param: Tensor) -> None:
            rest[0] -= 1
            if rest[0]:
                with torch.enable_grad():
                    run_step(ddp, group.rank)

        layer.weight.register_post_accumulate_grad_hook(train)
        run_step(ddp, group.rank)
        return [*seen, layer.weight.grad.item()]

    first, second = fddp.loopback(RANKS, run)
    assert first == [1.0, 1.5, 1.0, 3.0, 6.0]
    assert second == [1.0, 1.0, 6.0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_wrapper_in_a_checkpoint(reentrant: bool) -> None:
    def run(group: Any) -> list[Tensor]:
        net = Net()
        ran = train_in_backward(net)
        ddp = DDP(net, process_group=group)
        for step in range(STEPS):
            x = batch(group.rank, step).requires_grad_()
            checkpoint(ddp, x, use_reentrant=reentrant).square().mean().backward()
        assert len(ran) == STEPS * 6
        return weights(net)

    one, two = fddp.loopback(RANKS, run)
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.testing.assert_close(one, one_process())


def test_forward_alone_outside_of_no_sync() -> None:
    def run(group: Any) -> None:
        ddp, layer = linear(group)
        layer.weight.register_post_accumulate_grad_hook(clear)
        out = ddp(torch.ones(1, 1)).sum()
        with ddp.no_sync(), pytest.raises(fddp.errors.ReplicationError, match="hook of weight"):
            out.backward()

    fddp.loopback(RANKS, run)


def test_nested_wrappers_run_hooks_once() -> None:
    def run(group: Any) -> list[float]:
        ddp, layer = linear(group)
        seen: list[float] = []
        outer = DDP(ddp, process_group=group)
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        for _ in range(2):
            layer.weight.grad = None
            run_step(outer, group.rank)
        return seen

    assert fddp.loopback(RANKS, run) == [[1.5, 1.5]] * 2


def test_a_hook_that_clears_all_gradients_leaves_the_other_hooks() -> None:
    def run(group: Any) -> int:
        net = Net()
        ran: list[Tensor] = []

        def hook(param: Tensor) -> None:
            ran.append(param)
            net.zero_grad()

        for param in net.parameters():
            param.register_post_accumulate_grad_hook(hook)
        DDP(net, process_group=group)(batch(0, 0)).sum().backward()
        return len(ran)

    assert fddp.loopback(1, run) == [6]


def test_a_hook_may_wait_for_a_thread_that_calls_the_wrapper() -> None:
    def run(group: Any) -> float:
        ddp, layer = linear(group)

        def evaluate() -> None:
            with torch.no_grad():
                ddp(torch.ones(1, 1))

        def hook(_: Tensor) -> None:
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join(60.0)
            assert not thread.is_alive()

        layer.weight.register_post_accumulate_grad_hook(hook)
        run_step(ddp, group.rank)
        return layer.weight.grad.item()

    assert fddp.loopback(1, run) == [1.0]
