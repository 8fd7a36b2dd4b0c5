"""Use of parameters by steps, and DDP's errors about unused ones.

Every step is synchronised completely. If the constructor got neither `find_unused_parameters` nor
`static_graph`, the forward pass after a step with unused parameters raises DDP's error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fddp.ddp.debug_logs import log_unused
from fddp.ddp.unused_messages import (
    NONE_UNUSED_WARNING,
    static_unused_error,
    static_used_error,
    unused_error,
)


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
        self._is_closed = True
        self._was_static = True

    @property
    def names(self) -> Sequence[str]:
        """Names of all parameters, in the order of registration."""
        return tuple(self.params)

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
        self._first = self.last.here if self._first is None else self._first

    def problem(self, here: frozenset[str]) -> Exception | None:
        """Return the error of the step to be closed, or None."""
        if not self.static or self._first is None or here <= self._first:
            return None
        self.pending = static_unused_error(self._unused(here), self.names, self._rank)
        return RuntimeError(static_used_error(here - self._first))

    def note(self, use: ParameterUse) -> None:
        """Record the use of parameters by a closed step."""
        is_first_static = self.static and self._first is None and self.last is None
        unused = self._unused(use.here)
        log_unused(unused, self.params, self._rank, is_first_static=is_first_static)
        self.last = use if self.last is None or self._is_closed else self.last.joined(use)
        self._is_closed = False
        self.pending = self._error(self.last)

    def _error(self, use: ParameterUse) -> str:
        unused = self._unused(use.here)
        if self.static:
            gone = unused & (self._first or frozenset())
            return static_unused_error(gone, self.names, self._rank) if gone else ""
        if self._find_unused:
            return ""
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
