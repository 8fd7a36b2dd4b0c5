"""Which parameters steps used, and what DDP has to say about it.

Every step is synchronised in full, whatever was used. A caller who has neither announced unused
parameters nor declared them static is told after such a step, at the next forward, as DDP does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fddp.ddp.unused_messages import (
    none_unused_warning,
    static_unused_error,
    static_used_error,
    unused_error,
)


class ParameterUse(NamedTuple):
    """What was used, by parameter name.

    Attributes:
        here: used on this rank, since the last step before.
        ranks: for each parameter, the number of ranks that used it.
    """

    here: frozenset[str]
    ranks: Mapping[str, int]

    def joined(self, other: ParameterUse) -> ParameterUse:
        """What was used in either of two steps."""
        ranks = {name: max(count, other.ranks.get(name, 0)) for name, count in self.ranks.items()}
        return ParameterUse(self.here | other.here, {**other.ranks, **ranks})


class Usage:
    """Follows the use of parameters from forward to forward, between which there may be several
    steps.

    Args:
        params: by name, in the order of registration.
        rank: this rank.
        world_size: number of ranks.
        find_unused: whether unused parameters were announced.
        static: whether all steps are to use the same parameters.

    Attributes:
        last: what was used since the last forward that followed a step; None before any step.
        joining: whether ranks may have run out of inputs, and then use nothing.
        pending: the error that the next forward raises; empty for none.
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
        """All parameters, in the order of registration."""
        return tuple(self.params)

    @property
    def is_static(self) -> bool:
        """Whether the same parameters were used here after every forward."""
        is_like_first = self._first is None or self.last is None or self.last.here == self._first
        return self._was_static and is_like_first

    def begin_forward(self) -> None:
        """What steps use from now on is looked at by itself."""
        if self.last is None or self._is_closed:
            return
        self._is_closed = True
        if self._first is None and self._find_unused and not self._unused(self.last.here):
            warnings.warn(none_unused_warning(), stacklevel=2)
        self._was_static = self.is_static
        self._first = self.last.here if self._first is None else self._first

    def problem(self, here: frozenset[str]) -> Exception | None:
        """What is wrong with a step that is about to be closed."""
        if not self.static or self._first is None or here <= self._first:
            return None
        self.pending = static_unused_error(self._unused(here), self.names, self._rank)
        return RuntimeError(static_used_error(here - self._first))

    def note(self, use: ParameterUse) -> None:
        """Takes note of a step that has been closed."""
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
        # Whatever is frozen on which rank: all ranks must come to the same conclusion.
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
        """Used on some ranks and not on others."""
        if min(use.ranks.values(), default=0) == self._world_size:
            return frozenset()
        counts = ((name, use.ranks.get(name, 0)) for name in self.params)
        return frozenset(name for name, count in counts if 0 < count < self._world_size)
