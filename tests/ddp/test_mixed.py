"""Mixed precision: computed on casts, owned in full."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from fddp.ddp.mixed_precision import MixedPrecision, wire_dtype
from tests.support.models import rand, same_bits

LOW = torch.bfloat16


class Block(nn.Module):
    """Attention reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + self.attention(y, y, y)[0]


class Model(nn.Module):
    """Tied weights, an LSTM, a BatchNorm, and blocks that may run again in backward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = self.lstm(x)[0]
        return self.out(self.norm(x.flatten(0, 1)).view_as(x))


WORDS = torch.arange(5)[None]


def model(reentrant: bool | None = None) -> Model:
    torch.manual_seed(0)
    return Model(reentrant)


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def ids(module: nn.Module) -> list[tuple[str, int]]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return [(name, id(tensor)) for name, tensor in named]


def mixed_of(module: nn.Module, **given: Any) -> MixedPrecision:
    return MixedPrecision(module, _MixedPrecision(**given))


def test_gradients_are_those_of_the_module_in_low_precision() -> None:
    low = model().to(LOW)
    low(WORDS).float().square().sum().backward()
    module = model()
    before = ids(module)
    output = mixed_of(module, param_dtype=LOW, buffer_dtype=LOW).run(module, (WORDS,), {})
    assert output.dtype is LOW
    output.float().square().sum().backward()
    assert ids(module) == before
    for name, grad in grads(module).items():
        expected = low.get_parameter(name).grad
        assert grad is not None
        assert expected is not None
        assert grad.dtype is torch.float32
        assert same_bits([grad, expected.float()]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_that_run_again_run_on_casts(reentrant: bool) -> None:
    results = []
    for way in (None, reentrant):
        module = model(way)
        before = ids(module)
        mixed = mixed_of(module, param_dtype=LOW, buffer_dtype=LOW)
        mixed.run(module, (WORDS,), {}).float().square().sum().backward()
        assert ids(module) == before
        results.append(grads(module))
    assert same_bits(results)


def test_the_module_alone_computes_in_full_precision() -> None:
    module = model()
    expected = copy.deepcopy(module)(WORDS)
    mixed_of(module, param_dtype=LOW)
    assert same_bits([module(WORDS), expected])


def test_two_runs_before_one_backward() -> None:
    module = nn.Linear(3, 2)
    mixed = mixed_of(module, param_dtype=LOW)
    x = rand(4, 3, seed=1).to(LOW)
    loss = mixed.run(module, (x,), {}).sum() + mixed.run(module, (2 * x,), {}).sum()
    loss.backward()
    assert module.weight.grad is not None
    torch.testing.assert_close(
        module.weight.grad, 3 * x.float().sum(0).expand(2, 3), rtol=0.02, atol=0.02
    )


class Fails(nn.Module):
    """Fails in the run of this number."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.error, self.left = error, at

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        assert self.linear.weight.dtype is LOW
        if self.left == 0:
            raise self.error
        return self.linear(x)


class Checkpointed(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        output = checkpoint(self.part, x, use_reentrant=False)
        assert isinstance(output, Tensor)
        return output


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2])
def test_after_an_exception_the_module_has_its_parameters(error: BaseException, at: int) -> None:
    """In the forward pass, or as a part of it runs again in the backward pass."""
    part = Fails(error, at)
    module = Checkpointed(part) if at == 2 else part
    before = ids(module)
    mixed = mixed_of(module, param_dtype=LOW)
    with pytest.raises(type(error)):
        mixed.run(module, (torch.ones(1, 2, requires_grad=True),), {}).sum().backward()
    if at == 2 and isinstance(error, KeyboardInterrupt):
        # No hook sees an interrupt; the next run mends that.
        mixed.run(module, (torch.ones(1, 2),), {}).sum().backward()
    assert ids(module) == before
    assert isinstance(part.linear.weight, nn.Parameter)


