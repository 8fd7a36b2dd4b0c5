"""Parameters of a wrapped module, with hooks for their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fddp.ddp.request import ModuleRequest
from fddp.native import extension
from fddp.native.torch_private import will_engine_execute_node
from fddp.runtime.contributions import Contributions
from fddp.runtime.step import Step
from fddp.tree.pytree import flatten

if TYPE_CHECKING:
    from fddp._C import BackwardWatch


@dataclass(slots=True)
class _NoPrediction:
    """Stands for an inspected graph. Backward passes of a module are not inspected beforehand."""

    used: list[bool]
    opaque: bool = True


class HookedParameters:
    """Parameters in the order of the plan's leaves, with hooks for their gradients.

    The hooks do nothing after this object is freed. They announce the first gradient of a step to
    `watch`.

    Args:
        request: the parameters by name, and the settings.
        watch: observer of backward passes.
        undefined_counts: True if an undefined gradient stands for zeros.

    Attributes:
        graph: graph of any backward pass, as far as it is known beforehand.
    """

    def __init__(
        self, request: ModuleRequest, watch: BackwardWatch, *, undefined_counts: bool
    ) -> None:
        self.leaves, treedef = flatten(dict(request.params))
        self.names = treedef.paths
        self.hooks = extension.compiled.ParamSet(self.leaves, watch)
        self.hooks.count_undefined(undefined_counts)
        # Those of a virtual rank's pass would see a part of the sum.
        self.hooks.leave_out_hooks(request.options.arguments.virtual_ranks is not None)
        self.graph = _NoPrediction([True] * len(self.names))
        self._replaces = request.options.arguments.gradient_as_bucket_view
        self._all_names = frozenset(self.names)
        self._counts: Sequence[int] = ()
        self._ranks: Mapping[str, int] = {}  # the same counts by name

    def assign(self, results: list[Tensor | None]) -> None:
        """Write the results of a step to `.grad`. None keeps the gradient from before the step.

        With `gradient_as_bucket_view`, they replace gradients that were there before.
        """
        self.hooks.assign(results, replace=self._replaces)

    def restore(self, step: Step | None, *, leave: bool) -> None:
        """Restore the gradients from before a failed step. Further calls have no effect.

        Gradients that were being reduced in place are lost. They become None.

        Args:
            step: the step, if it was opened.
            leave: True to leave all gradients as they are, and forget those from before.
        """
        self.hooks.forget() if leave else self.hooks.restore()
        self.hooks.disarm()
        if step is None:
            return
        for bucket in () if leave else step.in_place:
            for number in step.program.member_numbers[bucket]:
                self.leaves[step.program.differentiated[number]].grad = None
        step.in_place.clear()

    def begin_in_context(
        self, step: Step, context: int
    ) -> Callable[[Sequence[Tensor | None]], None]:
        """Begin a step over the gradients in a context of distributed autograd, after backward.
        Return the writer of results.

        It writes results over this rank's gradients in the context, and adds those that this rank
        does not have. An undefined gradient stands for zeros.
        """
        from torch.distributed.autograd import get_gradients

        params, used = self.leaves, self.hooks.used()
        grads = get_gradients(context)
        own = [grads.get(param) for param in params]
        rows = zip(own, used, params, strict=True)
        filled = [torch.zeros_like(p) if flag and grad is None else grad for grad, flag, p in rows]
        step.begin(Contributions(filled, 1.0), params)

        def write(results: Sequence[Tensor | None]) -> None:
            new = []
            for param, grad, result in zip(params, own, results, strict=True):
                if result is not None and grad is None:
                    new.append((param, result))
                elif result is not None and grad is not None:
                    grad.copy_(result)
            extension.compiled.add_to_context(context, new)

        return write

    def are_hooked(self) -> bool:
        """Return False if a parameter has become another tensor, dtype, shape or device."""
        return self.hooks.intact(self.leaves)

    def are_captured(self) -> bool:
        """Return True if the running `autograd.grad` returns a parameter's gradient."""
        leaves = (leaf for leaf in self.leaves if leaf.requires_grad)
        try:
            for leaf in leaves:
                # Raises for leaves whose gradients autograd.grad captures.
                will_engine_execute_node(get_gradient_edge(leaf).node)
        except RuntimeError:
            return True
        return False

    def used_names(self) -> frozenset[str]:
        """Names of the parameters that received a gradient on this rank."""
        if self.hooks.all_used():
            return self._all_names
        flags = self.hooks.used()
        return frozenset(name for name, used in zip(self.names, flags, strict=True) if used)

    def by_name(self, counts: Sequence[int]) -> Mapping[str, int]:
        """Return by name the numbers of ranks that used each leaf."""
        if counts != self._counts:
            self._counts, self._ranks = counts, dict(zip(self.names, counts, strict=True))
        return self._ranks
