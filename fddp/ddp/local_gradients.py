"""Gradients of a wrapped module's parameters that no step averages.

[Note: local gradients]
A backward pass outside of `no_sync` that reaches a parameter, but nothing that the wrapper's
forward made, leaves this rank's own gradient in `.grad`: the loss came from `ddp.module(x)`, from a
method of the module, or from a submodule kept elsewhere. The compiled hooks note such gradients,
and the end of the pass reports them, unless a step was opened after all. A pass through outputs of
a forward under `no_sync` is meant to be local, unless it brings them zeros alone.

Under "raise" the report is an error at once. A warning waits until the gradients are used, as no
harm is done by those that the next step averages, because they are part of its sum, or that are
cleared before: they are used once a parameter has changed and no step was taken in between. This is
looked at when the wrapper's forward begins, and when another such pass ends.

A hook of `register_post_accumulate_grad_hook` that trains on such a gradient makes the replicas
differ, also under `no_sync`; within a step it runs after the mean has arrived. See
[Note: hooks after accumulation] in csrc/autograd/accumulation_hooks.h.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

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


class _Place(NamedTuple):
    """The line that called backward."""

    file: str
    line: int
    module: Mapping[str, Any]  # its globals


class _Unused(NamedTuple):
    """Local gradients that may not have been used yet."""

    leaves: Sequence[int]
    place: _Place
    values: Sequence[tuple[int, Tensor]]  # of each parameter: its version and norm


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
        self._params: Sequence[Tensor] = ()
        self._rank = 0
        self._unused: list[_Unused] = []  # since the last step, one for each place
        self._warned: set[tuple[str, int]] = set()

    def follow(self, names: Sequence[str], params: Sequence[Tensor], rank: int) -> None:
        """Take the synchronised parameters with their names, in the order of leaves, and this
        rank."""
        self._names, self._params, self._rank = names, params, rank
        self._unused.clear()

    def stop(self) -> None:
        """Report nothing from now on."""
        self.is_on = False
        self._unused.clear()

    def settle(self) -> None:
        """Note a step, which has averaged all gradients since the one before."""
        self._unused.clear()

    def report(self, leaves: Sequence[int]) -> None:
        """Report a backward pass that left gradients of this rank to these leaves.

        Raises:
            ReplicationError: `local_gradients` is "raise".
        """
        leaves = sorted(set(leaves))
        if self._raises:
            text = self._text(leaves, "so no step averaged them")
            raise ReplicationError(text, path=self._names[leaves[0]])
        self.look()
        place = _caller()
        is_known = any(place[:2] == noted.place[:2] for noted in self._unused)
        if not is_known and place[:2] not in self._warned:
            values = [_value(self._params[leaf]) for leaf in leaves]
            self._unused.append(_Unused(leaves, place, values))

    def look(self) -> None:
        """Warn of local gradients with which parameters have been changed."""
        for noted in self._unused[:]:
            params = [self._params[leaf] for leaf in noted.leaves]
            if not any(_has_changed(p, v) for p, v in zip(params, noted.values, strict=True)):
                continue
            self._unused.remove(noted)
            self._warned.add(noted.place[:2])
            text = self._text(noted.leaves, "and no step averaged them before parameters changed")
            registry: Any = noted.place.module.get("__warningregistry__", {})
            warnings.warn_explicit(
                f"{text}. Further ones of this line are not reported",
                UserWarning,
                noted.place.file,
                noted.place.line,
                registry=registry,
            )

    def _text(self, leaves: Sequence[int], what: str) -> str:
        found = [self._names[leaf] for leaf in leaves]
        shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
        return (
            f"rank {self._rank}: a backward pass left this rank's own gradients in {len(found)} of "
            f"{counted(len(self._names), 'parameter')} of a DistributedDataParallel ({shown}): it "
            f"came through no output of the wrapper's forward, {what}; call ddp(...), and not "
            f"ddp.module(...) or a method of the module (wrap a module whose forward calls the "
            f"method), or run the pass within `with ddp.no_sync():` if local gradients are meant, "
            f"or equal on all ranks"
        )

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


def _caller() -> _Place:
    """Return the line that called backward: the first outside of fddp and torch."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        if not str(frame.f_globals.get("__name__")).startswith(_INSIDE):
            break
        frame = frame.f_back
    if frame is None:
        return _Place("<unknown>", 0, {})
    return _Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def _value(param: Tensor) -> tuple[int, Tensor]:
    with torch.no_grad():  # changes through `.data` and of fused optimizers have no version
        return param._version, torch.linalg.vector_norm(param.detach())


def _has_changed(param: Tensor, before: tuple[int, Tensor]) -> bool:
    version, norm = before
    if param._version != version:
        return True
    return not torch.equal(_value(param)[1].nan_to_num(), norm.nan_to_num())
