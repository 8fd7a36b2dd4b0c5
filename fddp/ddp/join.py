"""Ranks with fewer inputs: a wrapped module in `torch.distributed.algorithms.join.Join`.

A rank without further input shadows the collectives of the others' forward and backward passes:
votes, the broadcast of buffers, and the step, to which it contributes nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from fddp.core.entrance import entrance
from fddp.ddp.forward_passes import ForwardPasses
from fddp.ddp.joiner import CountedHere, Joiner, last_rank
from fddp.ddp.steps import Steps
from fddp.errors import InternalError


class ModuleJoinHook(JoinHook):
    """Hook that `Join` calls on a rank without further input.

    Args:
        ddp: the wrapped module.
        divide_by_initial_world_size: True if joined ranks count in the mean.

    Raises:
        AssertionError: `ddp` is no wrapped module.
    """

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        if not isinstance(self._ddp, torch.nn.parallel.DistributedDataParallel):
            raise AssertionError(
                f"DDP join hook requires passing in a DistributedDataParallel instance as the "
                f"state, got {type(ddp).__name__}; pass the wrapped module"
            )
        self._joiner: Joiner = ddp._joiner
        self._forward: ForwardPasses = ddp._forward_passes
        self._weight = 1.0 if divide_by_initial_world_size else 0.0
        super().__init__()

    def main_hook(self) -> None:
        """Take part in one forward and backward pass of the others."""
        syncs = self._forward.shadow(self._ddp)
        self._ddp.require_forward_param_sync = syncs
        if syncs:
            self._joiner.take_part(self._ddp, self._weight)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the parameters of a rank that joined last."""
        self._ddp._sync_final_model(is_last_joiner)


class ModuleJoin(Join):
    """`Join` of one wrapped module; see [Note: counting who is left].

    Args:
        ddp: the wrapped module.
        joiner: its votes.
        enable, throw_on_early_termination, options: as for `Join`.
    """

    def __init__(
        self,
        ddp: Joinable,
        joiner: Joiner,
        *,
        enable: bool,
        throw_on_early_termination: bool,
        **options: Any,
    ) -> None:
        self._ddp = ddp
        self._joiner = joiner
        super().__init__([ddp], enable, throw_on_early_termination, **options)
        # It is never the "first" joinable, for which torch would count.
        ddp._join_config = CountedHere(enable, throw_on_early_termination, False)

    @entrance
    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._enable and isinstance(value, Exception):
                self._joiner.leave()
            super().__exit__(type, value, traceback)
        except Exception:
            self._joiner.leave()
            raise

    def _extract_dist_info(self) -> None:
        self._process_group, self._device = self._ddp.join_process_group, self._ddp.join_device
        self._rank = self._joiner.steps.engine.transport.rank

    def _get_num_nonjoined_procs(self) -> int:
        self._joiner.steps.settle()  # others wait for its end before their next count
        return self._joiner.count(mine=False)

    def _notify_procs_to_terminate(self) -> None:
        self._joiner.count(mine=True)
        raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")


def last_joiner(steps: Steps, *, is_last: bool) -> int:
    """Return a rank that joined last. A collective call."""
    steps.settle()
    src = last_rank(steps.engine.transport, mine=is_last)
    if src is None:
        raise InternalError("no rank was the last to join")
    return src
