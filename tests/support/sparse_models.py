"""An embedding with sparse gradients, and the same model with dense ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.support.models import rand


def embedding_params(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Parameters of `embedding_loss` and `dense_loss`."""
    return {"emb": rand(10, 4, seed=0, dtype=dtype), "w": rand(4, seed=1, dtype=dtype)}


def embedding_loss(p: dict[str, Tensor], index: Tensor | None) -> Tensor:
    """A loss with a sparse gradient of "emb"; without an index, "emb" is unused."""
    x = p["w"].square().sum()
    if index is not None:
        x = x + (F.embedding(index, p["emb"], sparse=True) * p["w"]).square().sum()
    return x


def dense_loss(p: dict[str, Tensor], index: Tensor | None) -> Tensor:
    """The same loss with a dense gradient."""
    x = p["w"].square().sum()
    return x if index is None else x + (p["emb"][index] * p["w"]).square().sum()