class Kinds(nn.Module):
    """One tensor of each kind that is left alone, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.kept = nn.Parameter(torch.ones(2))
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("stat", torch.ones(2))
        self.register_buffer("kept_stat", torch.ones(2))
        self.register_buffer("count", torch.tensor(1))
        self.kept._ddp_ignored = True  # type: ignore[attr-defined]
        self.kept_stat._ddp_ignored = True  # type: ignore[union-attr]

    def forward(self, inputs: dict[str, Tensor], flag: bool, *, scale: Tensor) -> dict[str, Any]:
        tensors = {**dict(self._parameters), **dict(self._buffers), **inputs, "scale": scale}
        return {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}


def test_cast_parameters_buffers_and_inputs() -> None:
    module = Kinds()
    before = ids(module)
    mixed = mixed_of(module, param_dtype=LOW, buffer_dtype=torch.float16)
    assert ids(module) == before
    inputs = {"x": torch.ones(1), "index": torch.tensor(1)}
    assert mixed.run(module, (inputs, True), {"scale": torch.ones(1)}) == {
        "full": LOW,
        "frozen": LOW,
        "kept": torch.float32,
        "phase": torch.complex64,
        "stat": torch.float16,
        "kept_stat": torch.float32,
        "count": torch.int64,
        "x": LOW,
        "index": torch.int64,
        "scale": LOW,
    }

    module = Kinds()
    mixed = mixed_of(module, buffer_dtype=LOW)  # buffers alone
    dtypes = mixed.run(module, ({"x": torch.ones(1)}, True), {"scale": torch.ones(1)})
    assert (dtypes["stat"], dtypes["full"], dtypes["x"]) == (LOW, torch.float32, torch.float32)
    assert not module._forward_pre_hooks


def test_sparse_gradients() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    mixed_of(module, param_dtype=LOW).run(module, (torch.tensor([1, 3]),), {}).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.is_sparse
    assert module.weight.grad.dtype is torch.float32
    assert module.weight.grad.to_dense().sum(1).tolist() == [0.0, 2.0, 0.0, 2.0]


class Runs(nn.Module):
    """A module that runs another one, as the wrapper does."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1, bias=False)
        self.mixed = mixed_of(self.module, param_dtype=LOW)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixed.run(self.module, (x,), {})
        assert isinstance(y, Tensor)
        return y


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
def test_transforms() -> None:
    module = Runs()
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,)).sum()

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (grad,) = torch.func.grad(loss)(parameters, x).values()
    assert grad.tolist() == [[4.0, 6.0]]
    (grads,) = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x).values()
    assert grads.tolist() == [[[1.0, 2.0]], [[3.0, 4.0]]]
    ones = {name: torch.ones(1, 2) for name in parameters}
    _, tangent = torch.func.jvp(lambda p: loss(p, x), (parameters,), (ones,))
    assert tangent.item() == 10.0
    assert tangent.dtype is LOW


def test_second_derivatives() -> None:
    module = nn.Linear(2, 1, bias=False)
    output = mixed_of(module, param_dtype=LOW).run(module, (torch.ones(1, 2),), {})
    (grad,) = torch.autograd.grad(output.pow(2).sum(), module.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), module.weight)
    assert second.tolist() == [[4.0, 4.0]]


def test_copies_and_pickles_go_with_their_module() -> None:
    module = Checkpointed(nn.Linear(2, 2))
    pair = (module, mixed_of(module, param_dtype=LOW))
    for again, mixed in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        x = torch.ones(1, 2, requires_grad=True)
        mixed.run(again, (x,), {}).sum().backward()
        assert again.part.weight.grad.dtype is torch.float32
        assert module.part.weight.grad is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo silences
def test_a_compiled_module() -> None:
    module = nn.Linear(2, 2)
    mixed = mixed_of(module, param_dtype=LOW)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    output = mixed.run(compiled, (torch.ones(1, 2),), {})
    output.sum().backward()
    assert output.dtype is LOW
    assert module.weight.grad is not None


def test_wire_dtype_of_gradients() -> None:
    half = torch.float16
    assert wire_dtype(_MixedPrecision(param_dtype=LOW, reduce_dtype=half)) is half
    assert wire_dtype(_MixedPrecision(param_dtype=LOW)) is LOW
    assert wire_dtype(_MixedPrecision(reduce_dtype=half)) is half
    assert wire_dtype(_MixedPrecision(buffer_dtype=half)) is None
