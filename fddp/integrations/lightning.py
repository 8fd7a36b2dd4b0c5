"""fddp in Lightning, the package `lightning`."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from fddp.ddp.wrapper import DistributedDataParallel
from fddp.integrations.token_mean import TokenMean


class FddpStrategy(DDPStrategy):  # type: ignore[misc]
    """`DDPStrategy` with fddp's `DistributedDataParallel`, and means over tokens."""

    _tokens: TokenMean | None = None
    _count: float | Tensor | None = None

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        # As in DDPStrategy: hooks of the wrapper then run on a stream of their own.
        stream = torch.cuda.Stream() if device_ids else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    def count_tokens(self, count: float | Tensor) -> None:
        """Declare the loss of this `training_step` a sum of `count` terms.

        The gradients of the step are then those of the mean over all terms, on all ranks and in all
        accumulated batches. Call it in every `training_step`, under automatic optimization.
        """
        self._count = count

    def post_backward(self, closure_loss: Tensor) -> None:
        """Divide gradients by the number of tokens, after the last accumulated batch."""
        super().post_backward(closure_loss)
        count, self._count = self._count, None
        if count is None:
            return
        self._tokens = self._tokens or TokenMean()
        self._tokens.add(count)
        if self.model.require_backward_grad_sync:
            accumulated = self.lightning_module.trainer.accumulate_grad_batches
            self._tokens.scale_(self.model.parameters(), accumulated)
