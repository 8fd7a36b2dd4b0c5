"""Lossy hooks, and error feedback for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import TypedDict  # `typing.TypedDict` is generic from Python 3.11 on

from fddp.core.entrance import entrance
from fddp.hooks.flat import wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec, Hook

S = TypeVar("S")


@dataclass(frozen=True)
class Compressed(Generic[S]):
    """Result of a compressor.

    Attributes:
        total: sum over ranks of the values that each rank sent, or this rank's chunk of it, as
            `Hook.apply` returns it.
        sent: returns the values that this rank sent, with shape and dtype of the buffer.
        state: state for the next step.
    """

    total: Tensor
    sent: Callable[[], Tensor]
    state: S


class Compressor(Hook[S]):
    """A hook that returns the values it sent, so that `error_feedback` can keep the rest."""

    @abstractmethod
    def compress(self, state: S, bucket: Bucket, all_reduce: AllReduce) -> Future[Compressed[S]]:
        """Start the reduction of a bucket, as `Hook.apply`. The buffer must not be changed."""

    def apply(self, state: S, bucket: Bucket, all_reduce: AllReduce) -> Future[tuple[Tensor, S]]:
        compressed = self.compress(state, bucket, all_reduce)
        return compressed.map(lambda end: (end.total, end.state))


class Stateless(Compressor[tuple[()]]):
    """A compressor without state."""

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()


class ErrorFeedbackState(TypedDict, Generic[S]):
    """State of error feedback.

    Attributes:
        residual: part that was not sent, shape `(numel,)`, at least 32 bits, as weight times
            gradient.
        inner: state of the compressor.
    """

    residual: Tensor
    inner: S


@dataclass(frozen=True)
class ErrorFeedback(Hook[ErrorFeedbackState[S]]):
    """Hook that adds the residual of earlier steps to the gradients of each step."""

    compressor: Compressor[S]

    @property
    def name(self) -> str:
        return f"error_feedback({self.compressor.name})"

    @property
    def stages(self) -> int:
        return self.compressor.stages

    @property
    def narrow(self) -> bool:
        return self.compressor.narrow

    @property
    def scatters(self) -> bool:
        return self.compressor.scatters

    def init(self, spec: BucketSpec) -> ErrorFeedbackState[S]:
        residual = torch.zeros(spec.numel, dtype=wide(spec.dtype), device=spec.device)
        return {"residual": residual, "inner": self.compressor.init(spec)}

    def apply(
        self, state: ErrorFeedbackState[S], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, ErrorFeedbackState[S]]]:
        corrected = state["residual"] / bucket.reference
        corrected += bucket.buffer

        def keep_residual(end: Compressed[S]) -> tuple[Tensor, ErrorFeedbackState[S]]:
            residual = (corrected - end.sent()) * bucket.reference
            return end.total, {"residual": residual, "inner": end.state}

        input_ = replace(bucket, buffer=corrected.to(bucket.buffer.dtype))
        return self.compressor.compress(state["inner"], input_, all_reduce).map(keep_residual)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return self.compressor.parts(spec)


@entrance
def error_feedback(compressor: Compressor[S]) -> Hook[ErrorFeedbackState[S]]:
    """Error feedback for a compressor: the error of one step is added to the gradients of the next
    (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").

    Over any number of steps, the sum of total weight times result equals the sum of weight times
    gradient over steps and ranks, minus the residuals of all ranks after the last step.

    Args:
        compressor: `fp16_compress`, `bf16_compress`, the result of `int8` or `int4`, or a custom
            compressor. `power_sgd` and `top_k` already have error feedback.

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
