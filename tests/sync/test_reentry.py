"""A step that is called where it can't be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fddp

W = {"w": torch.ones(3)}


def step_within_backward(group: Any) -> str:
    with fddp.GradSync(W, group=group) as sync:

        def loss(params: Any) -> torch.Tensor:
            total = params["w"].sum()
            total.register_hook(lambda grad: sync(W)["w"].sum() * grad)
            return total

        with pytest.raises(fddp.ReentryError) as caught:
            sync.value_and_grad(loss)(W)
        return str(caught.value)


def test_an_error_names_its_rank_once_before_what_happened() -> None:
    for rank, text in enumerate(fddp.loopback(2, step_within_backward)):
        assert text.startswith(f"rank {rank} at step 0: a step was called on rank {rank} while")
