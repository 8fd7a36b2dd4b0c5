"""A module as a function: the values of torch's `functional_call`, and nothing else touched."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fddp


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.again = nn.Module()
        self.again.register_buffer("scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.round().long().abs().clamp(max=6)).mean(-2)
        return self.head(hidden) * self.scale * self.again.scale


class Counting(nn.Module):
    """Writes one buffer in place, and puts another in the place of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.mean(0).detach()
        return self.linear(x) * self.calls


def old_style(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = norm(nn.Linear(4, 3))
    module(torch.ones(2, 4))  # which leaves a tensor with a graph in an attribute
    return module


EXAMPLES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "evaluated": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()).eval(),
    "tied": Tied,
    "counting": Counting,
    "recurrent": lambda: nn.LSTM(4, 3, num_layers=2),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "older weight norm": lambda: old_style(nn.utils.weight_norm),
    "older spectral norm": lambda: old_style(nn.utils.spectral_norm),
}
X = torch.linspace(-2, 2, 12).reshape(3, 4)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def other(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(value.shape, generator=generator).to(value.dtype) + 0.5
        for name, value in tensors.items()
    }


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def called(
    module: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """By torch, which writes the buffers that it is given."""
    merged = {**params, **cloned(buffers)}
    output = functional_call(module, merged, (X,))
    return output, {name: merged[name] for name in buffers}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_as_functional_call(name: str) -> None:
    module = EXAMPLES[name]()
    apply, params, buffers = fddp.functionalize(module)
    assert {n: id(p) for n, p in params.items()} == {n: id(p) for n, p in module.named_parameters()}
    assert {n: id(b) for n, b in buffers.items()} == {n: id(b) for n, b in module.named_buffers()}
    own = cloned({**params, **buffers})
    new_params, new_buffers = other(params), other(buffers)
    before = cloned({**new_params, **new_buffers})
    for _ in range(2):  # the second time, nothing of the first is left
        for param in new_params.values():
            param.requires_grad_()
        result, expected_buffers = called(module, new_params, new_buffers)
        expected = first(result)
        output, after = apply(new_params, new_buffers, X)
        assert torch.equal(first(output), expected)
        assert equal(after, expected_buffers)
        used = list(new_params.values())
        grads = torch.autograd.grad(first(output).square().sum(), used, allow_unused=True)
        wanted = torch.autograd.grad(expected.square().sum(), used, allow_unused=True)
        for grad, want in zip(grads, wanted, strict=True):
            assert (grad is None) is (want is None)
            assert grad is None or torch.allclose(grad, want, rtol=1e-5, atol=1e-6)
    assert equal(cloned({**new_params, **new_buffers}), before), "inputs are not written"
    assert equal(cloned({**params, **buffers}), own), "nor is the module"
    assert all(p.grad is None for p in params.values())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "no bias": lambda: nn.Linear(4, 4, bias=False),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "layer norm": lambda: nn.LayerNorm(4),
    "counting": Counting,
    "relu": nn.ReLU,
}


@settings(max_examples=25, deadline=None)
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    repeats=st.lists(st.integers(0, 4), max_size=3),
    training=st.booleans(),
)
def test_stacks_of_layers(layers: list[str], repeats: list[int], training: bool) -> None:
    made = [LAYERS[layer]() for layer in layers]
    made += [made[i % len(made)] for i in repeats]  # the same layers again
    module = nn.Sequential(*made).train(training)
    apply, params, buffers = fddp.functionalize(module)
    new_params, new_buffers = other(params), other(buffers)
    expected, expected_buffers = called(module, new_params, new_buffers)
    # Names are what counts, not their order.
    backwards = dict(reversed(new_params.items()))
    output, after = apply(backwards, new_buffers, X)
    assert torch.equal(output, expected)
    assert equal(after, expected_buffers)


