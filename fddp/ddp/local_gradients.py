"""Gradients of a wrapped module's parameters that no step averages.

[Note: local gradients]
A backward pass outside of `no_sync` that reaches a parameter, but no output of the wrapper's
forward, leaves this rank's own gradient in `.grad`: the loss came from `ddp.module(x)`, from a
method of the module, or from a submodule kept elsewhere. The compiled hooks note such gradients,
and the end of the pass reports them, unless a step was opened after all. A pass through outputs of
a forward under `no_sync` is meant to be local.

A hook of `register_post_accumulate_grad_hook` that trains on such a gradient makes the replicas
differ, also under `no_sync`; within a step it runs after the mean has arrived. See
[Note: hooks after accumulation] in csrc/autograd/accumulation_hooks.h.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Literal, get_args

from fddp.core.text import choice_text, counted
from fddp.errors import ReplicationError

LocalGradients = Literal["warn", "raise", "allow"]
"""Policy for a backward pass that leaves local gradients."""

_SHOWN = 3
_INSIDE = ("fddp.", "torch.")


def check_local_gradients(value: str) -> None:
    """Raise a ValueError if the argument `local_gradients` is unknown."""
    known = get_args(LocalGradients)
    if value not in known:
        raise ValueError(choice_text("local_gradients", value, known))


class LocalGradientReports:
    """Reports of one wrapped module about gradients that are in no step.

    Args:
        policy: the wrapper's `local_gradients`.

    Attributes:
        is_on: False if nothing is reported.
    """

    def __init__(self, policy: LocalGradients) -> None:
        self.is_on = policy != "allow"
        self._raises = policy == "raise"
        self._names: Sequence[str] = ()
        self._rank = 0

    def follow(self, names: Sequence[str], rank: int) -> None:
        """Take the names of the synchronised parameters, in the order of leaves, and this rank."""
        self._names, self._rank = names, rank

    def stop(self) -> None:
        """Report nothing from now on."""
        self.is_on = False

    def report(self, leaves: Sequence[int]) -> bool:
        """Report a backward pass that left gradients of this rank to these leaves. Return False if
        further passes are not to be reported.

        Raises:
            ReplicationError: `local_gradients` is "raise".
        """
        found = [self._names[leaf] for leaf in sorted(set(leaves))]
        shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
        text = (
            f"rank {self._rank}: a backward pass left this rank's own gradients in {len(found)} of "
            f"{counted(len(self._names), 'parameter')} of a DistributedDataParallel ({shown}): it "
            f"came through no output of the wrapper's forward, so no step averaged them; call "
            f"ddp(...), and not ddp.module(...) or a method of the module (wrap a module whose "
            f"forward calls the method), or run the pass within `with ddp.no_sync():` if local "
            f"gradients are meant, or equal on all ranks"
        )
        if self._raises:
            raise ReplicationError(text, path=found[0])
        # At the line that called backward: the first outside of fddp and torch.
        frame, level = inspect.currentframe(), 1
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(_INSIDE):
            frame, level = frame.f_back, level + 1
        warnings.warn(f"{text}. Further ones are not reported", stacklevel=level)
        return False

    def refuse_early_use(self, leaf: int) -> None:
        """Report a user's hook that has used a gradient which is in no step.

        Raises:
            ReplicationError: unless `is_on` is False.
        """
        if self.is_on:
            raise ReplicationError(
                f"rank {self._rank}: a post-accumulate-grad hook of {self._names[leaf]} changed "
                f"the parameter or cleared its gradient in a backward pass without a step, as "
                f"within no_sync(), or before finalize_backward(): it trains on this rank's own "
                f"gradient, and replicas would differ; let an optimizer in a hook step only in the "
                f"last pass of an accumulation, outside of no_sync() and without manual "
                f"finalization, where hooks run after the mean has arrived, or pass "
                f'local_gradients="allow" to the DistributedDataParallel',
                path=self._names[leaf],
            )
