"""A small convolutional network as pure functions of a tree of parameters.

It computes in float64. A different order of summation then changes results by about 1e-13 over a
whole training run, so that the comparison with one process can be strict.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from fddp.cli.demo.data import Batch

#: layers by name, each with a weight and a bias
Params: TypeAlias = dict[str, dict[str, Tensor]]

_SHAPES = {
    "conv1": (32, 1, 3, 3),
    "conv2": (64, 32, 3, 3),
    "dense1": (128, 64 * 4 * 4),
    "dense2": (10, 128),
}


class Score(NamedTuple):
    """Quality of parameters on some images.

    Attributes:
        loss: mean cross-entropy in nats.
        accuracy: share of correctly classified images, from 0 to 1.
    """

    loss: float
    accuracy: float


def init_params(seed: int = 0) -> Params:
    """Return random parameters, scaled by each layer's number of inputs (He et al. 2015)."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in _SHAPES.items():
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight *= (2.0 / weight[0].numel()) ** 0.5
        params[name] = {"weight": weight, "bias": torch.zeros(shape[0], dtype=torch.float64)}
    return params


def logits_fn(params: Params, images: Tensor) -> Tensor:
    """Return logits of shape (n, 10) for images of shape (n, 1, 8, 8)."""
    conv1, conv2, dense1, dense2 = (params[name] for name in _SHAPES)
    x = F.relu(F.conv2d(images, conv1["weight"], conv1["bias"], padding=1))
    x = F.relu(F.conv2d(x, conv2["weight"], conv2["bias"], padding=1))
    x = F.max_pool2d(x, 2).flatten(1)
    x = F.relu(F.linear(x, dense1["weight"], dense1["bias"]))
    return F.linear(x, dense2["weight"], dense2["bias"])


def loss_fn(params: Params, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over a batch, a scalar."""
    return F.cross_entropy(logits_fn(params, batch.images), batch.labels)


def score(params: Params, data: Batch) -> Score:
    """Return loss and accuracy on all of `data`."""
    with torch.no_grad():
        logits = logits_fn(params, data.images)
        loss = F.cross_entropy(logits, data.labels).item()
        hits = (logits.argmax(1) == data.labels).double().mean().item()
    return Score(loss, hits)
