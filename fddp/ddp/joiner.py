"""Votes of the ranks of a wrapped module in `torch.distributed.algorithms.join.Join`.

[Note: counting who is left]
In torch's `Join`, ranks count the ranks with input over the caller's group. If a rank is lost, the
group's backend only reports a broken connection. The context that a wrapped module makes itself
counts over the module's transport, which names lost ranks, and within a host detects them at once.
A `Join` over several objects, made by the caller, is torch's and counts over the group.

[Note: steps that fail within join]
After a step that failed on all ranks, a rank with input either continues or leaves the block with
the error, depending on its loop. A rank without input does not know which, and has no loop that
could catch an error. So it keeps the error until the next count. A rank that leaves after such a
step reports this in the count, which is the next collective of all other ranks. Then they leave,
too: a rank without input raises the error that it kept, and a rank that continued raises
`RankLostError`. In a `Join` made by the caller, ranks can't report that they leave, so ranks
without input raise at once.
"""

from __future__ import annotations

from contextlib import suppress

from torch.distributed.algorithms.join import Join, Joinable

from fddp.ddp.steps import Steps
from fddp.ddp.torch_private import JoinConfig
from fddp.errors import FddpError, NonFiniteError, PeerError, RankLostError
from fddp.transport import Transport

_HAS_INPUT, _SYNCS, _LEAVES, _WEIGHS = 1, 2, 4, 8  # flags of a vote


class CountedHere(JoinConfig):
    """Configuration of a module in a `ModuleJoin`."""


class Joiner:
    """Votes of a rank with or without further input; see [Note: counting who is left].

    Args:
        steps: steps of the wrapped module. They must be open for a vote.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._some_sync = False  # by the last count: a backward pass will synchronise gradients
        self._failure: FddpError | None = None  # of the last step that this rank shadowed

    def notify(self, ddp: Joinable) -> None:
        """Notify joined ranks before a forward pass that this rank has input.

        Raises:
            RuntimeError: a rank has joined, and `throw_on_early_termination` is set.
        """
        config = ddp._join_config
        if not isinstance(config, CountedHere):
            work = Join.notify_join_context(ddp)
            if work is not None:
                self.steps.work.append(work.wait)
            return
        self.count(mine=True)
        throws = config.throw_on_early_termination
        if throws and self.count(mine=False):  # the joined ranks' count
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )

    def count(self, *, mine: bool) -> int:
        """Return the number of ranks with input. A collective call.

        Args:
            mine: True if this rank has some.

        Raises:
            FddpError: a rank has left; see [Note: steps that fail within join].
        """
        syncs = mine and self.steps.settings.syncs
        votes = self._votes(_HAS_INPUT * mine + self._pass_flags(syncs))
        kept, self._failure = self._failure, None
        left = tuple(rank for rank, vote in enumerate(votes) if vote & _LEAVES)
        if left:
            raise kept or _left_error(self.steps, left)
        self._note_passes(votes)
        return sum(bool(vote & _HAS_INPUT) for vote in votes)

    def leave(self) -> None:
        """Report in the next count that this rank leaves, if the last step failed."""
        if self.steps.is_open and self.steps.life.name == "failed":
            with suppress(FddpError):  # callers see the error that the block was left with
                self._votes(_LEAVES)

    def _votes(self, own: int) -> list[int]:
        self.steps.engine.check_usable()
        self.steps.note("voted")
        return _exchanged(self.steps.engine.transport, own, "inputs in join()")

    def some_sync(self, config: JoinConfig, *, mine: bool) -> bool:
        """Return True if the backward pass of any rank will synchronise gradients.

        A collective call, unless the count of ranks with input included it.
        """
        if not isinstance(config, CountedHere):
            flags = self._pass_flags(mine)
            self._note_passes(_exchanged(self.steps.engine.transport, flags, "votes"))
        return self._some_sync

    def _pass_flags(self, syncs: bool) -> int:
        """Flags of the coming backward pass of this rank."""
        return _SYNCS * syncs + _WEIGHS * (syncs and self.steps.weights.is_on)

    def _note_passes(self, votes: list[int]) -> None:
        self._some_sync = any(vote & _SYNCS for vote in votes)
        self.steps.weights.note_votes(any(vote & _WEIGHS for vote in votes))

    def take_part(self, ddp: Joinable, weight: float) -> None:
        """Run a step of the others, with this weight and without gradients.

        Raises:
            PeerError, NonFiniteError: the step failed, and the caller's `Join` counts.
        """
        try:
            self.steps.take_part(weight)
        except (PeerError, NonFiniteError) as error:
            if not isinstance(ddp._join_config, CountedHere):
                raise
            # Without the frames, which hold tensors of the step.
            self._failure = error.with_traceback(None)


def last_rank(transport: Transport, *, mine: bool) -> int | None:
    """Return the last rank that votes for it, or None. A collective call."""
    votes = transport.exchange(bytes([mine]), "votes")
    return max((rank for rank, vote in enumerate(votes) if vote != b"\0"), default=None)


def _exchanged(transport: Transport, flags: int, topic: str) -> list[int]:
    """Return the flags of all ranks."""
    received = transport.exchange(bytes([flags]), topic)
    return [int.from_bytes(vote[:1], "big") for vote in received]


def _left_error(steps: Steps, left: tuple[int, ...]) -> RankLostError:
    transport, step = steps.engine.transport, steps.engine.step - 1
    names = ", ".join(map(str, left))
    return RankLostError(
        f"join() on rank {transport.rank} of {transport.world_size}: lost rank {names}, which left "
        f"the block with an error after step {step} had failed on all ranks; catch the error of "
        f"such a step within the block on all ranks, or on none",
        left,
    )