def loss_of(apply: Any, buffers: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda params: first(apply(params, buffers, X)[0]).square().sum()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # in torch's own jvp
def test_vmap_and_jvp() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    apply, params, buffers = fddp.functionalize(module)
    stacked = {name: torch.stack([p, 2 * p]).detach() for name, p in params.items()}
    both = {name: torch.stack([b, b]) for name, b in buffers.items()}
    outputs, after = torch.vmap(lambda p, b: apply(p, b, X))(stacked, both)
    for i in range(2):
        alone, alone_after = apply({n: p[i] for n, p in stacked.items()}, buffers, X)
        assert torch.allclose(outputs[i], alone, atol=1e-6)
        assert torch.allclose(after["1.running_var"][i], alone_after["1.running_var"])
    tangents = {name: torch.ones_like(p) for name, p in params.items()}
    _, slope = torch.func.jvp(loss_of(apply, buffers), (params,), (tangents,))
    grads = torch.func.grad(loss_of(apply, buffers))(params)
    assert torch.allclose(slope, sum(grad.sum() for grad in grads.values()), rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at outputs
def test_compiled_around_and_within() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    want = module(X)
    apply, params, buffers = fddp.functionalize(module)
    around = torch.compile(lambda p, x: apply(p, buffers, x)[0] + 1.0, backend="eager")
    assert torch.equal(around(params, X), want + 1.0)
    assert torch.equal(around(other(params), X), apply(other(params), buffers, X)[0] + 1.0)
    module[0].compile(backend="eager")
    within, params, buffers = fddp.functionalize(module)
    assert torch.equal(within(params, buffers, X)[0], want)
    assert torch.equal(within(other(params), buffers, X)[0], apply(other(params), buffers, X)[0])


class Calling(nn.Module):
    """Runs whatever it is given within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inner: Callable[[], Any]) -> Tensor:
        self.calls += 1
        inner()
        return self.weight * self.calls


def test_nested_calls_and_exceptions() -> None:
    apply, _, _ = fddp.functionalize(Calling())
    params, buffers = {"weight": torch.tensor(3.0)}, {"calls": torch.tensor(4.0)}
    inner: list[Any] = []

    def nested() -> None:
        other_params, other_buffers = {"weight": torch.tensor(7.0)}, {"calls": torch.tensor(1.0)}
        inner.append(apply(other_params, other_buffers, lambda: None))
        with pytest.raises(KeyError, match="inside"):
            apply(other_params, other_buffers, fails)

    def fails() -> None:
        raise KeyError("inside")

    output, after = apply(params, buffers, nested)
    assert (output.item(), after["calls"].item()) == (15.0, 5.0)
    assert (inner[0][0].item(), inner[0][1]["calls"].item()) == (14.0, 2.0)
    with pytest.raises(KeyError, match="inside"):
        apply(params, buffers, fails)
    assert apply(params, buffers, lambda: None)[0].item() == 15.0


def test_another_thread_within_a_call_is_refused() -> None:
    apply, params, buffers = fddp.functionalize(Calling())
    seen: list[BaseException] = []

    def elsewhere() -> None:
        try:
            apply(params, buffers, lambda: None)
        except fddp.ReentryError as error:
            seen.append(error)

    def starts() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    apply(params, buffers, starts)
    (error,) = seen
    assert "another thread is within a call" in str(error)
    elsewhere()
    assert len(seen) == 1, "it serves threads one after the other"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda p: p.pop("bias"),
            r"1 name where the module has 2; missing: 'bias'; unexp.*: none",
        ),
        (lambda p: p.update(b=p["bias"]), r"3 names .* missing: none; unexpected: 'b'"),
        (lambda p: p.update(bias=None), r"params has None for 'bias'"),
    ],
)
def test_wrong_names(change: Callable[[Any], Any], text: str) -> None:
    apply, params, buffers = fddp.functionalize(nn.Linear(4, 3))
    change(params)
    with pytest.raises(fddp.TreeMismatchError, match=text):
        apply(params, buffers, X)
    with pytest.raises(fddp.TreeMismatchError, match="buffers has 1 name where the module has 0"):
        apply(dict(nn.Linear(4, 3).named_parameters()), {"b": X}, X)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=self._reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_within_the_module_is_an_error(reentrant: bool) -> None:
    apply, params, buffers = fddp.functionalize(Checkpointed(reentrant=reentrant))
    output, _ = apply(params, buffers, X.clone().requires_grad_())
    with pytest.raises(
        fddp.FddpError,
        match=r"parameter 'part.0.weight' of a functionalized.*checkpoint\(apply_part",
    ):
        output.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_call_itself_may_be_checkpointed(reentrant: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    apply, params, buffers = fddp.functionalize(module)
    x = X.clone().requires_grad_()

    def part(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return apply(params, buffers, x)[0]  # type: ignore[no-any-return]

    outputs = [checkpoint(part, p, x, use_reentrant=reentrant) for p in (params, other(params))]
    plain = part(params, x) + part(other(params), x)
    (wanted,) = torch.autograd.grad(plain.square().sum(), x)
    sum(outputs).square().sum().backward()  # type: ignore[union-attr]
    assert torch.allclose(x.grad, wanted, atol=1e-6)


def test_unsupported_modules_are_refused() -> None:
    with pytest.raises(TypeError, match="'weight' has no shape yet"):
        fddp.functionalize(nn.LazyLinear(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="TorchScript"):
        fddp.functionalize(script)
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="can't be functionalized, because it can't be copied"):
        fddp.functionalize(module)


def test_calls_are_not_cached() -> None:
    import gc
    import weakref

    for module in (nn.LSTM(4, 3), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))):
        apply, params, buffers = fddp.functionalize(module)
        mine, own = cloned(params), cloned(buffers)
        seen = [weakref.ref(tensor) for tensor in (*mine.values(), *own.values())]
        gc.disable()
        try:
            apply(mine, own, X)
            del mine, own
            assert [ref() for ref in seen] == [None] * len(seen)
        finally:
            gc.enable()
