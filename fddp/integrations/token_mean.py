"""Gradients of the mean over all tokens, for wrapped modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook

from fddp import Communicator, psum


class TokenMean(Joinable):
    """Scale that turns the mean of ranks' gradients into the mean over all tokens.

    The loop differentiates *sums* of losses, and divides once by the number of tokens in all
    micro-batches of all ranks. The constructor and `scale_` are collective calls. In a `Join`, pass
    it after the wrapped module, with torch's default divisor; `add` is then a collective call, too.

    Args:
        group: as for `GradSync`. Without process groups, there is one rank.

    Example:
        >>> import fddp, torch
        >>> from fddp.integrations import TokenMean
        >>> def train(group):
        ...     model = fddp.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
        ...     tokens, batch = TokenMean(group), torch.full((1 + group.rank, 1), 1.0 + group.rank)
        ...     model(batch).sum().backward()
        ...     tokens.add(len(batch))
        ...     tokens.scale_(model.parameters())
        ...     return round(model.module.weight.grad.item(), 4)
        >>> fddp.loopback(2, train)  # (1 + 2 + 2) / 3
        [1.6667, 1.6667]
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        alone = group is None and not dist.is_initialized()
        self._ranks = None if alone else Communicator(group)
        self._group = group
        self._count = 0.0

    def add(self, count: float | Tensor) -> None:
        """Count the tokens of a micro-batch, after its backward pass."""
        self._count += self.total(count) if self._join_config.enable else float(count)

    def scale_(self, parameters: Iterable[Tensor], factor: float = 1.0) -> None:
        """Scale gradients in place, before they are clipped or used.

        Args:
            parameters: those whose `.grad` is scaled, to zero if no rank has a token.
            factor: divisor of the losses, such as the number of micro-batches.
        """
        total = self._count if self._join_config.enable else self.total(self._count)
        self._count = 0.0
        self.scale_by_(parameters, total, factor)

    def scale_by_(self, parameters: Iterable[Tensor], total: float, factor: float = 1.0) -> None:
        """Scale gradients in place, as `scale_`, by a `total` over all ranks that is known."""
        ranks = 1 if self._ranks is None else self._ranks.world_size
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(ranks * factor / total if total else 0.0)

    def total(self, count: float | Tensor) -> float:
        """Return the sum of a number over ranks. A collective call."""
        if self._ranks is None:
            return float(count)
        return float(psum(torch.tensor(float(count), dtype=torch.float64), self._ranks))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook with which `Join` has an exhausted rank count nothing."""
        hook = JoinHook()
        hook.main_hook = lambda: self.total(0.0)  # type: ignore[method-assign,assignment]
        return hook

    @property
    def join_device(self) -> torch.device:
        """The device of the counts."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The group over which `Join` counts ranks."""
        return self._group or dist.group.WORLD
