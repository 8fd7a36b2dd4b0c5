"""Gradients that autograd writes into their buckets; see [Note: gradients in place]."""

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
from fddp.native.pack import is_unused
from fddp.runtime.contributions import BackwardContributions

WIDTH = 192  # 147,456 bytes a leaf: large enough to be packed on arrival
LEAVES = 4
SMALL_BUCKETS = {"bucket_cap_mb": 0.28, "first_bucket_mb": 0.28}  # two leaves each
WARM_UP = 3  # steps until gradients are placed: the plan is rebuilt after the first

Params = list[Tensor]
Keep = Callable[[Tensor], Any]
_BUILDING = threading.Lock()  # ranks that are threads share the seed


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each backward pass of any rank, the number of gradients that stayed in their buckets."""
    counts: list[int] = []
    arrivals = BackwardContributions.arrivals

    def counting(self: BackwardContributions) -> Any:
        assert self.leaf_set is not None
        counts.append(self.leaf_set.in_place_count())
        return arrivals(self)

    monkeypatch.setattr(BackwardContributions, "arrivals", counting)
    return counts


def make_params(dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator).to(dtype) / 14 for _ in range(LEAVES)]


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, WIDTH, generator=generator).to(dtype)


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


def kept_by_hooks(params: Params, x: Tensor, keep: Keep) -> Tensor:
    for param in params:
        param.register_hook(keep)
    return chain(params, x, keep)


def clones_in_hooks(params: Params, x: Tensor, keep: Keep) -> Tensor:
    for param in params[::2]:
        param.register_hook(lambda grad: keep(grad.clone()))
    return chain(params, x, keep)


class _WithoutGradient(torch.autograd.Function):
    """Product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
        ctx.save_for_backward(param)
        return x @ param

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.saved_tensors[0].t(), None


