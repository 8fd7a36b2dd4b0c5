"""Modules on which DistributedDataParallel is held against stock DDP, with their inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.support.models import rand

ROWS = 4
WIDTH = 6
TOKENS = 5
VOCABULARY = 12


class Model(NamedTuple):
    """A module, and what it is fed with."""

    build: Callable[[], nn.Module]  # with random parameters, from torch's generator
    batch: Callable[[int, int], Tensor]  # of a rank and a step
    per_row: bool = True  # the mean over ranks is what one process gets on the joined batch


def loss_of(output: Any) -> Tensor:
    """Mean square of every tensor in a module's output that has a graph."""
    parts = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([part.abs().double().square().mean() for part in parts]).sum()


# Inputs


def rows(rank: int, step: int) -> Tensor:
    return rand(ROWS, WIDTH, seed=1000 * step + rank)


def images(rank: int, step: int) -> Tensor:
    return rand(ROWS, 3, 7, 7, seed=1000 * step + rank, dtype=torch.float32)


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)


# Modules


def double_layers(*widths: int) -> list[nn.Module]:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
    return layers[:-1]


def mlp() -> nn.Module:
    return nn.Sequential(*double_layers(WIDTH, 16, 16, 16, 3))


def conv_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(100, 3),
    )


def channels_last() -> nn.Module:
    """Parameters with strides that are not row-major, of convolutions and of a transposed layer."""
    module = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.Flatten(),
        nn.Linear(100, 3),
    ).to(memory_format=torch.channels_last)
    module[4].weight = nn.Parameter(module[4].weight.detach().t().contiguous().t())
    return module.double()


def images_channels_last(rank: int, step: int) -> Tensor:
    return images(rank, step).double().to(memory_format=torch.channels_last)


class TiedEmbedding(nn.Module):
    """The table of the embedding is the output layer's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.hidden = nn.Linear(8, 8, dtype=torch.float64)
        self.out = nn.Linear(8, VOCABULARY, bias=False, dtype=torch.float64)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(x))))


class SparseEmbedding(nn.Module):
    """Two tables with sparse gradients, of which one is a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4, sparse=True, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(VOCABULARY, 4, sparse=True, mode="sum", dtype=torch.float64)
        self.out = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(x).sum(dim=1) + self.bag(x)))


class Complex(nn.Module):
    """A complex layer between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.phase * (self.first(x).to(torch.complex128) @ self.weight)


def frozen() -> nn.Module:
    """The first layer and one bias in the middle do not require gradients."""
    module = mlp()
    for parameter in (*module[0].parameters(), module[4].bias):
        parameter.requires_grad_(False)
    return module


class MixedDtypes(nn.Module):
    """Layers in four dtypes, alternating; one has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.scale * x.double() + self.nothing.sum()


class Outputs(NamedTuple):
    logits: Tensor
    extras: dict[str, Any]


class NestedOutputs(nn.Module):
    """Tensors deep in what it returns, one of them without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*double_layers(WIDTH, 16, 8))
        self.heads = nn.ModuleList(nn.Linear(8, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Outputs:
        hidden = torch.tanh(self.trunk(x))
        first, second, third = (head(hidden) for head in self.heads)
        return Outputs(first, {"more": [second, (third, None, 3)], "none": hidden.detach()})


class ReassignedBuffer(nn.Module):
    """A buffer that is another tensor after each forward, and one that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.rand(WIDTH, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        self.calls += 1
        return self.layer(x - self.mean)


class UnusedLayers(nn.Module):
    """One layer is never used; of two heads each batch uses one, chosen by its first number."""

    def __init__(self, *, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch
        self.first = nn.Linear(WIDTH, 8, dtype=torch.float64)
        self.never = nn.Linear(8, 8, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(8, 2, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        head = int(x[0, 0] > 0) if self.by_batch else 1
        return self.heads[head](torch.tanh(self.first(x)))


class ScaledPair(torch.autograd.Function):
    """Scales a tensor by two factors. The gradient of the second is undefined without `both`, and
    that of a factor whose output is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, both: bool) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, first, second)
        ctx.both = both
        return x * first, x * second

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> Any:
        x, first, second = ctx.saved_tensors
        own = None if grad is None else (grad * x).sum(0)
        others = None if other is None or not ctx.both else (other * x).sum(0)
        inputs = [g * s for g, s in ((grad, first), (other, second)) if g is not None]
        return sum(inputs), own, others, None


class UndefinedGradients(nn.Module):
    """One scale's output is not in the loss. The gradient of another is undefined, too, except for
    batches whose first number is positive, with `by_batch`."""

    def __init__(self, *, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch
        self.first = nn.Linear(WIDTH, 8, dtype=torch.float64)
        self.scales = nn.ParameterList(torch.rand(8, dtype=torch.float64) for _ in range(4))
        self.last = nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        both = self.by_batch and bool(x[0, 0] > 0)
        hidden = torch.tanh(self.first(x))
        a, b = ScaledPair.apply(hidden, self.scales[0], self.scales[1], both)
        c, _ = ScaledPair.apply(hidden, self.scales[2], self.scales[3], True)
        return self.last(a + b + c)


class Checkpointed(nn.Module):
    """Segments that are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, 8, dtype=torch.float64)
        self.segments = nn.ModuleList(nn.Sequential(*double_layers(8, 12, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for segment in self.segments:
            hidden = checkpoint(segment, torch.tanh(hidden), use_reentrant=self.reentrant)
        return hidden


class Recurrent(nn.Module):
    """One layer's weights are used at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.recurrent = nn.LSTM(6, 8, num_layers=2, batch_first=True, dtype=torch.float64)
        self.out = nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embedding(x))[0])


def reparametrised() -> nn.Module:
    """Weights that are computed from the parameters in each forward."""
    module = mlp()
    nn.utils.parametrizations.weight_norm(module[0])
    nn.utils.parametrizations.orthogonal(module[2], use_trivialization=False)
    return module


MODELS = {
    "mlp": Model(mlp, rows),
    "conv with batch norm": Model(conv_batch_norm, images, per_row=False),
    "channels last": Model(channels_last, images_channels_last),
    "tied embedding": Model(TiedEmbedding, tokens),
    "sparse embedding": Model(SparseEmbedding, tokens),
    "complex": Model(Complex, rows),
    "frozen layers": Model(frozen, rows),
    "mixed dtypes": Model(MixedDtypes, rows, per_row=False),  # 16-bit sums round
    "nested outputs": Model(NestedOutputs, rows),
    "reassigned buffer": Model(ReassignedBuffer, rows, per_row=False),
    "recurrent": Model(Recurrent, tokens),
    "reparametrised": Model(reparametrised, rows),
    # Stock DDP takes the following only with a flag.
    "unused layers": Model(lambda: UnusedLayers(by_batch=False), rows),
    "undefined gradients": Model(
        lambda: UndefinedGradients(by_batch=False),
        rows,
        per_row=False,  # one process leaves such gradients None
    ),
    "undefined by batch": Model(lambda: UndefinedGradients(by_batch=True), rows, per_row=False),
    "unused by batch": Model(lambda: UnusedLayers(by_batch=True), rows, per_row=False),
    "re-entrant": Model(lambda: Checkpointed(reentrant=True), rows),
}
