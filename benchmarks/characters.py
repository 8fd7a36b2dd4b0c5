"""Small models of characters, on text that comes with Python: the topics of `help()`, 465,000
characters of English (`pydoc_data.topics`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm

CONTEXT = 16
_EMBEDDING, _HIDDEN = 16, 128  # of the perceptron
_WIDTH, _LAYERS, _HEADS = 48, 2, 4  # of the transformer
_HELD_OUT = 0.1  # share of the text, at its end
_EVALUATED = 8192  # windows of the text that is held out

Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model, and how it is trained.

    Attributes:
        name: for tables.
        initial: returns the parameters at the start.
        loss_fn: cross entropy of windows of characters, shape `(n, CONTEXT + 1)`, in nats a
            character.
        learning_rate: best for DDP of those tried.
        batch: windows of each rank in a step.
        evaluated: windows of the text that is held out.
    """

    name: str
    initial: Callable[[], Params]
    loss_fn: Callable[[Params, Tensor], Tensor]
    learning_rate: float
    batch: int
    evaluated: int = _EVALUATED


@lru_cache
def text() -> tuple[Tensor, Tensor, int]:
    """Return windows of the text to train on and of that held out, and the number of characters."""
    joined = "".join(topic for _, topic in sorted(topics.items()))
    numbers = {character: number for number, character in enumerate(sorted(set(joined)))}
    data = torch.tensor([numbers[character] for character in joined])
    cut = int(len(data) * (1 - _HELD_OUT))
    train, held_out = (part.unfold(0, CONTEXT + 1, 1) for part in (data[:cut], data[cut:]))
    drawn = torch.randint(len(held_out), (_EVALUATED,), generator=generator(1))
    return train, held_out[drawn], len(numbers)


def generator(seed: int) -> torch.Generator:
    """Return a generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def _perceptron() -> Params:
    """Parameters of a perceptron over the last 16 characters."""
    _, _, characters = text()
    random = generator(0)

    def layer(inputs: int, outputs: int) -> dict[str, Tensor]:
        weight = torch.randn(inputs, outputs, generator=random) / inputs**0.5
        return {"weight": weight, "bias": torch.zeros(outputs)}

    return {
        "embedding": torch.randn(characters, _EMBEDDING, generator=random) / 2,
        "layers": [layer(CONTEXT * _EMBEDDING, _HIDDEN), layer(_HIDDEN, _HIDDEN)],
        "head": layer(_HIDDEN, characters),
    }


def _perceptron_loss(params: Params, windows: Tensor) -> Tensor:
    """Return the cross entropy of the last characters of windows, given the others."""
    x: Tensor = params["embedding"][windows[:, :-1]].flatten(1)
    first, second = params["layers"]
    x = torch.tanh(x @ first["weight"] + first["bias"])
    x = x + torch.tanh(x @ second["weight"] + second["bias"])
    head = params["head"]
    logits: Tensor = x @ head["weight"] + head["bias"]
    return cross_entropy(logits, windows[:, -1])


def _transformer() -> Params:
    _, _, characters = text()
    random = generator(0)

    def matrix(inputs: int, outputs: int, factor: float = 1.0) -> Tensor:
        return torch.randn(inputs, outputs, generator=random) * (factor / math.sqrt(inputs))

    embeddings = (torch.randn(n, _WIDTH, generator=random) / 2 for n in (characters, CONTEXT))
    return {
        **dict(zip(("characters", "places"), embeddings, strict=True)),
        "layers": [
            {
                "attention": matrix(_WIDTH, 3 * _WIDTH),
                "mixed": matrix(_WIDTH, _WIDTH, 0.5),
                "up": matrix(_WIDTH, 2 * _WIDTH),
                "bias": torch.zeros(2 * _WIDTH),
                "down": matrix(2 * _WIDTH, _WIDTH, 0.5),
            }
            for _ in range(_LAYERS)
        ],
        "head": matrix(_WIDTH, characters),
        "head bias": torch.zeros(characters),
    }


def _transformer_loss(params: Params, windows: Tensor) -> Tensor:
    """Return the cross entropy of all characters of windows but the first, given those before."""
    x: Tensor = params["characters"][windows[:, :-1]] + params["places"]
    mask = torch.full((CONTEXT, CONTEXT), -math.inf).triu(1)
    for layer in params["layers"]:
        joined = layer_norm(x, (_WIDTH,)) @ layer["attention"]
        parts = joined.view(len(windows), CONTEXT, 3, _HEADS, _WIDTH // _HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.mT / (_WIDTH // _HEADS) ** 0.5 + mask, dim=-1)
        x = x + (scores @ v).transpose(1, 2).flatten(2) @ layer["mixed"]
        hidden = torch.relu(layer_norm(x, (_WIDTH,)) @ layer["up"] + layer["bias"])
        x = x + hidden @ layer["down"]
    logits: Tensor = layer_norm(x, (_WIDTH,)) @ params["head"] + params["head bias"]
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


PERCEPTRON = Model(
    "perceptron",
    _perceptron,
    _perceptron_loss,
    learning_rate=0.016,  # of 0.008, 0.012, 0.016 and 0.024
    batch=128,
)
TRANSFORMER = Model(
    "transformer",
    _transformer,
    _transformer_loss,
    learning_rate=0.01,  # of 0.004, 0.006, 0.01 and 0.016
    batch=16,
    evaluated=2048,
)
