"""Layers of published models, generated from their architectures, and their backward times.

A layer has the shapes of its parameters and its work: multiplications and additions of one sample's
forward pass, each counted as one. Profiles of single layers were not published for these models, so
a published time of the whole step is divided in proportion to the work; backward has twice the work
of forward, because it computes the gradients of inputs and of parameters.

Sources of the architectures: K. He et al., arXiv 1512.03385 (ResNet, with the stride on the 3 x 3
convolution, as in torchvision); G. Huang et al., arXiv 1608.06993 (DenseNet); C. Szegedy et al.,
arXiv 1602.07261 (Inception-v4); J. Devlin et al., arXiv 1810.04805 (BERT with both heads of
pre-training, whose decoder shares the embedding).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from fddp.core.plan.leaf import LeafSpec

BACKWARD_SHARE = 2 / 3
"""Share of backward in the time of forward and backward."""

Shape = tuple[int, ...]


class Layer(NamedTuple):
    """Parameters that become ready together.

    Attributes:
        name: name of the layer, unique in the model.
        shapes: shape of each parameter by name.
        work: operations of the forward pass of one sample.
    """

    name: str
    shapes: Mapping[str, Shape]
    work: int


@dataclass(frozen=True)
class Profile:
    """A model with the times of one step.

    Attributes:
        name: of the model.
        leaves: its parameters in the order of the forward pass.
        ready_s: seconds from the start of the step to the gradient of each leaf.
    """

    name: str
    leaves: tuple[LeafSpec, ...]
    ready_s: tuple[float, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Leaves in the order in which their gradients become ready, which is the reverse."""
        return tuple(reversed(range(len(self.leaves))))

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward."""
        return max(self.ready_s)


def profile(name: str, layers: Sequence[Layer], compute_s: float) -> Profile:
    """Divide `compute_s`, the seconds of forward and backward, over the layers.

    Example:
        >>> layers = [linear("a", 2, 2), linear("b", 2, 6)]
        >>> [f"{time_s:.2f}" for time_s in profile("tiny", layers, 1.2).ready_s]
        ['1.20', '1.20', '1.00', '1.00']
    """
    backward_s = BACKWARD_SHARE * compute_s
    total = sum(layer.work for layer in layers)
    # Work of the layers behind each one, and its own: backward has done it when a layer is ready.
    done = list(accumulate(layer.work for layer in reversed(layers)))[::-1]
    leaves, ready_s = [], []
    for layer, work in zip(layers, done, strict=True):
        for parameter, shape in layer.shapes.items():
            leaves.append(LeafSpec(f"{layer.name}.{parameter}", shape, "float32"))
            ready_s.append(compute_s - backward_s * (1.0 - work / total))
    return Profile(name, tuple(leaves), tuple(ready_s))


def parameters(layers: Iterable[Layer]) -> int:
    """Return the number of parameters.

    Example:
        >>> parameters(resnet(50))
        25557032
    """
    return sum(prod(shape) for layer in layers for shape in layer.shapes.values())


def linear(name: str, inputs: int, outputs: int, positions: int = 1) -> Layer:
    """Return a fully connected layer that is applied at `positions` positions."""
    shapes = {"weight": (outputs, inputs), "bias": (outputs,)}
    return Layer(name, shapes, 2 * inputs * outputs * positions)


def norm(name: str, features: int, positions: int) -> Layer:
    """Return a normalisation with scale and shift: four operations for each element."""
    shapes = {"weight": (features,), "bias": (features,)}
    return Layer(name, shapes, 4 * features * positions)


def conv(name: str, channels: tuple[int, int], kernel: tuple[int, int], size: int) -> Layer:
    """Return a convolution without bias.

    Args:
        name: name of the layer.
        channels: of the input and of the output.
        kernel: height and width.
        size: height and width of the output.
    """
    inputs, outputs = channels
    shape = (outputs, inputs, *kernel)
    return Layer(name, {"weight": shape}, 2 * prod(shape) * size**2)


def resnet(depth: int) -> list[Layer]:
    """Return the layers of ResNet-50, -101 or -152 for images of 224 x 224."""
    blocks = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    layers = [conv("conv1", (3, 64), (7, 7), 112), norm("bn1", 64, 112**2)]
    channels = 64
    for stage, count in enumerate(blocks):
        width, size = 64 << stage, 56 >> stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            before = size * 2 if stage and not block else size
            layers += _conv_norm(f"{name}.1", (channels, width), (1, 1), before)
            layers += _conv_norm(f"{name}.2", (width, width), (3, 3), size)
            layers += _conv_norm(f"{name}.3", (width, 4 * width), (1, 1), size)
            if not block:
                layers += _conv_norm(f"{name}.downsample", (channels, 4 * width), (1, 1), size)
            channels = 4 * width
    return [*layers, linear("fc", channels, 1000)]


def densenet201() -> list[Layer]:
    """Return the layers of DenseNet-201 for images of 224 x 224."""
    growth, channels, size = 32, 64, 56
    layers = [conv("conv0", (3, 64), (7, 7), 112), norm("norm0", 64, 112**2)]
    blocks = (6, 12, 48, 32)
    for block, count in enumerate(blocks):
        for number in range(count):
            name = f"block{block + 1}.{number}"
            layers += _norm_conv(f"{name}.1", (channels, 4 * growth), (1, 1), size)
            layers += _norm_conv(f"{name}.2", (4 * growth, growth), (3, 3), size)
            channels += growth
        if block + 1 < len(blocks):
            name = f"transition{block + 1}"
            layers += _norm_conv(name, (channels, channels // 2), (1, 1), size)
            channels, size = channels // 2, size // 2
    return [*layers, norm("norm5", channels, size**2), linear("classifier", channels, 1000)]


def bert(depth: int, width: int, tokens: int) -> list[Layer]:
    """Return the layers of BERT for pre-training: (12, 768) for base, (24, 1024) for large.

    Args:
        depth: number of encoder layers.
        width: number of features.
        tokens: number of tokens in a sample.
    """
    vocabulary = 30522
    tables = {"word": (vocabulary, width), "position": (512, width), "type": (2, width)}
    embeddings = Layer("embeddings", tables, 2 * width * tokens)
    layers = [embeddings, norm("embeddings.norm", width, tokens)]
    for number in range(depth):
        name = f"encoder.{number}"
        layers += [linear(f"{name}.{part}", width, width, tokens) for part in "qkv"]
        # Scores and their product with the values have no parameters; they follow the projections.
        attention = Layer(f"{name}.attention", {}, 4 * width * tokens**2)
        layers += [attention, linear(f"{name}.out", width, width, tokens)]
        layers += [norm(f"{name}.norm1", width, tokens)]
        layers += [linear(f"{name}.up", width, 4 * width, tokens)]
        layers += [linear(f"{name}.down", 4 * width, width, tokens)]
        layers += [norm(f"{name}.norm2", width, tokens)]
    decoder = Layer("decoder", {"bias": (vocabulary,)}, 2 * width * vocabulary * tokens)
    heads = [linear("pooler", width, width), linear("transform", width, width, tokens)]
    heads += [norm("transform.norm", width, tokens), decoder, linear("next", width, 2)]
    return layers + heads


class _Branch(NamedTuple):
    """Convolutions in sequence: output channels, kernel, and size of the output."""

    steps: tuple[tuple[int, tuple[int, int], int], ...]

    def layers(self, name: str, channels: int) -> Iterator[Layer]:
        widths = (channels, *(step[0] for step in self.steps))
        for number, (pair, step) in enumerate(zip(pairwise(widths), self.steps, strict=True)):
            yield from _conv_norm(f"{name}.{number}", pair, step[1], step[2])


def _branch(size: int, *steps: tuple[int, int, int]) -> _Branch:
    """Return a branch whose outputs have one size: of channels, height and width of kernels."""
    return _Branch(tuple((width, (height, across), size) for width, height, across in steps))


def inception_v4() -> list[Layer]:
    """Return the layers of Inception-v4 for images of 299 x 299."""
    stem = _Branch(((32, (3, 3), 149), (32, (3, 3), 147), (64, (3, 3), 147)))
    layers = list(stem.layers("stem", 3))
    layers += _conv_norm("mixed3a", (64, 96), (3, 3), 73)
    mixed4a = (
        _Branch(((64, (1, 1), 73), (96, (3, 3), 71))),
        _Branch(((64, (1, 1), 73), (64, (1, 7), 73), (64, (7, 1), 73), (96, (3, 3), 71))),
    )
    layers += _module("mixed4a", 160, mixed4a)
    layers += _conv_norm("mixed5a", (192, 192), (3, 3), 35)
    module_a = (
        _branch(35, (96, 1, 1)),
        _branch(35, (64, 1, 1), (96, 3, 3)),
        _branch(35, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        _branch(35, (96, 1, 1)),
    )
    for number in range(4):
        layers += _module(f"inception_a{number}", 384, module_a)
    reduction_a = (
        _branch(17, (384, 3, 3)),
        _Branch(((192, (1, 1), 35), (224, (3, 3), 35), (256, (3, 3), 17))),
    )
    layers += _module("reduction_a", 384, reduction_a)
    module_b = (
        _branch(17, (384, 1, 1)),
        _branch(17, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
        _branch(17, (192, 1, 1), (192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7)),
        _branch(17, (128, 1, 1)),
    )
    for number in range(7):
        layers += _module(f"inception_b{number}", 1024, module_b)
    reduction_b = (
        _Branch(((192, (1, 1), 17), (192, (3, 3), 8))),
        _Branch(((256, (1, 1), 17), (256, (1, 7), 17), (320, (7, 1), 17), (320, (3, 3), 8))),
    )
    layers += _module("reduction_b", 1024, reduction_b)
    for number in range(3):
        layers += _module(f"inception_c{number}", 1536, (_branch(8, (256, 1, 1)),))
        layers += _split_branches(f"inception_c{number}")
        layers += _module(f"inception_c{number}.pool", 1536, (_branch(8, (256, 1, 1)),))
    return [*layers, linear("last", 1536, 1000)]


def _split_branches(name: str) -> list[Layer]:
    """Return the two branches of an Inception-C module that end in two convolutions each."""
    layers: list[Layer] = []
    first = ("b", (_branch(8, (384, 1, 1)), 1536, 384))
    second = ("c", (_branch(8, (384, 1, 1), (448, 3, 1), (512, 1, 3)), 1536, 512))
    for part, (branch, inputs, channels) in (first, second):
        layers += branch.layers(f"{name}.{part}", inputs)
        layers += _conv_norm(f"{name}.{part}.left", (channels, 256), (1, 3), 8)
        layers += _conv_norm(f"{name}.{part}.right", (channels, 256), (3, 1), 8)
    return layers


def _module(name: str, channels: int, branches: Iterable[_Branch]) -> list[Layer]:
    return [
        layer
        for number, branch in enumerate(branches)
        for layer in branch.layers(f"{name}.branch{number}", channels)
    ]


def _conv_norm(
    name: str, channels: tuple[int, int], kernel: tuple[int, int], size: int
) -> list[Layer]:
    return [conv(f"{name}.conv", channels, kernel, size), norm(f"{name}.bn", channels[1], size**2)]


def _norm_conv(
    name: str, channels: tuple[int, int], kernel: tuple[int, int], size: int
) -> list[Layer]:
    return [
        norm(f"{name}.norm", channels[0], size**2),
        conv(f"{name}.conv", channels, kernel, size),
    ]
