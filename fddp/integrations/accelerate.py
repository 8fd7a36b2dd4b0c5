"""fddp in Hugging Face Accelerate.

[Note: accumulation with uneven inputs]
In `join_uneven_inputs`, a rank whose inputs end leaves the loop, and shadows the steps of the
others. With accumulated batches, its inputs may end within a step. It would then synchronise its
gradients when the others do not. So loaders fill up the last step of a rank: they repeat the last
batch, whose loss `backward` gives the weight zero. Then ranks only leave the loop between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from fddp.errors import UnevenError
from fddp.integrations.replace_ddp import install
from fddp.integrations.token_mean import TokenMean

_NOT_WEIGHTED = (
    "join_uneven_inputs repeated a batch to complete a step of accumulated batches, and its loss "
    "was not passed to the accelerator's backward, which gives it the weight zero; write "
    "accelerator.backward(loss) in place of loss.backward()"
)


class _JoinedTokens(TokenMean):
    """Counter in `join_uneven_inputs`, where loops may run `backward` of tensors instead."""

    has_forward = has_backward = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = super().join_hook(**kwargs)
        count_nothing = hook.main_hook

        def main_hook() -> None:
            if self.has_backward or not self.has_forward:
                count_nothing()

        hook.main_hook = main_hook  # type: ignore[method-assign]
        return hook


class FddpAccelerator(Accelerator):  # type: ignore[misc]
    """`Accelerator` with fddp's `DistributedDataParallel`, means over tokens and uneven inputs."""

    _tokens: _JoinedTokens | None = None
    _is_repeat = False  # of the current batch
    _is_weighted = False  # the current batch, which is a repeat, by `backward`
    _accumulates = False  # the loop uses `accumulate`

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a module as `Accelerator` does, in fddp's wrapper."""
        with install(quiet=True):
            return super().prepare_model(*args, **kwargs)

    @property
    def tokens(self) -> _JoinedTokens:
        """The `TokenMean` of `backward`. Its first use is a collective call."""
        self._tokens = self._tokens or _JoinedTokens()
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
        self._is_weighted = True
        super().backward(loss * 0.0 if self._is_repeat else loss, **kwargs)
        is_joined = self._tokens is not None and self._tokens._join_config.enable
        if num_items is not None or is_joined:  # ranks without input count with every backward
            self.tokens.has_backward = True
            self.tokens.add(0.0 if num_items is None or self._is_repeat else num_items)
        if num_items is not None and self.sync_gradients:
            parameters = (p for model in self._models for p in model.parameters())
            self.tokens.scale_(parameters, self.gradient_accumulation_steps)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Return a context for one of the batches of a step, as `Accelerator`'s."""
        self._accumulates = True
        with super().accumulate(*models):
            yield

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Joinable], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Return a context for inputs of unequal length, as `Accelerator`'s but also on the CPU.

        With accumulated batches, prepared loaders repeat a rank's last batch until its step is
        complete, and `backward` gives these the weight zero.

        Raises:
            UnevenError: a loop with `accumulate` did not pass the loss of a repeated batch to
                `backward`.
        """
        is_even = self.even_batches if even_batches is None else even_batches
        samplers: list[Any] = [getattr(one, "batch_sampler", None) for one in self._dataloaders]
        before = [(s, s.even_batches) for s in samplers if hasattr(s, "even_batches")]
        for sampler, _ in before:
            sampler.even_batches = is_even
        try:
            with self._joined(joinables) if self.use_distributed and not is_even else nullcontext():
                yield
        finally:
            for sampler, value in before:
                sampler.even_batches = value

    @contextmanager
    def _joined(self, joinables: Sequence[Joinable]) -> Iterator[None]:
        tokens = self.tokens
        tokens.has_forward = tokens.has_backward = False

        def note_forward(*_: Any) -> None:
            tokens.has_forward = True

        models = [one for one in joinables if isinstance(one, torch.nn.Module)]
        hooks = [model.register_forward_pre_hook(note_forward) for model in models]
        classes = [(loader, type(loader)) for loader in self._dataloaders]
        for loader, kind in classes:
            _set_class(loader, self._completing_steps(kind))
        try:
            with Join([*joinables, tokens]):
                yield
        finally:
            for joinable in (*joinables, tokens):  # torch leaves them in the context
                joinable._join_config = type(joinable._join_config)(False, False, False)
            for loader, kind in classes:
                _set_class(loader, kind)
            for hook in hooks:
                hook.remove()

    def _completing_steps(self, kind: type[Any]) -> type[Any]:
        """Class of loaders that repeat the last batch until the step is complete."""
        accelerator = self

        class Completing(kind):  # type: ignore[misc]
            end_of_dataloader: bool

            def __iter__(self) -> Iterator[Any]:
                try:
                    for number, batch in enumerate(super().__iter__(), start=1):
                        repeats = -number % accelerator.gradient_accumulation_steps
                        if not self.end_of_dataloader or not repeats:
                            yield batch
                            continue
                        # At the end of a loader, `accumulate` synchronises gradients.
                        self.end_of_dataloader = False
                        accelerator._accumulates = False
                        yield batch
                        accelerator._is_repeat = True
                        for left in reversed(range(repeats * accelerator._accumulates)):
                            self.end_of_dataloader = left == 0
                            accelerator._is_weighted = False
                            yield batch
                            if not accelerator._is_weighted:
                                raise UnevenError(_NOT_WEIGHTED)
                        self.end_of_dataloader = True
                finally:
                    accelerator._is_repeat = False

        Completing.__name__ = kind.__name__
        return Completing


def _set_class(loader: Any, kind: type[Any]) -> None:
    # By the descriptor, because loaders of Accelerate have a property of that name.
    object.__dict__["__class__"].__set__(loader, kind)
