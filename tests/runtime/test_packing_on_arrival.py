"""Large gradients are packed and released on arrival: steps with changing graphs and hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fddp
from fddp.native import extension

WIDTH = 192  # 147,456 bytes a leaf: large enough to be packed on arrival
LEAVES = 4
SMALL_BUCKETS = {"bucket_cap_mb": 0.28, "first_bucket_mb": 0.28}  # two leaves each

Params = list[Tensor]
Keep = Callable[[Tensor], Any]
_BUILDING = threading.Lock()  # ranks that are threads share the seed


def make_params() -> Params:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / 14 for _ in range(LEAVES)]


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, WIDTH, generator=generator)


def chain(params: Params, x: Tensor, keep: Keep) -> Tensor:
    for param in params:
        x = (x @ param).tanh()
    return x.square().sum()


def reversed_chain(params: Params, x: Tensor, keep: Keep) -> Tensor:
    return chain(params[::-1], x, keep)


def skipping(params: Params, x: Tensor, keep: Keep) -> Tensor:
    return chain(params[:1] + params[3:], x, keep)


def used_twice(params: Params, x: Tensor, keep: Keep) -> Tensor:
    return chain([params[0], *params], x, keep)


def shared_gradient(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """Autograd passes one tensor to two leaves."""
    return chain([params[0] + params[1], *params[2:]], x, keep)


def transposed(params: Params, x: Tensor, keep: Keep) -> Tensor:
    return chain([param.t() for param in params], x, keep)


def wide_inputs(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """Gradients of activations have the size of those of parameters, and are kept."""
    tall = x.repeat(WIDTH, 1)[:WIDTH]
    for param in params:
        tall = tall @ param
        tall.register_hook(keep)
    return tall.tanh().square().sum()


class _WithoutGradient(torch.autograd.Function):
    """Product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
        ctx.save_for_backward(param)
        return x @ param

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.saved_tensors[0].t(), None