def clones_and_none(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """A clone has the number of a gradient that is expected, but never arrives."""
    params[3].register_hook(lambda grad: keep(grad.clone()))
    x = _WithoutGradient.apply(x @ params[1], params[2])  # type: ignore[no-untyped-call]
    return chain(params[3:], x, keep)


def views_in_hooks(params: Params, x: Tensor, keep: Keep) -> Tensor:
    for param in params[1:]:
        param.register_hook(lambda grad: keep(grad.view(-1)[3:]))
    return chain(params, x, keep)


def data_in_hooks(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """Tensors over the memory of gradients, of which autograd does not know."""
    for param in params[1:]:
        param.register_hook(lambda grad: keep(grad.data))
    return chain(params, x, keep)


def arrays_in_hooks(params: Params, x: Tensor, keep: Keep) -> Tensor:
    for param in params:
        param.register_hook(lambda grad: keep(torch.from_numpy(grad.numpy())))
    return chain(params, x, keep)


def after_accumulation(params: Params, x: Tensor, keep: Keep) -> Tensor:
    for param in params:
        param.register_post_accumulate_grad_hook(lambda leaf: keep(leaf.grad.detach()))  # type: ignore[union-attr]
    return chain(params, x, keep)


def hooks_of_nodes(params: Params, x: Tensor, keep: Keep) -> Tensor:
    for param in params:
        node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda _, passed: keep(passed[0]))
    return chain(params, x, keep)


def upstream_hooks(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """Hooks of the nodes before the leaves keep what they pass on."""
    for param in params:
        y = x @ param
        y.grad_fn.register_hook(lambda passed, _: keep(passed[1]))  # type: ignore[union-attr]
        x = y.tanh()
    return x.square().sum()


def lazy_clones(params: Params, x: Tensor, keep: Keep) -> Tensor:
    """Clones over the memory of gradients, with storages of their own."""
    for param in params[:2]:
        param.register_hook(lambda grad: keep(torch._lazy_clone(grad)))
    return chain(params, x, keep)


def failing(params: Params, x: Tensor, keep: Keep) -> Tensor:
    def fail(grad: Tensor) -> None:
        keep(grad)
        raise ZeroDivisionError

    params[1].register_hook(fail)
    params[2].register_hook(keep)
    return chain(params, x, keep)


LOSSES = {
    loss.__name__: loss
    for loss in (
        chain,
        reversed_chain,
        skipping,
        used_twice,
        shared_gradient,
        transposed,
        wide_inputs,
        kept_by_hooks,
        clones_in_hooks,
        clones_and_none,
        views_in_hooks,
        data_in_hooks,
        arrays_in_hooks,
        after_accumulation,
        hooks_of_nodes,
        upstream_hooks,
        lazy_clones,
        failing,
    )
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


class TestPlacement:
    """Which gradients autograd writes into their buckets."""

    @pytest.mark.parametrize(
        "options",
        [{}, {"weights": True}, {"held": True}],
        ids=["default", "weights", "held"],
    )
    def test_repeated_steps_need_no_copy(
        self, in_place: list[int], options: dict[str, Any]
    ) -> None:
        run_loops([("chain", "chain")] * 8, **options)
        assert in_place[2 * WARM_UP :] == [LEAVES] * 2 * (8 - WARM_UP)

    def test_a_wrapper_places_all_but_the_first(self, in_place: list[int]) -> None:
        """Its steps begin when the first gradient is there."""
        run_wrapper([lambda model, x: model(x)] * 8)
        assert in_place[2 * WARM_UP :] == [LEAVES - 1] * 2 * (8 - WARM_UP)

    @pytest.mark.filterwarnings("ignore:Using backward")
    def test_gradients_with_graphs_are_not_placed(self, in_place: list[int]) -> None:
        """Nor do they count as wrong predictions."""
        run_wrapper([lambda model, x: model(x)] * 12, create_graph=range(4, 10))
        assert in_place[2 * 4 : 2 * 10] == [0] * 2 * 6
        assert in_place[-1] == LEAVES - 1

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
    def test_other_dtypes(self, in_place: list[int], dtype: torch.dtype) -> None:
        def loss(params: Params, x: Tensor) -> Tensor:
            terms = [(x @ param @ param.t()).abs().sum() for param in params]
            return torch.stack(terms).sum()

        def loop(group: Any) -> None:
            params = [torch.cat([param, -param]).t().to(dtype) for param in make_params()]
            with fddp.GradSync(params, group=group, **SMALL_BUCKETS) as sync:
                for number in range(6):
                    x = batch_of(0, number).to(dtype)
                    _, grads = sync.value_and_grad(loss)(params, x)
                    leaves = [param.clone().requires_grad_() for param in params]
                    expected = torch.autograd.grad(loss(leaves, x), leaves)
                    assert all(map(torch.equal, grads, expected))

        fddp.loopback(1, loop)
        assert in_place[-1] == LEAVES

    def test_tensors_of_other_threads_and_sizes_are_not_served(self, in_place: list[int]) -> None:
        """Only the thread of a backward pass takes memory of its buckets."""
        stop = threading.Event()
        found: list[bool] = []

        def allocate() -> None:
            while not stop.is_set():
                with torch.no_grad():
                    ours = [torch.full((WIDTH, WIDTH), float(i)) for i in range(8)]
                    found.append(all(bool((t == i).all()) for i, t in enumerate(ours)))

        thread = threading.Thread(target=allocate)
        thread.start()
        try:
            run_loops([("chain", "chain")] * 8)
        finally:
            stop.set()
            thread.join()
        assert all(found)
        assert in_place[-1] == LEAVES

    def test_infinite_gradients_are_found(self) -> None:
        def loop(group: Any) -> list[bool]:
            params = make_params()
            with fddp.GradSync(params, group=group, **SMALL_BUCKETS) as sync:
                step = sync.value_and_grad(lambda p, x: chain(p, x, lambda _: None), with_info=True)
                finite = []
                for number in range(7):
                    x = batch_of(group.rank, number)
                    if (group.rank, number) == (1, 5):
                        x[0, 0] = torch.inf
                    *_, info = step(params, x)
                    finite.append(bool(info.all_finite))
            return finite

        assert fddp.loopback(2, loop) == [[True] * 5 + [False, True]] * 2

    def test_a_step_leaves_no_owner_of_its_buckets(self) -> None:
        """Memory is unused once the results are gone."""

        def loop(group: Any) -> None:
            params = make_params()
            with fddp.GradSync(params, group=group, **SMALL_BUCKETS) as sync:
                step = sync.value_and_grad(lambda p, x: chain(p, x, lambda _: None))
                for number in range(6):
                    _, grads = step(params, batch_of(group.rank, number))
                released = [last for *_, last in sync._engine._pool._released.values()]
                assert not any(map(is_unused, released))
                del grads
                assert all(map(is_unused, released))

        fddp.loopback(2, loop)


class TestWrongPredictions:
    """Predictions that don't come true cost time only."""

    @pytest.mark.parametrize("name", [name for name in LOSSES if name != "chain"])
    def test_one_other_step(self, name: str) -> None:
        run_loops([("chain", "chain")] * 4 + [(name, "chain"), ("chain", name), (name, name)] * 2)

    @pytest.mark.parametrize("name", LOSSES)
    def test_repeated_steps(self, name: str) -> None:
        run_loops([(name, name)] * 6, held=True)

    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
    @given(
        names=st.lists(st.tuples(*[st.sampled_from(sorted(LOSSES))] * 2), min_size=4, max_size=9),
        held=st.booleans(),
        weights=st.booleans(),
    )
    def test_any_sequence(self, names: list[tuple[str, str]], held: bool, weights: bool) -> None:
        run_loops(names, held=held, weights=weights)

    def test_a_leaf_is_given_up(self, in_place: list[int]) -> None:
        """After a few steps in which its gradient was kept, it is copied in all further ones."""

        def keeping(params: Params, x: Tensor, keep: Keep) -> Tensor:
            params[2].register_hook(lambda grad: keep(grad.data))
            return chain(params, x, keep)

        def loop(group: Any) -> None:
            params, kept = make_params(), Kept()
            with fddp.GradSync(params, group=group, **SMALL_BUCKETS) as sync:
                step = sync.value_and_grad(lambda p, x: keeping(p, x, kept))
                for number in range(10):
                    step(params, batch_of(group.rank, number))
                plain = sync.value_and_grad(lambda p, x: chain(p, x, kept))
                for number in range(4):
                    plain(params, batch_of(group.rank, number))
            kept.check()

        fddp.loopback(1, loop)
        assert in_place[-3:] == [LEAVES - 1] * 3

    def test_a_small_leaf_with_a_view_of_another_slot(self) -> None:
        """Gradients of two leaves are parts of one tensor, as large as that of a third one."""

        def separate(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return (p["large"] * x).sum() + p["small"].square().sum()

        def joint(p: dict[str, Tensor], x: Tensor) -> Tensor:
            flat = torch.cat([p["small"], p["large"].flatten()[len(p["small"]) :]])
            return (flat * x.flatten()).sum()

        def loop(group: Any) -> None:
            params = {"large": torch.ones(WIDTH, 2 * WIDTH), "small": torch.ones(64)}
            with fddp.GradSync(params, group=group) as sync:
                for loss in [separate] * 4 + [joint, separate] * 4:
                    x = torch.randn(WIDTH, 2 * WIDTH)
                    _, grads = sync.value_and_grad(loss)(params, x)
                    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
                    loss(leaves, x).backward()  # type: ignore[no-untyped-call]
                    assert all(torch.equal(grads[k], leaf.grad) for k, leaf in leaves.items())

        fddp.loopback(1, loop)

    def test_kernels_that_allocate_without_tensors(self) -> None:
        """oneDNN's scratch memory has the size and the number of gradients of other steps."""
        gelu, linear = torch.nn.functional.gelu, torch.nn.functional.linear

        def products(p: Params, x: Tensor) -> Tensor:
            return (p[0] * x).sum() + (p[1] * x).sum()

        def layers(p: Params, x: Tensor) -> Tensor:
            return gelu(linear(gelu(p[0] @ x), p[1])).sum()

        def loop(group: Any) -> None:
            params = [torch.randn(256, 256) for _ in range(2)]
            with fddp.GradSync(params, group=group) as sync:
                for loss in [products] * 3 + [layers, products] * 3:
                    x = torch.randn(256, 256)
                    _, grads = sync.value_and_grad(loss)(params, x)
                    leaves = [param.clone().requires_grad_() for param in params]
                    expected = torch.autograd.grad(loss(leaves, x), leaves)
                    assert all(map(torch.equal, grads, expected))

        fddp.loopback(1, loop)

    def test_a_leaf_is_forgiven(self, in_place: list[int]) -> None:
        """Wrong predictions now and then do not add up."""
        run_loops([("data_in_hooks",), *[("chain",)] * 3] * 5)
        assert in_place[-1] == LEAVES

    @pytest.mark.parametrize("view", [False, True])
    @pytest.mark.parametrize("kind", ["keeping", "after", "bases", "of_nodes"])
    def test_hooks_under_a_wrapper(self, kind: str, view: bool) -> None:
        kept = Kept()

        def keeping(model: nn.Module, x: Tensor) -> Tensor:
            for param in model.parameters():
                param.register_hook(lambda grad: kept(grad.data))
            return model(x)  # type: ignore[no-any-return]

        def after(model: nn.Module, x: Tensor) -> Tensor:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda p: kept(p.grad.data))
            return model(x)  # type: ignore[no-any-return]

        def bases(model: nn.Module, x: Tensor) -> Tensor:
            """Gradients are views of tensors that hooks keep."""
            loss = model(x)
            nodes = [loss.grad_fn]
            while nodes:
                node = nodes.pop()
                if node is not None:
                    nodes += [further for further, _ in node.next_functions]
                    if node.name() == "TBackward0":
                        node.register_prehook(lambda passed: kept(passed[0]._base))
            return loss  # type: ignore[no-any-return]

        def of_nodes(model: nn.Module, x: Tensor) -> Tensor:
            for param in model.parameters():
                node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                node.register_hook(lambda _, passed: kept(passed[0]))
            return model(x)  # type: ignore[no-any-return]

        def plain(model: nn.Module, x: Tensor) -> Tensor:
            return model(x)  # type: ignore[no-any-return]

        change = {"keeping": keeping, "after": after, "bases": bases, "of_nodes": of_nodes}[kind]
        run_wrapper(
            [plain] * 4 + [change, *[plain] * 3],
            gradient_as_bucket_view=view,
        )
        kept.check()


def run_wrapper(
    forwards: Sequence[Callable[[nn.Module, Tensor], Tensor]],
    create_graph: Sequence[int] = (),
    **options: Any,
) -> None:
    """Train with a wrapper on two ranks, and compare each step with plain autograd.

    Args:
        forwards: forward pass of each step.
        create_graph: numbers of the steps whose gradients have graphs.
        options: options of the wrapper.
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LEAVES)))

    def train(group: Any) -> None:
        with _BUILDING:
            module, reference = build(), build()
        wrapped = fddp.DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=0.28, **options
        )
        for number, forward in enumerate(forwards):
            module.zero_grad()
            loss = forward(wrapped, batch_of(group.rank, number)).square().sum()
            loss.backward(create_graph=number in create_graph)
            reference.zero_grad()
            for rank in range(2):
                (reference(batch_of(rank, number)).square().sum() / 2).backward()
            for own, other in zip(module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(own.grad, other.grad)

    fddp.loopback(2, train)
