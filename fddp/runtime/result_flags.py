"""Policies for non-finite numbers in steps whose report is read later.

[Note: flags of results]
Results are used before the host knows anything of other ranks, so the device decides. A NaN or
infinity of one rank is in the sum as well, and replicated results have the same bits on all ranks,
so each rank finds the same in its own. Shards differ from rank to rank: their flags are summed over
ranks. That is a collective of its own, after the last bucket, because an overflow shows in sums
alone; a rank that has failed takes part. Under "skip" results become zeros, because None would be a
decision of the host, and `found_inf` lets optimizers leave out the update. Under "raise" flags of
leaves are copied to the host, which reads them after the report.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fddp.native.pack import flag_nonfinite, measures_late
from fddp.runtime.finite_check import sum_votes
from fddp.runtime.nonfinite import Policy
from fddp.runtime.program import Program
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport.base import Transport


class ResultFlags:
    """Flags of non-finite results of one step. The host waits for a device in `has_skipped` and
    `found_paths` alone, and to write zeros to leaves on the CPU beside those on a device.

    Args:
        policy: "skip" or "raise".
        program: program of the step.
        transport: transport of the sum of flags over ranks.
        recorder: flight recorder of this sum.
        step: number of the step.
    """

    # 1.0 if a result of any rank is not finite, else 0.0; shape (), float32. None before the check.
    found_inf: Tensor | None = None
    # Under "raise", flags of the leaves in `_order`, copied to the host, and the event after which
    # they are there; None if they were not on an accelerator.
    _of_leaves: Tensor | None = None
    _order: Sequence[int] = ()
    _copied: torch.Event | None = None

    def __init__(
        self, policy: Policy, program: Program, transport: Transport, recorder: Recorder, step: int
    ) -> None:
        self._policy = policy
        self._program = program
        self._transport = transport
        self._recorder = recorder
        self._step = step

    @property
    def are_read_later(self) -> bool:
        """True if the host reads the flags with the report, even if that is there before."""
        return self._policy == "raise"

    def check_memory(self, memory: Sequence[Tensor], device: torch.device) -> None:
        """Under "skip", write zeros to the memory of this rank's results if a result of any rank is
        not finite. Before shards are joined, which copies them.

        Args:
            memory: memory of the results of all reduced leaves.
            device: device of the flags; not the CPU if results are on another.
        """
        if self._policy == "skip":
            flags, _ = flag_nonfinite(memory, device)
            mask = self._note(flags.amax(0, keepdim=True)).bool()
            for each in memory:
                _zero_(each, mask)

    def check_leaves(self, leaves: Sequence[Tensor | None], device: torch.device) -> None:
        """Under "raise", flag the leaves, and start to copy the flags to the host. Under "skip",
        write zeros to local leaves in the same steps as to the others. `device` as above."""
        plan = self._program.plan
        if self._policy == "skip":
            assert self.found_inf is not None
            for local in [leaf for i in plan.local if (leaf := leaves[i]) is not None]:
                _zero_(_values(local), self.found_inf.bool())
            return
        reduced = [leaf for i in plan.reduced if (leaf := leaves[i]) is not None]
        flags, order = flag_nonfinite([_values(leaf) for leaf in reduced], device)
        self._order = [plan.reduced[number] for number in order]
        self._note(flags)
        self._of_leaves = flags.to("cpu", non_blocking=True)
        if measures_late(device):
            self._copied = torch.Event(device)
            self._copied.record(torch.accelerator.current_stream(device))

    def abstain(self, device: torch.device) -> None:
        """Take part in the sum over ranks without results, on a rank that has failed."""
        size = 1 if self._policy == "skip" else len(self._program.plan.reduced)
        self._note(torch.zeros(size, device=device))

    def _note(self, flags: Tensor) -> Tensor:
        """Sum flags over ranks that hold different results. Note and return the flag of all."""
        if self._program.schedule.result == "sharded_mean":
            sum_votes(flags, self._transport, self._recorder, self._step)
        self.found_inf = flags.amax().clamp_(max=1.0)
        return self.found_inf

    @property
    def has_skipped(self) -> bool:
        """True if results were replaced by zeros."""
        return self._policy == "skip" and self.found_inf is not None and bool(self.found_inf)

    def found_paths(self) -> list[str]:
        """Return the paths of leaves that are not finite, under "raise"; the same on all ranks."""
        if self._of_leaves is None:
            return []
        if self._copied is not None:
            self._copied.synchronize()
        flags = zip(self._order, self._of_leaves.tolist(), strict=True)
        return [self._program.plan.paths[leaf] for leaf, flag in sorted(flags) if flag]


def _zero_(memory: Tensor, mask: Tensor) -> None:
    # A copy to the CPU is complete only if it blocks.
    mask = mask.to(memory.device, non_blocking=not memory.is_cpu)
    memory.masked_fill_(mask, 0.0)  # no product: NaN * 0 is NaN


def _values(leaf: Tensor) -> Tensor:
    return leaf._values() if leaf.is_sparse else leaf