def without_gradient(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """A gradient that is expected never arrives."""
    x = _WithoutGradient.apply(x @ params[1], params[2])  # type: ignore[no-untyped-call]
    return chain(params[3:], x, keep)


def upstream_hooks(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """Hooks of the nodes before the leaves keep what they pass on."""
    for param in params:
        y = x @ param
        y.grad_fn.register_hook(lambda passed, _: keep(passed[1]))  # type: ignore[union-attr]
        x = y.tanh()
    return x.square().sum()


def failing(params: Params, x: Tensor, keep: Keep) -> Tensor:
    def fail(grad: Tensor) -> None:
        keep(grad)
        raise ZeroDivisionError

    params[1].register_hook(fail)
    params[2].register_hook(keep)
    return chain(params, x, keep)


Register = Callable[[Tensor, Keep], object]

HOOKS: dict[str, Register] = {
    "hooks": lambda leaf, keep: leaf.register_hook(keep),
    "views in hooks": lambda leaf, keep: leaf.register_hook(lambda g: keep(g.view(-1)[3:])),
    # Tensors over the memory of gradients, of which autograd does not know.
    "data in hooks": lambda leaf, keep: leaf.register_hook(lambda g: keep(g.data)),
    "arrays in hooks": lambda leaf, keep: leaf.register_hook(
        lambda g: keep(torch.from_numpy(g.numpy()))
    ),
    # Clones over the memory of gradients, with storages of their own.
    "lazy clones": lambda leaf, keep: leaf.register_hook(lambda g: keep(torch._lazy_clone(g))),
    "hooks after accumulation": lambda leaf, keep: leaf.register_post_accumulate_grad_hook(
        lambda leaf: keep(leaf.grad.data)  # type: ignore[union-attr]
    ),
    "hooks of nodes": lambda leaf, keep: (
        leaf.expand_as(leaf)
        .grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        .register_hook(lambda _, passed: keep(passed[0]))
    ),
}


def hooked(register: Register) -> Callable[[Params, Tensor, Keep], Tensor]:
    """A loss with hooks on all leaves but the first."""

    def loss(params: Params, x: Tensor, keep: Keep) -> Tensor:
        for param in params[1:]:
            register(param, keep)
        return chain(params, x, keep)

    return loss


PLAIN = (
    chain,
    reversed_chain,
    skipping,
    used_twice,
    shared_gradient,
    transposed,
    wide_inputs,
    without_gradient,
    upstream_hooks,
    failing,
)
LOSSES = {
    **{loss.__name__: loss for loss in PLAIN},
    **{name: hooked(register) for name, register in HOOKS.items()},
}


class Kept:
    """Tensors that a caller keeps from a backward pass, with their values at that time."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, tensor: Tensor) -> None:
        self.pairs.append((tensor, tensor.clone()))

    def check(self) -> None:
        for tensor, value in self.pairs:
            torch.testing.assert_close(tensor, value, rtol=0, atol=0)


def gradients(name: str, rank: int, step: int, params: Params) -> list[Tensor]:
    """One rank's gradients, by plain autograd."""
    leaves = [param.clone().requires_grad_() for param in params]
    loss = LOSSES[name](leaves, batch_of(rank, step), lambda _: None)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]


def run_loops(steps: Sequence[Sequence[str]], *, held: bool = False, weights: bool = False) -> None:
    """On each rank, run steps of the named losses, and check gradients and what hooks kept.

    Args:
        steps: losses of each step, by rank.
        held: keep all results, as a caller may.
        weights: weigh rank r's gradients with r + 1.
    """
    params = make_params()

    def run_step(
        sync: fddp.GradSync, group: Any, number: int, names: Sequence[str], kept: Kept
    ) -> None:
        scales = [rank + 1.0 if weights else 1.0 for rank in range(len(names))]
        step = sync.value_and_grad(
            lambda p, x: LOSSES[names[group.rank]](p, x, kept),
            weight_fn=lambda p, x: scales[group.rank],
        )
        _, grads = step(params, batch_of(group.rank, number))
        parts = [gradients(name, rank, number, params) for rank, name in enumerate(names)]
        for found, *own in zip(grads, *parts, strict=True):
            total = sum(scale * grad for scale, grad in zip(scales, own, strict=True))
            if found is None:  # used on no rank
                assert not total.any()
                continue
            torch.testing.assert_close(found, total / sum(scales))
            if held:
                kept(found)

    def loop(group: Any) -> None:
        kept = Kept()
        with fddp.GradSync(params, group=group, **SMALL_BUCKETS) as sync:
            for number, names in enumerate(steps):
                if "failing" in names:
                    with pytest.raises((ZeroDivisionError, fddp.FddpError)):
                        run_step(sync, group, number, names, kept)
                else:
                    run_step(sync, group, number, names, kept)
                kept.check()

    fddp.loopback(len(steps[0]), loop)


def test_a_step_leaves_no_owner_of_its_buckets() -> None:
    """Memory is unused once the results are gone."""

    def loop(group: Any) -> None:
        params = make_params()
        with fddp.GradSync(params, group=group, **SMALL_BUCKETS) as sync:
            step = sync.value_and_grad(lambda p, x: chain(p, x, lambda _: None))
            for number in range(3):
                _, grads = step(params, batch_of(group.rank, number))
            pool = sync._engine._pool
            released = [entry.buffers()[-1] for entry in pool._released.values()]
            assert all(extension.compiled.storage_use_count(buffer) > 1 for buffer in released)
            del grads
            assert all(extension.compiled.storage_use_count(buffer) == 1 for buffer in released)

    fddp.loopback(2, loop)


@pytest.mark.parametrize("name", LOSSES)
def test_one_other_step(name: str) -> None:
    run_loops([("chain", "chain"), (name, "chain"), (name, name), ("chain", "chain")], held=True)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20)
@given(
    names=st.lists(st.tuples(*[st.sampled_from(sorted(LOSSES))] * 2), min_size=4, max_size=9),
    held=st.booleans(),
    weights=st.booleans(),
)
def test_any_sequence(names: list[tuple[str, str]], held: bool, weights: bool) -> None:
    run_loops(names, held=held, weights=weights)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_under_a_wrapper(kind: str, view: bool) -> None:
    """Each step as plain autograd has it; what hooks kept in the third does not change."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LEAVES)))

    def train(group: Any) -> None:
        kept = Kept()
        with _BUILDING:
            module, reference = build(), build()
        wrapped = fddp.DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=0.28, gradient_as_bucket_view=view
        )
        for number in range(4):
            module.zero_grad()
            for param in module.parameters() if number == 2 else ():
                HOOKS[kind](param, kept)
            wrapped(batch_of(group.rank, number)).square().sum().backward()
            reference.zero_grad()
            for rank in range(2):
                (reference(batch_of(rank, number)).square().sum() / 2).backward()
            for own, other in zip(module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(own.grad, other.grad)
        kept.check()

    fddp.loopback(2, train)
