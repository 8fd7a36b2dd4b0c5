"""Substitutes for a module's parameters while it runs.

The substitutes are computed from the parameters, so that autograd leads back to the parameters and
gradients arrive where optimizers and buckets expect them.

[Note: parts that run again]
Activation checkpointing runs submodules a second time during backward, when the module has its own
parameters again. These submodules need their substitutes while they run, so every submodule has
hooks. The submodule that is called first swaps the parameters of all that it contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class ParameterSwap:
    """Swaps parameters for substitutes. Construction hooks the module and its submodules.

    Args:
        substitute: called with a submodule, the name of a parameter and the parameter; returns the
            substitute, or None for no swap. Called once for a shared parameter.
        is_wanted: returns True if a submodule called outside of `over` needs substitutes.
    """

    def __init__(
        self,
        module: nn.Module,
        substitute: Callable[[nn.Module, str, Tensor], Tensor | None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._substitute = substitute
        self._is_wanted = is_wanted
        self._are_in = False
        self._replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        self._first: nn.Module | None = None  # the submodule that was called first
        for part in module.modules():
            part.register_forward_pre_hook(self._enter)
            part.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def over(self, module: nn.Module) -> Iterator[None]:
        """Swap all of the module's parameters within the block."""
        self._reclaim()  # an interrupt may have ended a submodule
        self._put(module)
        try:
            yield
        finally:
            self._reclaim()

    def _enter(self, part: nn.Module, args: object) -> None:
        if not self._are_in and self._is_wanted():
            self._first = part
            self._put(part)

    def _leave(self, part: nn.Module, args: object, output: object) -> None:
        if part is self._first:
            self._reclaim()

    def _put(self, module: nn.Module) -> None:
        self._are_in = True
        made: dict[Tensor, Tensor | None] = {}
        for part in module.modules():
            for name, own in part._parameters.items():
                if own is None:
                    continue
                if own not in made:
                    made[own] = self._substitute(part, name, own)
                if made[own] is not None:
                    self._replaced.append((part._parameters, name, own))
        # Not by attribute, which must be a parameter.
        for parameters, name, owned in self._replaced:
            parameters[name] = made[owned]

    def _reclaim(self) -> None:
        for parameters, name, own in self._replaced:
            parameters[name] = own
        self._replaced.clear()
        self._are_in = False
        self._first = None
