"""Generated signals to real processes, after which all ranks must have stopped after the same step
with a checkpoint that loads.

A rank that reaches the phase in which it is to get a signal asks `Sender`, in another process, for
it. So signals come at any time, also while the rank waits for others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor

import fddp
from fddp.jax import named_errors, pmean
from tests.support.polling import PROMPT_S

PHASES = ("before the step", "loss function", "backward", "optimizer", "after the step", "saving")
OF_A_STEP = PHASES[:3]  # up to the control word, or about
#: ways to take steps, and after how many further steps each sees a request
WAYS = {"functional": 0, "module": 0, "next": 1, "jax": 0}
_LATEST_STEP, _LATEST_S = 3, 0.01


class Signal(NamedTuple):
    """SIGTERM for one rank.

    Attributes:
        rank: the rank.
        step: number of a step.
        phase: the phase of this step that the rank reaches before the signal is sent.
        after_s: seconds from then to the signal; 0 if the rank stays in the phase until it comes.
    """

    rank: int
    step: int
    phase: str
    after_s: float


class Scenario(NamedTuple):
    """A loop of all ranks that one, some or all of them get a signal to end."""

    way: str
    signals: tuple[Signal, ...]


class Seen(NamedTuple):
    """Log of a rank.

    Attributes:
        got: last phase that was reached before its signal came, and its step; None without one.
        steps: number of steps that were taken.
        digest: of parameters at the end.
        saved: steps and digest of the checkpoint that was loaded.
    """

    got: tuple[int, str] | None
    steps: int
    digest: float
    saved: tuple[int, float]


def draw(seed: int, number: int, world_size: int) -> list[Scenario]:
    """Scenarios of all ways in turn, with a signal for at least one rank each."""
    source = random.Random(seed)

    def signals(way: str) -> Iterator[Signal]:
        count = source.choice((1, source.randint(1, world_size), world_size))
        for rank in source.sample(range(world_size), count):
            phase = source.choice(PHASES)
            stays = source.random() < 0.5 and not (way == "jax" and phase in OF_A_STEP[1:])
            after_s = 0.0 if stays else round(source.uniform(0.0001, _LATEST_S), 4)
            yield Signal(rank, source.randint(0, _LATEST_STEP), phase, after_s)

    ways = [[*WAYS][index % len(WAYS)] for index in range(number)]
    return [Scenario(way, tuple(signals(way))) for way in ways]


def problems(scenario: Scenario, seen: Sequence[Seen]) -> list[str]:
    """Return what the logs of all ranks contradict."""
    found = []
    if len({each.steps for each in seen}) > 1:
        found.append(f"ranks took {[each.steps for each in seen]} steps")
    if len({each.digest for each in seen}) > 1:
        found.append(f"parameters differ: {[each.digest for each in seen]}")
    for rank, each in enumerate(seen):
        if each.saved != (each.steps, each.digest):
            found.append(f"rank {rank} loaded {each.saved} of step {each.steps} with {each.digest}")
    # A step that has begun may be too far to say it; the next one says it.
    told = [each.got[0] + (each.got[1] not in OF_A_STEP) for each in seen if each.got]
    begun = [each.got[0] + 1 for each in seen if each.got]
    if not told:
        found.append("no rank got a signal")
    elif not min(told) + 1 <= seen[0].steps <= min(begun) + 1 + WAYS[scenario.way]:
        got = [each.got for each in seen]
        found.append(f"signals came at {got}, and ranks took {seen[0].steps} steps")
    return found


class Sender:
    """Sends signals to ranks that ask for one, from the process that made it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while request := self._socket.recv(64):
            pid, after_s = json.loads(request)
            threading.Timer(after_s, os.kill, (pid, signal.SIGTERM)).start()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"", self.path)
        self._thread.join()
        self._socket.close()


# What follows runs on ranks.


