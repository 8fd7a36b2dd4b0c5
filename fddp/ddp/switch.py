"""Settings of a wrapped module that may change between steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Switch:
    """Settings shared by a wrapper and its parts. Copies of the wrapper have them, too.

    Attributes:
        is_on: True while backward passes synchronise gradients; also read by compiled code.
        is_manual: True if `finalize` closes steps; see [Note: manual finalization].
        in_step: True within `in_step`.
    """

    is_on: bool = True
    is_manual: bool = False
    in_step: bool = False

    @property
    def syncs(self) -> bool:
        """True if a forward pass that begins now is followed by a synchronised backward pass."""
        return self.is_on and torch.is_grad_enabled()
