"""State of a wrapped module that goes on with the ranks that are left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Module

from fddp.collectives.replicas.reconcile import reconciled
from fddp.ddp.broadcast import buffers_of
from fddp.transport import Transport


class Stateful(Protocol):
    """Object with a state, such as an optimizer or a schedule of learning rates."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def load_newest_(
    transport: Transport,
    module: Module,
    ignored: Collection[str],
    others: Sequence[Stateful],
    finished: int,
) -> int:
    """Load the newest rank's parameters, buffers and states of `others` in place, and return the
    number of steps that it had finished. A collective call.

    Args:
        transport: transport of the ranks.
        module: the module.
        ignored: names of parameters and buffers of each rank's own.
        others: further objects with a state.
        finished: number of steps that this rank has finished.
    """
    own = {name: p.detach() for name, p in module.named_parameters() if name not in ignored}
    own |= buffers_of(module, ignored)
    mine = {"module": own, "others": [each.state_dict() for each in others]}
    newest, number = reconciled(transport, mine, finished)
    if newest is not mine:
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(newest["module"][name])
        for each, state in zip(others, newest["others"], strict=True):
            each.load_state_dict(state)
    return number
