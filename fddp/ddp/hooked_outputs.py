"""Outputs of forward passes of a wrapped module, hooked for the backward passes through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from fddp._C import BackwardWatch


class HookedOutputs:
    """Outputs through which backward passes take a step, or are meant to be local.

    Args:
        passes: observer of the backward passes.
    """

    def __init__(self, passes: BackwardWatch) -> None:
        self._passes = passes
        self._handles: list[RemovableHandle] = []

    def expect(self, outputs: list[Tensor], on: bool) -> None:
        """Take a step in backward passes through these outputs of a forward pass, if `on`.

        Until one of them has ended, any gradient of a parameter belongs to a step.
        """
        self._hook(self._passes.expect_outputs(outputs, on), self._passes.reach_output)

    def allow(self, outputs: list[Tensor]) -> None:
        """Report no gradients of backward passes through these outputs, of a forward pass within
        `no_sync`; see [Note: local gradients]."""
        self._hook(self._passes.allow_outputs(outputs), self._passes.reach_allowed_output)

    def clear(self) -> None:
        """Remove the hooks of outputs that are leaves."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, leaves: list[Tensor], hook: Callable[[Tensor], None]) -> None:
        for leaf in leaves:
            # A leaf may be an output of the next forward pass, too.
            handle: RemovableHandle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
