"""Use of parameters by steps, and DDP's errors about unused ones.

Every step is synchronised completely. If the constructor got neither `find_unused_parameters` nor
`static_graph`, the forward pass after a step with unused parameters raises DDP's error, with DDP's
phrases, for scripts and tools that rely on them. With `static_graph`, a rank on which a step uses
other parameters than before fails that step, and all ranks raise the same error at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fddp.ddp.debug_logs import log_unused
from fddp.errors import FddpError

_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
)
_STATIC = "this is not compatible with static_graph set to True."

_NONE_UNUSED = (
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
    "parameters in the forward pass. fddp finds them without the flag and at no cost; leave it "
    "out to have unused parameters reported"
)


class GraphChangedError(FddpError):
    """A rank's graph is not the one of the first step, though it was declared static."""


class ParameterUse(NamedTuple):
    """Names of the parameters used on this rank, and the number of ranks that used each."""

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
        self._complete: ParameterUse | None = None  # use of all parameters by all ranks
        self.joining = False
        self.pending = ""
        self._rank = rank
        self._world_size = world_size
        self._find_unused = self._warns_of_none = find_unused
        self._first: frozenset[str] | None = None
        self._passes: list[frozenset[str]] = []  # use on this rank by the steps of `last`
        self._first_passes: list[frozenset[str]] = []
        self._is_closed = True
        self._was_static = True
        self._was_refused = False  # the last step

    def follow(self, params: Mapping[str, Tensor]) -> None:
        """Follow a change of the parameters."""
        self.params = params

    def declare_static(self) -> None:
        """Require that all steps use the same parameters."""
        self.static = True

    def note_joining(self, joining: bool) -> None:
        """Note if ranks may be out of inputs."""
        self.joining = joining

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
        first, last = self._first, self.last
        # Sets are compared element by element, even with themselves.
        is_like_first = first is None or last is None or last.here is first or last.here == first
        return self._was_static and is_like_first

    def begin_forward(self) -> None:
        """Start a new record of use, if a step has ended."""
        if self.last is None or self._is_closed:
            return
        self._is_closed = True
        if self._warns_of_none and not self.static and not self._unused(self.last.here):
            self._warns_of_none = False
            warnings.warn(_NONE_UNUSED, stacklevel=2)
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
        texts = [_static_used_error(new, self._rank)] if new else []
        if gone or self._was_refused:
            texts.append(_static_unused_error(gone, self.names, self._rank))
        self._was_refused = True
        return GraphChangedError("\n".join(texts))

    def note(self, use: ParameterUse) -> None:
        """Record the use of parameters by a closed step."""
        is_first = self.last is None
        self.last = use if self.last is None or self._is_closed else self.last.joined(use)
        self._passes.append(use.here)
        self._is_closed = self._was_refused = False
        if use == self._complete:
            self.pending = ""
            return
        unused = self._unused(use.here)
        is_first_static = self.static and self._first is None and is_first
        log_unused(unused, self.params, self._rank, is_first_static=is_first_static)
        self.pending = self._error(self.last)
        if len(use.here) == len(self.params) and not self._used_by_some(use):
            self._complete = use

    def _error(self, use: ParameterUse) -> str:
        if not self.reports_unused:
            return ""
        unused = self._unused(use.here)
        # Independent of frozen parameters, so that all ranks come to the same result.
        some = frozenset() if self.joining else self._used_by_some(use)
        unused |= some - use.here
        if not (unused or some):
            return ""
        return _unused_error(unused, self.names, self._rank, some & use.here)

    def _unused(self, here: frozenset[str]) -> frozenset[str]:
        if len(here) == len(self.params):
            return frozenset()
        return frozenset(n for n, p in self.params.items() if p.requires_grad and n not in here)

    def _used_by_some(self, use: ParameterUse) -> frozenset[str]:
        if min(use.ranks.values(), default=0) == self._world_size:
            return frozenset()
        counts = ((name, use.ranks.get(name, 0)) for name in self.params)
        return frozenset(name for name, count in counts if 0 < count < self._world_size)


def changed_graph_error(failures: Sequence[str]) -> RuntimeError | None:
    """Return one error for all ranks if a graph changed that was declared static, and no rank
    failed for another reason.

    Args:
        failures: texts of the errors of a failed step by rank; empty for ranks without an error.
    """
    kind = f"{GraphChangedError.__name__}: "
    texts = [text for text in failures if text]
    if not texts or not all(text.startswith(kind) for text in texts):
        return None
    advice = "No rank has gradients of this step; the group is in step and can go on"
    return RuntimeError("\n".join([*(text.removeprefix(kind) for text in texts), advice]))


def _unused_error(
    unused: Collection[str], order: Sequence[str], rank: int, elsewhere: Collection[str]
) -> str:
    """Return the error of a forward pass after a step with unused parameters.

    `unused` names parameters without a gradient on this rank, `elsewhere` those that only other
    ranks did not use, and `order` all, in the order of registration.
    """
    others = f"\nWithout a gradient on other ranks: {', '.join(sorted(elsewhere))}"
    return (
        f"{_UNFINISHED}This error indicates that your module has parameters that were not used "
        f"in producing loss. You can enable unused parameter detection by passing the keyword "
        f"argument `find_unused_parameters=True` to `fddp.DistributedDataParallel`, "
        f"and by making sure all `forward` function outputs participate in calculating loss. "
        f"Gradients of that step were synchronised nevertheless: fddp needs no flag for it, and "
        f"only repeats DDP's error.\n"
        f"{_without_gradient(unused, order, rank)}{others if elsewhere else ''}"
    )


def _static_unused_error(unused: Collection[str], order: Sequence[str], rank: int) -> str:
    """Return the error of a step without gradients of parameters that the first step used."""
    return (
        f"{_UNFINISHED}This error indicates that your training graph has changed in this "
        f"iteration, e.g., one parameter is used in first iteration, but then got unused in the "
        f"second iteration. {_STATIC}\n{_without_gradient(unused, order, rank)}"
    )


def _static_used_error(used: Collection[str], rank: int) -> str:
    """Return the error of a step with parameters that the first step did not use."""
    return (
        f"Your training graph has changed in this iteration, e.g., one parameter is unused in "
        f"first iteration, but then got used in the second iteration. {_STATIC} Newly used on rank "
        f"{rank}: {', '.join(sorted(used))}"
    )


def _without_gradient(unused: Collection[str], order: Sequence[str], rank: int) -> str:
    """List the parameters by number, as in DDP, and by name."""
    if not unused:
        return f"Parameter indices which did not receive grad for rank {rank}: none"
    numbers = " ".join(str(i) for i, name in enumerate(order) if name in unused)
    names = ", ".join(name for name in order if name in unused)
    text = (
        f"Parameter indices which did not receive grad for rank {rank}: {numbers}\n"
        f"Parameters which did not receive grad for rank {rank}: {names}"
    )
    if dist.get_debug_level() != dist.DebugLevel.OFF:
        return text
    return (
        f"{text}\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to "
        f"either INFO or DETAIL to log them in the step in which they are unused"
    )
