"""Hooks that lose something, and how nothing is lost over steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from fddp.hooks.flat import wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec, Hook

S = TypeVar("S")


@dataclass(frozen=True)
class Compressed(Generic[S]):
    """What a compressor's reduction ends with.

    Attributes:
        total: the sum over ranks of what each sent, as `Hook.apply` returns it.
        sent: gives what this rank sent, shape and dtype of the buffer.
        state: for the next step.
    """

    total: Tensor
    sent: Callable[[], Tensor]
    state: S


class Compressor(Hook[S]):
    """A hook that knows what part of its input it sent, so that `error_feedback` can keep the
    rest."""

    @abstractmethod
    def compress(self, state: S, bucket: Bucket, all_reduce: AllReduce) -> Future[Compressed[S]]:
        """As `apply`, but leaves the buffer as it is."""

    def apply(self, state: S, bucket: Bucket, all_reduce: AllReduce) -> Future[tuple[Tensor, S]]:
        compressed = self.compress(state, bucket, all_reduce)
        return compressed.map(lambda end: (end.total, end.state))


class Stateless(Compressor[tuple[()]]):
    """A compressor that keeps nothing from step to step."""

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()


class ErrorFeedbackState(TypedDict, Generic[S]):
    """State of error feedback.

    Attributes:
        residual: what has not been sent, shape `(numel,)`, 32 bits at least, in weight times
            gradient.
        inner: the compressor's.
    """

    residual: Tensor
    inner: S


@dataclass(frozen=True)
class ErrorFeedback(Hook[ErrorFeedbackState[S]]):
    """Adds to each step's gradients what the compressor has left out before."""

    compressor: Compressor[S]

    @property
    def name(self) -> str:
        return f"error_feedback({self.compressor.name})"

    @property
    def narrow(self) -> bool:
        return self.compressor.narrow

    def init(self, spec: BucketSpec) -> ErrorFeedbackState[S]:
        residual = torch.zeros(spec.numel, dtype=wide(spec.dtype), device=spec.device)
        return {"residual": residual, "inner": self.compressor.init(spec)}

    def apply(
        self, state: ErrorFeedbackState[S], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, ErrorFeedbackState[S]]]:
        owed = state["residual"] / bucket.reference
        owed += bucket.buffer

        def remember(end: Compressed[S]) -> tuple[Tensor, ErrorFeedbackState[S]]:
            residual = (owed - end.sent()) * bucket.reference
            return end.total, {"residual": residual, "inner": end.state}

        given = replace(bucket, buffer=owed.to(bucket.buffer.dtype))
        return self.compressor.compress(state["inner"], given, all_reduce).map(remember)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return self.compressor.parts(spec)


def error_feedback(compressor: Compressor[S]) -> Hook[ErrorFeedbackState[S]]:
    """Lets a compressor lose nothing over steps: what it leaves out of one step is added to the
    next (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").

    Over any number of steps, the sum of total weight times result is the sum of weight times
    gradient over steps and ranks, less the residuals of the last step's ranks.

    Args:
        compressor: `fp16_compress`, `bf16_compress`, what `int8` returns, or one of your own.
            `power_sgd` and `top_k` have error feedback already.

    Example:
        >>> import fddp, torch
        >>> from fddp.hooks import error_feedback, int8
        >>> def twice(group):
        ...     grads = {"w": torch.tensor([1.0, 0.001])}
        ...     with fddp.GradSync(grads, group=group, hook=error_feedback(int8())) as sync:
        ...         state, sums = sync.init_state(), torch.zeros(2)
        ...         for _ in range(100):
        ...             mean, state = sync.update(grads, state)
        ...             sums += mean["w"]
        ...         return [round(value, 2) for value in sums.tolist()]
        >>> fddp.loopback(2, twice)
        [[100.0, 0.1], [100.0, 0.1]]
    """
    return ErrorFeedback(compressor)
