"""fddp in Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, _JoinConfig

from fddp.integrations.replace_ddp import install
from fddp.integrations.token_mean import TokenMean


class FddpAccelerator(Accelerator):  # type: ignore[misc]
    """`Accelerator` with fddp's `DistributedDataParallel`, means over tokens and uneven inputs."""

    _tokens: TokenMean | None = None

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a module as `Accelerator` does, in fddp's wrapper."""
        with install(quiet=True):
            return super().prepare_model(*args, **kwargs)

    @property
    def tokens(self) -> TokenMean:
        """The counter of `backward`. Its first use is a collective call."""
        self._tokens = self._tokens or TokenMean()
        return self._tokens

    def backward(
        self, loss: Tensor, *, num_items: float | Tensor | None = None, **kwargs: Any
    ) -> None:
        """Run backward as `Accelerator` does.

        Args:
            loss: the loss of a micro-batch: a sum if `num_items` is given, otherwise a mean.
            num_items: the number of tokens, or samples, in the sum. The last micro-batch of a step
                divides gradients by the total of all ranks and micro-batches, before this returns.
            kwargs: as for `Accelerator`.
        """
        super().backward(loss, **kwargs)
        if num_items is not None:
            self.tokens.add(num_items)
            if self.sync_gradients:
                parameters = (p for model in self._models for p in model.parameters())
                self.tokens.scale_(parameters, self.gradient_accumulation_steps)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Joinable], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Return a context for inputs of unequal length, as `Accelerator`'s but also on the CPU."""
        is_even = self.even_batches if even_batches is None else even_batches
        samplers: list[Any] = [getattr(one, "batch_sampler", None) for one in self._dataloaders]
        before = [(s, s.even_batches) for s in samplers if hasattr(s, "even_batches")]
        for sampler, _ in before:
            sampler.even_batches = is_even
        joined = [*joinables, self.tokens] if self.use_distributed and not is_even else []
        try:
            with Join(joined) if joined else nullcontext():
                yield
        finally:
            for joinable in joined:  # torch leaves them in the context
                joinable._join_config = _JoinConfig(False, False, False)
            for sampler, value in before:
                sampler.even_batches = value