class Loop:
    """The loop of one rank: where it is, and the signal that it gets."""

    def __init__(self, own: Signal | None, send: Callable[[float], None]) -> None:
        self._own, self._send = own, send
        self._sent = False
        self.at = (0, PHASES[0])
        self.got: tuple[int, str] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handler that is there before those of `stop_on_signal`."""
        self.got = self.at

    def reach(self, step: int, phase: str) -> None:
        self.at = (step, phase)
        own = self._own
        if own is None or self._sent or (own.step, own.phase) != self.at:
            return
        self._sent = True
        self._send(own.after_s)
        if own.after_s == 0.0:
            self.await_signal()

    def await_signal(self) -> None:
        """Wait for the signal that was sent, if one was."""
        deadline_s = time.monotonic() + PROMPT_S
        while self._sent and self.got is None:
            assert time.monotonic() < deadline_s, "the signal did not come"
            time.sleep(0.0001)


def stopped(
    rank: int, world_size: int, scenarios: Sequence[Scenario], path: str, folder: str
) -> list[Seen]:
    """Run scenarios on a rank, one after the other."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect(path)

        def send(after_s: float) -> None:
            out.send(json.dumps([os.getpid(), after_s]).encode())

        found = []
        for scenario in scenarios:
            own = next((each for each in scenario.signals if each.rank == rank), None)
            loop = Loop(own, send)
            before = signal.signal(signal.SIGTERM, loop.note)
            try:
                found.append(_run(scenario.way, loop, Path(folder, f"{rank}.pt")))
            finally:
                signal.signal(signal.SIGTERM, before)
    return found


def _run(way: str, loop: Loop, path: Path) -> Seen:
    steps = {"module": _module, "jax": _program}.get(way, _function)
    number = 0
    with steps(way, loop) as (sync, step, held), fddp.stop_on_signal(sync):
        while not sync.stopping:
            loop.reach(number, PHASES[0])
            step(number)
            loop.reach(number, "after the step")
            with open(path.with_suffix(".new"), "wb") as file:
                loop.reach(number, "saving")
                torch.save({"step": number + 1, "held": held()}, file)
            os.replace(file.name, path)
            number += 1
        loop.await_signal()
    saved = torch.load(path)
    return Seen(loop.got, number, _digest(held()), (saved["step"], _digest(saved["held"])))


def _digest(held: list[Tensor]) -> float:
    """Number that every step changes."""
    return sum(float(leaf.double().square().sum()) for leaf in held)


Steps = tuple[Any, Callable[[int], None], Callable[[], list[Tensor]]]


@contextmanager
def _function(way: str, loop: Loop) -> Iterator[Steps]:
    params = {"w": torch.ones(1000), "v": torch.ones(3)}
    number = 0

    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        loop.reach(number, "loss function")
        w = params["w"] * 1.0
        w.register_hook(lambda _: loop.reach(number, "backward"))
        return w.square().mean() + params["v"].sum()

    with fddp.GradSync(params, report="next" if way == "next" else "now") as sync:
        step = sync.value_and_grad(loss_fn)

        def take(now: int) -> None:
            nonlocal number, params
            number = now
            _, grads = step(params)
            loop.reach(number, "optimizer")
            params = fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)

        yield sync, take, lambda: [*params.values()]


@contextmanager
def _module(way: str, loop: Loop) -> Iterator[Steps]:
    module = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(module.weight, 0.5)
    torch.nn.init.zeros_(module.bias)
    ddp = fddp.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def take(number: int) -> None:
        optimizer.zero_grad()
        output = ddp(torch.ones(2, 8))
        loop.reach(number, "loss function")
        output.register_hook(lambda _: loop.reach(number, "backward"))
        output.square().mean().backward()
        loop.reach(number, "optimizer")
        optimizer.step()

    yield ddp, take, lambda: [param.detach() for param in module.parameters()]


@contextmanager
def _program(way: str, loop: Loop) -> Iterator[Steps]:
    """Steps of a program of JAX, from which phases are reached on threads of XLA."""
    params = {"w": np.ones(1000, np.float32), "v": np.ones(3, np.float32)}
    with fddp.Communicator() as ranks:

        @jax.jit
        def step(params: Any, number: Any) -> Any:
            jax.debug.callback(lambda n: loop.reach(int(n), "loss function"), number)
            grads = jax.grad(lambda p: (p["w"] ** 2).mean() + p["v"].sum())(params)
            jax.debug.callback(
                lambda n, _: loop.reach(int(n), "backward"), number, grads["v"], ordered=False
            )
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, pmean(grads, ranks))

        def take(number: int) -> None:
            nonlocal params
            with named_errors():
                found = step(params, number)
            loop.reach(number, "optimizer")
            params = found

        yield ranks, take, lambda: [torch.tensor(np.asarray(leaf)) for leaf in params.values()]
