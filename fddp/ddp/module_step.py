"""State of one step of a wrapped module."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fddp.runtime.step import Step

_NOT_FINALIZED = (
    "Expected to have finalized the prior backward pass before starting a new one; call "
    "finalize_backward() after each backward pass, as require_manual_backward_finalization is set"
)


def _write_nothing(results: Sequence[Tensor | None]) -> None:
    """Write no gradients; stands for the write of a step that has not begun."""


@dataclass(slots=True)
class ModuleStep:
    """State of one step of a wrapped module, from its first gradient to its results.

    Attributes:
        context: context of distributed autograd that receives the gradients, or None for `.grad`.
        step: the step of the engine; None if it could not be opened, or will be opened at the end
            of backward, because of `context`.
        open_error: error because of which it could not be opened; raised at the end of backward.
        begun_s: time of the first gradient, in seconds of `perf_counter`.
        ended_s: time at which backward ended, if the step waits for `finalize`; see
            [Note: manual finalization].
        arrived: number of gradients when the last bucket was sent before `finalize`; None if it was
            not.
        write: writer of the results.
    """

    context: int | None = None
    step: Step | None = None
    open_error: BaseException | None = None
    begun_s: float = field(default_factory=time.perf_counter)
    ended_s: float | None = None
    arrived: int | None = None
    write: Callable[[list[Tensor | None]], None] = _write_nothing

    @property
    def is_begun(self) -> bool:
        """True if the step is open, or could not be opened."""
        return self.step is not None or self.open_error is not None

    @property
    def is_suspended(self) -> bool:
        """True if the step waits for `finalize`."""
        return self.ended_s is not None

    @property
    def failures(self) -> Sequence[str]:
        """Texts of the errors of all ranks, as far as they are known."""
        return () if self.step is None else self.step.failures


def check_finalized(current: ModuleStep | None) -> None:
    """Raise a RuntimeError if a step waits for `finalize`."""
    if current is not None and current.is_suspended:
        raise RuntimeError(_NOT_FINALIZED)
