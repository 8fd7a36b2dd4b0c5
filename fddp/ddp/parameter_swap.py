"""Other tensors in the places of a module's parameters, for as long as it runs.

What stands in is computed from the parameters, so that autograd leads back to them, and gradients
arrive where optimizers and buckets expect them.

[Note: parts that run again]
Activation checkpointing runs parts of a module a second time, during backward, when the module has
its own parameters back. These parts need their stand-ins again for as long as they run; hence hooks
on every part. The part that is called first takes care of all that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class ParameterSwap:
    """Making it puts hooks on a module and on its parts.

    Args:
        module: what is going to run.
        substitute: gives for a part, the name of a parameter there, and its value what is to stand
            in its place; None for nothing else. Asked once for a shared one.
        is_wanted: whether stand-ins are needed by a part that is called, if not within `over`.
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
        self._first: nn.Module | None = None  # the part that was called first
        for part in module.modules():
            part.register_forward_pre_hook(self._enter)
            part.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def over(self, module: nn.Module) -> Iterator[None]:
        """Stand-ins for all of the module's parameters, until the block ends or raises."""
        self._reclaim()  # an interrupt may have ended a part that ran by itself
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
        # Not as attributes, which take nothing but parameters.
        for parameters, name, owned in self._replaced:
            parameters[name] = made[owned]

    def _reclaim(self) -> None:
        for parameters, name, own in self._replaced:
            parameters[name] = own
        self._replaced.clear()
        self._are_in = False
        self._first = None
