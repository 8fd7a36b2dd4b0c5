"""Constants of one step, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport
from fddp.native.buffer_pool import BufferPool
from fddp.native.executor import NativeCollectives, NativeConstants, NativeInstrs
from fddp.native.layout import Stats
from fddp.runtime.hook_binding import BoundHook
from fddp.runtime.nonfinite import Policy
from fddp.runtime.program import Program
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport.base import Transport

NO_BUCKETS: frozenset[int] = frozenset()


class Outcome(NamedTuple):
    """Outcome of a step.

    Attributes:
        leaves: the synchronised gradients, by leaf; local ones for leaves that are not reduced.
        report: the control word summed over ranks.
        stats: squared norm and finiteness of the synchronised gradients; None unless requested.
        skipped: True if all ranks skipped the step because of a non-finite number; all leaves are
            then None.
    """

    leaves: list[Tensor | None]
    report: ControlReport
    stats: Stats | None
    skipped: bool = False


class RegularWord(NamedTuple):
    """Control word of a rank that contributes all gradients with the agreed weight, with a
    fingerprint of 0, and the report of the sum of such words.

    Attributes:
        vector: elements of the word.
        report: report of the sum over ranks, for matching fingerprints.
    """

    vector: Tensor
    report: ControlReport


class ListKey(NamedTuple):
    """Selection of operations.

    Attributes:
        idle: buckets that are left out because no rank used them in the previous step.
        timed: True if the times of collectives are recorded.
        late: buckets with late gradients.
        views: True if results are views of the buffers.
    """

    idle: frozenset[int] = NO_BUCKETS
    timed: bool = False
    late: frozenset[int] = NO_BUCKETS
    views: bool = False


USUAL = ListKey()
"""Selection of a step with nothing special, before the sum of the control words is known."""

WITH_VIEWS = ListKey(views=True)
"""Selection of a step with nothing special whose results are slices of the buffers."""


class FirstLists(NamedTuple):
    """Instructions of a step before the sum of the control words is known.

    Attributes:
        before_word: those before this rank's control word is written.
        after_word: those up to the first that depends on the sum.
    """

    before_word: NativeInstrs
    after_word: NativeInstrs


class Code(Protocol):
    """Instructions of a program; see `compiled.py`.

    Attributes:
        program: the program.
        hook: the communication hook, bound to the program, if there is one.
        constants, collectives: constants and all-reduces in the extension.
        is_native: True if buckets are reduced by the extension.
        packs_natively: True if the extension packs them, too.
        has_views: True if the results of a regular step are views of the buffers.
        has_regular_words: True if `regular_word` describes regular steps.
    """

    program: Program
    hook: BoundHook | None
    collectives: NativeCollectives
    is_native: bool
    packs_natively: bool
    has_views: bool
    has_regular_words: bool

    @property
    def constants(self) -> NativeConstants: ...
    def first_lists(self, key: ListKey) -> FirstLists: ...
    def rest(self, key: ListKey) -> NativeInstrs: ...
    def regular_word(self, method: Method, weight: float) -> RegularWord: ...


@dataclass(slots=True, eq=False)
class StepContext:
    """Constants of one step. Not a named tuple, whose fields are slow to read.

    Attributes:
        code: instructions of the program to execute.
        transport: transport of the collectives.
        pool: memory for buckets.
        step: number of the step.
        method: the call that opened it.
        with_stats: True to record times, norm and finiteness.
        recorder: flight recorder of the operations.
        idle: buckets that are left out because no rank used them in the previous step; a gradient
            for one makes it late. The same on all ranks.
        nonfinite: policy for non-finite numbers.
        when: suffix of `moment` that callers may set; the same on all ranks.
    """

    code: Code
    transport: Transport
    pool: BufferPool
    step: int
    method: Method
    with_stats: bool
    recorder: Recorder
    idle: frozenset[int] = NO_BUCKETS
    nonfinite: Policy = "propagate"
    when: str = ""

    @property
    def moment(self) -> str:
        """Text that identifies the step; the same on all ranks in step."""
        return f"{self.step}{self.when}"
