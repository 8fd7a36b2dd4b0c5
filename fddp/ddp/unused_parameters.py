"""Use of parameters by steps, and DDP's errors about unused ones.

Every step is synchronised completely. If the constructor got neither `find_unused_parameters` nor
`static_graph`, the forward pass after a step with unused parameters raises DDP's error. With
`static_graph`, a rank on which a step uses other parameters than before fails that step, and all
ranks raise the same error at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fddp.ddp.unused_messages import (
    NONE_UNUSED_WARNING,
    static_unused_error,
    static_used_error,
    unused_error,
)
from fddp.errors import FddpError


class GraphChangedError(FddpError):
    """A rank's graph is not the one of the first step, though it was declared static."""


class ParameterUse(NamedTuple):
    """Used parameters, by name.

    Attributes:
        here: names of parameters used on this rank.
        ranks: number of ranks that used each parameter.
    """

    here: frozenset[str]
    ranks: Mapping[str, int]

    def joined(self, other: ParameterUse) -> ParameterUse:
        """Return the union of two steps' uses."""
        ranks = {name: max(count, other.ranks.get(name, 0)) for name, count in self.ranks.items()}
        return ParameterUse(self.here | other.here, {**other.ranks, **ranks})


class Usage:
    """Tracks the use of parameters between forward passes, which may be several steps.

    Args:
        params: parameters by name, in the order of registration.
        rank: this rank.
        world_size: number of ranks.
        find_unused: True if unused parameters are allowed.
        static: True if all steps must use the same parameters.

    Attributes:
        last: use since the last forward that followed a step; None before any step.
        joining: True if ranks may be out of inputs, and then use no parameter.
        pending: error of the next forward; empty for none.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        rank: int,
        world_size: int,
        *,
        find_unused: bool,
        static: bool,
    ) -> None:
        self.params = params
        self.static = static
        self.last: ParameterUse | None = None
        self.joining = False
        self.pending = ""
        self._rank = rank
        self._world_size = world_size
        self._find_unused = find_unused
        self._first: frozenset[str] | None = None
        self._passes: list[frozenset[str]] = []  # use on this rank by the steps of `last`
        self._first_passes: list[frozenset[str]] = []
        self._is_closed = True
        self._was_static = True
        self._was_refused = False  # the last step

    @property
    def names(self) -> Sequence[str]:
        """Names of all parameters, in the order of registration."""
        return tuple(self.params)

    @property
    def reports_unused(self) -> bool:
        """True if unused parameters are an error. As in DDP, a parameter whose gradient is
        undefined is then used, with zeros."""
        return not (self._find_unused or self.static)

    @property
    def is_static(self) -> bool:
        """True if the same parameters were used on this rank after every forward."""
        is_like_first = self._first is None or self.last is None or self.last.here == self._first
        return self._was_static and is_like_first

    def begin_forward(self) -> None:
        """Start a new record of use, if a step has ended."""
        if self.last is None or self._is_closed:
            return
        self._is_closed = True
        if self._first is None and self._find_unused and not self._unused(self.last.here):
            warnings.warn(NONE_UNUSED_WARNING, stacklevel=2)
        self._was_static = self.is_static
        if self._first is None:
            self._first, self._first_passes = self.last.here, self._passes
        self._passes = []

    def problem(self, here: frozenset[str]) -> Exception | None:
        """Return the error of the step to be closed, or None."""
        if not self.static or self._first is None:
            return None
        position = len(self._passes)
        known = position < len(self._first_passes)
        gone = self._unused(here) & self._first_passes[position] if known else frozenset()
        new = here - self._first
        if not (gone or new):
            return None
        texts = [static_used_error(new, self._rank)] if new else []
        if gone or self._was_refused:
            texts.append(static_unused_error(gone, self.names, self._rank))
        self._was_refused = True
        return GraphChangedError("\n".join(texts))

    def note(self, use: ParameterUse) -> None:
        """Record the use of parameters by a closed step."""
        self.last = use if self.last is None or self._is_closed else self.last.joined(use)
        self._passes.append(use.here)
        self._is_closed = self._was_refused = False
        self.pending = self._error(self.last)

    def _error(self, use: ParameterUse) -> str:
        if not self.reports_unused:
            return ""
        unused = self._unused(use.here)
        # Independent of frozen parameters, so that all ranks come to the same result.
        some = frozenset() if self.joining else self._used_by_some(use)
        unused |= some - use.here
        if not (unused or some):
            return ""
        return unused_error(unused, self.names, self._rank, some & use.here)

    def _unused(self, here: frozenset[str]) -> frozenset[str]:
        if len(here) == len(self.params):
            return frozenset()
        return frozenset(n for n, p in self.params.items() if p.requires_grad and n not in here)

    def _used_by_some(self, use: ParameterUse) -> frozenset[str]:
        if min(use.ranks.values(), default=0) == self._world_size:
            return frozenset()
        counts = ((name, use.ranks.get(name, 0)) for name in self.params)
        return frozenset(name for name, count in counts if 0 < count < self._world_size)
