"""Ways of training in which faults strike: by a function of parameters, and by a wrapped module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import fddp
from fddp.hooks.hook import Hook
from tests.faults.chaos.faults import STEPS
from tests.support.models import batch, mlp_loss

if TYPE_CHECKING:
    from fddp.hooks.future import Future
    from fddp.sync.engine import Engine
    from tests.faults.chaos.program import Program
    from tests.faults.chaos.striking import Striker

_SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0003}


def start(program: Program) -> Functional | Wrapped:
    """Makes what communicates, in the way that the fault names."""
    return Wrapped(program) if program.fault.way == "module" else Functional(program)


def groups(program: Program) -> None:
    """Makes the groups that ways need; before faults strike."""
    timeout = timedelta(seconds=program.fault.timeout_s)
    program.group = dist.new_group(timeout=timeout) if program.fault.way == "module" else None


def _transport(program: Program) -> Any:
    fault = program.fault
    falls_back = (fault.kind, fault.stage) == ("full shm", "construction")
    return "auto" if falls_back and fault.transport == "shm" else fault.transport


@dataclass(frozen=True)
class FaultyHook(Hook[tuple[()]]):
    """Sums, unless the fault strikes; the same for all ranks."""

    def init(self, spec: Any) -> tuple[()]:
        return ()

    def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Future[Any]:
        strike_in_hook(STRIKERS[0], bucket.spec.index)
        return all_reduce(bucket.buffer).map(lambda total: (total, state))


STRIKERS: list[Striker] = []  # hooks of all ranks are alike, and so hold none


def strike_in_hook(striker: Striker, index: int) -> None:
    stage = {0: "first bucket", 1: "between buckets"}.get(index, "")
    assert striker.engine is not None
    striker.at(stage, striker.engine.step - 1)


class Functional:
    """`value_and_grad` in a loop of `uneven`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        fault = program.fault
        self._sync = fddp.GradSync(
            program.params,
            **_SMALL,
            transport=_transport(program),
            timeout_s=fault.timeout_s,
            hook=FaultyHook() if fault.kind == "error in hook" else None,
        )

    @property
    def engine(self) -> Engine:
        return self._sync._engine

    def train(self) -> None:
        program = self._program
        step = self._sync.value_and_grad(self._loss)
        for x in fddp.uneven(self._data(), self._sync):
            program.begin()
            _, grads = step(program.params, x)
            program.striker.at("update", program.done)
            for name, layer in program.params.items():
                for key, leaf in layer.items():
                    leaf.grad = grads[name][key]
            program.update()

    def _data(self) -> Iterator[Any]:
        for number in range(self._program.done, STEPS):
            if self._program.fault.kind == "error in data":
                self._program.striker.at("update", number)
            yield batch(self._program.rank, number)

    def _loss(self, params: Any, x: Any) -> Any:
        self._program.striker.at("forward", self._program.done)
        return mlp_loss(params, x)

    def close(self) -> None:
        self._sync.close()


class Wrapped:
    """`DistributedDataParallel`, on a group with the fault's timeout."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._model = fddp.DistributedDataParallel(
            _Net(program),
            process_group=program.group,
            bucket_cap_mb_list=list(_SMALL.values())[::-1],
            transport=_transport(program),
        )
        if program.fault.kind == "error in hook":
            self._model.register_comm_hook(None, FaultyHook())

    @property
    def engine(self) -> Engine:
        return self._model.steps.engine

    def train(self) -> None:
        program = self._program
        for number in range(program.done, STEPS):
            program.begin()
            program.optimizer.zero_grad(set_to_none=True)  # a step that failed leaves its own
            if program.fault.kind == "error in data":
                program.striker.at("update", number)
            self._model(batch(program.rank, number)).backward()
            program.striker.at("update", number)
            program.update()

    def close(self) -> None:
        for leaf in self._program.leaves:
            leaf.grad = None  # which may lie in shared memory
        self._model.steps.close()


class _Net(torch.nn.Module):
    """`mlp_loss`, with the program's leaves as parameters."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = [program]  # no part of the module
        for name, layer in program.params.items():
            part = torch.nn.Module()
            for key, leaf in layer.items():
                part.register_parameter(key, torch.nn.Parameter(leaf))
            self.add_module(name, part)
        program.leaves[:] = list(self.parameters())
        program.optimize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (program,) = self._program
        program.striker.at("forward", program.done)
        return mlp_loss({n: dict(part.named_parameters()) for n, part in self.named_children()}, x)
