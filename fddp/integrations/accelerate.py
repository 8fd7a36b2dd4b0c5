"""fddp in Hugging Face Accelerate.

[Note: accumulation with uneven inputs]
In `join_uneven_inputs`, a rank whose inputs end leaves the loop, and shadows the steps of the
others. With accumulated batches, its inputs may end within a step. It would then synchronise its
gradients when the others do not. So loaders fill up the last step of a rank: they repeat the last
batch, whose loss `backward` gives the weight zero. Then ranks only leave the loop between steps.

[Note: several losses in a step]
Calls of `backward` with `num_items` in one micro-batch have losses of their own, whose totals are
known in the last micro-batch only. Until then the gradients of each are kept apart from `.grad`,
which may hold those of other losses, also for the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, repeat
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
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
    """Counter of a joined model's losses. Loops may run `backward` of tensors instead."""

    has_forward = has_backward = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = super().join_hook(**kwargs)
        count_nothing = hook.main_hook

        def main_hook() -> None:
            if self.has_backward or not self.has_forward:
                count_nothing()

        hook.main_hook = main_hook  # type: ignore[method-assign]
        return hook


class _Loss:
    """A loss of each micro-batch: its items, and its gradients before the last micro-batch."""

    def __init__(self) -> None:
        self.count = 0.0  # in a join over all ranks, otherwise of this one
        self._grads: dict[Tensor, Tensor] = {}

    @contextmanager
    def apart(self, parameters: Sequence[Tensor], *, is_last: bool) -> Iterator[None]:
        """Return a context in which `.grad` holds the gradients of this loss alone.

        At its end they are added to those from before if `is_last`, and otherwise kept.
        """
        others = {p: p.grad for p in parameters if p.grad is not None}
        for parameter in parameters:
            parameter.grad = self._grads.pop(parameter, None)
        try:
            yield
        finally:
            for parameter in parameters:
                own, other = parameter.grad, others.get(parameter)
                if own is None or not is_last:
                    parameter.grad = other
                elif other is not None:
                    parameter.grad = other.add_(own)
                if own is not None and not is_last:
                    self._grads[parameter] = own


class FddpAccelerator(Accelerator):  # type: ignore[misc]
    """`Accelerator` with fddp's `DistributedDataParallel`, means over tokens and uneven inputs."""

    _dataloaders: list[Any]
    _tokens: TokenMean | None = None
    _numbers: Iterator[int] = repeat(0)  # of the losses of a micro-batch
    _joined: _JoinedTokens | None = None  # in a join, of the model whose forward ran last
    _is_repeat = False  # of the current batch
    _is_weighted = False  # the current batch, which is a repeat, by `backward`
    _accumulates = False  # the loop uses `accumulate`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._losses: list[_Loss] = []
        self._joined_tokens: list[_JoinedTokens] = []

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a module as `Accelerator` does, in fddp's wrapper."""
        with install(quiet=True):
            return super().prepare_model(*args, **kwargs)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as `Accelerator` does, for `join_uneven_inputs` as well."""
        loader = super().prepare_data_loader(*args, **kwargs)
        completing = self._completing_steps(loader)
        self._dataloaders[:] = [completing if one is loader else one for one in self._dataloaders]
        return completing

    def skip_first_batches(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader that skips batches, as `Accelerator` does."""
        return self._completing_steps(super().skip_first_batches(*args, **kwargs))

    @property
    def tokens(self) -> TokenMean:
        """The `TokenMean` of `backward`. Its first use is a collective call."""
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
                In earlier ones they are not in `.grad`. Several losses in a micro-batch, of one
                model or of several, have a total each: within `accumulate`, the first calls belong
                to one loss, the second calls to another.
            kwargs: as for `Accelerator`.
        """
        self._is_weighted = True
        loss = loss * 0.0 if self._is_repeat else loss
        if num_items is None:
            super().backward(loss, **kwargs)
            self._count(0.0)
            return
        counted = self._loss(next(self._numbers))
        parameters = list(dict.fromkeys(p for model in self._models for p in model.parameters()))
        with counted.apart(parameters, is_last=self.sync_gradients):
            super().backward(loss, **kwargs)
            counted.count += self._count(0.0 if self._is_repeat else num_items)
            if self.sync_gradients:
                total = counted.count if self._joined else self.tokens.total(counted.count)
                self.tokens.scale_by_(parameters, total, self.gradient_accumulation_steps)
                counted.count = 0.0

    def _loss(self, number: int) -> _Loss:
        while len(self._losses) <= number:
            self._losses.append(_Loss())
        return self._losses[number]

    def _count(self, items: float | Tensor) -> float:
        """Return a number of items. In a join, a collective call, with the sum over ranks."""
        if self._joined is None:
            return float(items)
        self._joined.has_backward = True  # ranks without input count with every backward
        return self._joined.total(items)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Return a context for one of the batches of a step, as `Accelerator`'s."""
        self._accumulates = True
        before, self._numbers = self._numbers, count()
        try:
            with super().accumulate(*models):
                yield
        finally:
            self._numbers = before

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
            with self._join(joinables) if self.use_distributed and not is_even else nullcontext():
                yield
        finally:
            for sampler, value in before:
                sampler.even_batches = value

    @contextmanager
    def _join(self, joinables: Sequence[Joinable]) -> Iterator[None]:
        _ = self.tokens
        ordered: list[Joinable] = []
        hooks = []
        number = 0
        for joinable in joinables:
            ordered.append(joinable)
            if isinstance(joinable, torch.nn.Module):
                ordered.append(tokens := self._tokens_of_join(number))
                hooks.append(joinable.register_forward_pre_hook(partial(self._note, tokens)))
                number += 1
        try:
            with Join(ordered):
                yield
        finally:
            self._joined = None
            for joinable in ordered:  # torch leaves them in the context
                joinable._join_config = type(joinable._join_config)(False, False, False)
            for hook in hooks:
                hook.remove()

    def _tokens_of_join(self, number: int) -> _JoinedTokens:
        while len(self._joined_tokens) <= number:
            self._joined_tokens.append(_JoinedTokens())
        tokens = self._joined_tokens[number]
        tokens.has_forward = tokens.has_backward = False
        self._joined = self._joined or tokens
        return tokens

    def _note(self, tokens: _JoinedTokens, *_: Any) -> None:
        tokens.has_forward, self._joined = True, tokens

    def _completing_steps(self, loader: Any) -> Any:
        """Return a loader with the state of `loader` that, in a join, repeats the last batch until
        the step is complete."""
        accelerator = self
        kind: Any = type(loader)
        if not issubclass(kind, DataLoaderStateMixin) or hasattr(kind, "completes_steps"):
            return loader

        class Completing(kind):  # type: ignore[misc]
            end_of_dataloader: bool
            completes_steps = True

            def __iter__(self) -> Iterator[Any]:
                if accelerator._joined is None:
                    yield from super().__iter__()
                    return
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
        # A new object, because the old one is the caller's; `kind` makes no copies.
        completing = object.__new__(Completing)
        completing.__dict__ = loader.__dict__
        return completing
