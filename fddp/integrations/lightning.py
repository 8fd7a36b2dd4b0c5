"""fddp in Lightning, the package `lightning`.

[Note: exhausted ranks in Lightning]
Lightning has collectives of its own: it broadcasts a flag for SIGTERM before each batch, reduces
what is logged with `sync_dist`, and meets at the end of epochs. A rank that leaves the loop early,
also within `join()`, answers them with other collectives. So no rank leaves: one without a batch
repeats its last, through all hooks, with the weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchmetrics import Metric

from fddp import Communicator, DistributedDataParallel
from fddp.errors import UnevenError
from fddp.integrations.lockstep import Lockstep, Turn, exchange_lengths, unchanged_buffers
from fddp.integrations.token_mean import TokenMean


class FddpStrategy(DDPStrategy):  # type: ignore[misc]
    """`DDPStrategy` with fddp's `DistributedDataParallel`, means over tokens and uneven inputs.

    Ranks may have different numbers of batches. One without a batch repeats its last, with the
    weight zero in gradients; metrics and buffers do not change. See
    [Note: exhausted ranks in Lightning].

    Args:
        uneven_inputs: False if all ranks have the same number of batches. Otherwise ranks compare
            lengths before training; if they differ or are not known, each batch makes one small
            exchange.
        options: as for `DDPStrategy`, positional or by keyword.

    Raises:
        UnevenError: within `fit`: a rank has no batch at all, or there are several loaders of
            unequal length, or `training_step` takes a `dataloader_iter`.
    """

    _tokens: TokenMean | None = None
    _count: float | Tensor | None = None
    _ranks: Communicator | None = None
    _turn: Turn | None = None  # of the current batch; None if inputs are even

    def __init__(self, *options: Any, uneven_inputs: bool = True, **named: Any) -> None:
        super().__init__(*options, **named)
        self._uneven_inputs = uneven_inputs
        self._lockstep: Lockstep | None = None
        self._asks_stop = False  # of all ranks
        self.stopping = False  # True once all ranks end training

    def request_stop(self) -> None:
        """End training on all ranks after the same step, as `Trainer.should_stop` does; see
        `fddp.stop_on_signal`."""
        self._asks_stop = True

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        # As in DDPStrategy: hooks of the wrapper then run on a stream of their own.
        with torch.Stream() if device_ids else nullcontext():
            return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader; in training, one that repeats batches if lengths differ."""
        dataloader = super().process_dataloader(dataloader)
        if not self._uneven_inputs or not self.lightning_module.trainer.training:
            return dataloader
        self._ranks = self._ranks or Communicator()
        lengths = exchange_lengths(dataloader, self._ranks)
        self._turn = self._lockstep = None
        if not lengths.is_even:
            self._lockstep = Lockstep(dataloader, lengths, self._ranks, self._repeats)
        return dataloader if self._lockstep is None else self._lockstep

    def _repeats(self, lockstep: Lockstep) -> bool:
        module = self.lightning_module
        is_only_loader = module.trainer.train_dataloader is lockstep
        if is_only_loader and "dataloader_iter" not in signature(module.training_step).parameters:
            return True
        if lockstep.lengths.is_reliable and not lockstep.lengths.is_same:
            raise UnevenError(
                "ranks have training loaders of unequal length; FddpStrategy supports this for one "
                "loader, and a training_step that takes batches; give all ranks equal lengths"
            )
        return False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note if this rank has a batch of its own."""
        super().on_train_batch_start(batch, batch_idx)
        turns = None if self._lockstep is None else self._lockstep.turns
        self._turn = turns.popleft() if turns else None

    @property
    def _is_repeat(self) -> bool:
        return self._turn is not None and self._turn.is_repeat

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; with a repeated batch, leave metrics and buffers as they were."""
        if self._asks_stop:
            self.model.request_stop()
        if not self._is_repeat:
            return super().training_step(*args, **kwargs)
        module = self.lightning_module
        logged = module.trainer.fit_loop.epoch_loop._results.values()
        with unchanged_buffers(module), _unchanged_metrics(module, *logged):
            return super().training_step(*args, **kwargs)

    def count_tokens(self, count: float | Tensor) -> None:
        """Declare the loss of this `training_step` a sum of `count` terms.

        The gradients of the step are then those of the mean over all terms, on all ranks and in all
        accumulated batches. Call it in every `training_step`, and under manual optimization before
        each `manual_backward`, whose loss it counts.
        """
        self._count = 0.0 if self._is_repeat else count

    def backward(
        self, closure_loss: Tensor, optimizer: Any | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward. Repeated batches have the weight zero."""
        if self._is_repeat:
            closure_loss = closure_loss * 0.0
        elif self._turn is not None and self._count is None:
            closure_loss = closure_loss * (self.world_size / self._turn.present)
        if self._count is not None and not self.lightning_module.automatic_optimization:
            # A pass of its own, beside which other losses may have gradients.
            count, self._count = self._count, None
            total = self._tokens_of_ranks().total(count)
            closure_loss = closure_loss * (self.world_size / total if total else 0.0)
        done: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return done

    def post_backward(self, closure_loss: Tensor) -> None:
        """Divide gradients by the number of tokens, after the last accumulated batch."""
        super().post_backward(closure_loss)
        self.stopping = self.model.stopping
        if self.stopping:
            self.lightning_module.trainer.should_stop = True
        count, self._count = self._count, None
        if count is None:
            return
        tokens = self._tokens_of_ranks()
        tokens.add(count)
        if self.model.require_backward_grad_sync:
            accumulated = self.lightning_module.trainer.accumulate_grad_batches
            tokens.scale_(self.model.parameters(), accumulated)

    def _tokens_of_ranks(self) -> TokenMean:
        self._tokens = self._tokens or TokenMean()
        return self._tokens


@contextmanager
def _unchanged_metrics(*modules: torch.nn.Module) -> Iterator[None]:
    """Put the states of metrics back at the end."""
    metrics = [part for module in modules for part in module.modules() if isinstance(part, Metric)]
    states = [{k: _copied(state) for k, state in m.metric_state.items()} for m in metrics]
    counts = [metric._update_count for metric in metrics]
    try:
        yield
    finally:
        for metric, state, count in zip(metrics, states, counts, strict=True):
            metric._update_count, metric._computed = count, None
            for name, value in state.items():
                setattr(metric, name, value)


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)
