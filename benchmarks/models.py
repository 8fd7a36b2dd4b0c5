"""Models of the benchmark: each as a module and as a function of its parameters.

DDP needs a module, fddp a function. A stack of layers is easily written as one; the others are made
into functions by `fddp.functionalize`, as people do with a module that exists. That costs some time
for each parameter, which is why a step without communication is measured in both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn

from benchmarks.convolutional import ConvNet
from fddp.sync.functional_module import functionalize


class Functional(NamedTuple):
    """A model as a function.

    Attributes:
        params: tree of the module's parameters, in the module's order.
        loss_fn: `loss_fn(params, batch)`, the same loss as the module's; for a module with buffers
            `loss_fn(params, buffers, batch) -> (loss, buffers)`.
        buffers: buffers of the module before the first step; None without buffers.
    """

    params: Any
    loss_fn: Callable[..., Any]
    buffers: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Workload:
    """A model and its input.

    Attributes:
        title: short description.
        build: makes the module, each time with the same values; it maps a batch to its loss.
        to_function: makes a function of a module.
        batch: makes a rank's batch from the rank's number.
        steps: that count in a contestant's turn of a round: fewer where one takes long.
    """

    title: str
    build: Callable[[], nn.Module]
    to_function: Callable[[Any], Functional]
    batch: Callable[[int], Tensor]
    steps: int = 10


class Stack(nn.Module):
    """Linear layers of one width, each with a ReLU added to its input; the loss: mean square."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for param in self.layers.parameters():
            # So small that values neither grow nor fade over some hundred layers.
            nn.init.normal_(param, std=width**-0.5 / layers)

    def forward(self, x: Tensor) -> Tensor:
        """The loss for x of shape (n, width)."""
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x.square().mean()


class Transformer(nn.Module):
    """Predicts the next token: embeddings, causal blocks with normalisation first, a linear head.

    Args:
        tokens: size of the vocabulary.
        length: longest sequence.
        width: of the embeddings.
        blocks: number of layers, each with a feed-forward part of 4 times the width.
    """

    def __init__(self, tokens: int, length: int, width: int, blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads=width // 64) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of all but the first token; int64 of shape (n, up to length + 1)."""
        x = self.token(batch[:, :-1]) + self.position.weight[: batch.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norm1(x)).unflatten(-1, (3, self._heads, -1))
        query, key, value = parts.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        deeper: Tensor = self.narrow(F.gelu(self.wide(self.norm2(x))))
        return x + deeper


def stack(title: str, layers: int, width: int, rows: int) -> Workload:
    """A `Stack` on random rows.

    Args:
        title: short description.
        layers: number of layers.
        width: of each layer.
        rows: in a rank's batch.
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Stack(layers, width)

    def batch(rank: int) -> Tensor:
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(1 + rank))

    return Workload(title, build, _stack_function, batch)


def _stack_function(module: Stack) -> Functional:
    params = [
        {name: leaf.detach().clone() for name, leaf in layer.named_parameters()}
        for layer in module.layers
    ]

    def loss_fn(params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
        for layer in params:
            x = x + F.relu(F.linear(x, layer["weight"], layer["bias"]))
        return x.square().mean()

    return Functional(params, loss_fn)


def transformer(title: str, tokens: int, length: int, width: int, blocks: int) -> Workload:
    """A `Transformer` on random tokens, two sequences in a rank's batch; as `stack`."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Transformer(tokens, length, width, blocks)

    def batch(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randint(tokens, (2, length + 1), generator=generator)

    return Workload(title, build, _module_function, batch, steps=4)


def convolutional(title: str, widths: tuple[int, ...], pixels: int) -> Workload:
    """A `ConvNet` on two random images of `pixels` rows and columns; as `stack`."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return ConvNet(widths, blocks=1, classes=10)

    def batch(rank: int) -> Tensor:
        return torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(1 + rank))

    return Workload(title, build, _module_function, batch, steps=6)


def _module_function(module: nn.Module) -> Functional:
    apply, params, buffers = functionalize(module)
    own = {name: leaf.detach() for name, leaf in params.items()}
    if buffers:
        return Functional(own, apply, buffers)
    return Functional(own, lambda params, batch: apply(params, {}, batch)[0])


#: by the name that the command line takes
WORKLOADS = {
    "mlp": stack("MLP, 8 layers of 1024x1024", layers=8, width=1024, rows=32),
    "small": stack("small layers, 400 of 32x32", layers=400, width=32, rows=32),
    "transformer": transformer(
        "transformer, 4 blocks of width 256, 4096 tokens",
        tokens=4096,
        length=64,
        width=256,
        blocks=4,
    ),
    "conv": convolutional(
        "convolutions with BatchNorm, 4 blocks up to 512", widths=(64, 128, 256, 512), pixels=32
    ),
}
