"""Handles of steps that were started and are awaited later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fddp.core.entrance import entrance
from fddp.core.protocol.calls import Method
from fddp.errors import ReentryError, TransformError
from fddp.runtime.finish import send
from fddp.runtime.inputs import outside_transforms
from fddp.runtime.step import Step
from fddp.sync.engine import Engine
from fddp.tree.pytree import TreeDef


class StepHandle:
    """Results of a step that was started, for a later wait.

    Made by `GradSync.start` and `GradSync.start_all_gather`. The `GradSync` finishes a step in
    flight before its next one, and before it is closed or rebuilt.

    Attributes:
        state: new state of the communication hook, after `wait`; () if it keeps none.

    Example:
        >>> import fddp, torch
        >>> def train(group):
        ...     params = {"w": torch.ones(4)}
        ...     with fddp.GradSync(params, group=group, algorithm="reduce_scatter") as sync:
        ...         own = sync.shard(params)
        ...         grads = sync.reduce_scatter({"w": torch.ones(4) + group.rank})
        ...         own = fddp.tree_map(lambda p, g: p - 0.1 * g, own, grads)
        ...         handle = sync.start_all_gather(own)
        ...         # Load the next batch here, or write logs.
        ...         return handle.wait()["w"].tolist()
        >>> fddp.loopback(2, train)[0]
        [0.8500000238418579, 0.8500000238418579, 0.8500000238418579, 0.8500000238418579]
    """

    def __init__(self, engine: Engine, step: Step) -> None:
        """Hold a step that was begun; `send` launches its collectives."""
        self.state: tuple[Any, ...] = ()
        self._engine = engine
        self._results: Any = None
        self._error: BaseException | None = None
        self._step: Step | None = step  # None once a thread ends it
        # Streams of the accelerators on which the step was begun. It ends there, as it uses memory
        # of theirs, and those of `wait` wait for them.
        self._streams = [
            torch.accelerator.current_stream(device)
            for device in {*step.devices.values()}
            if device.type not in ("cpu", "meta")
        ]
        # Held while a thread ends the step, for which others wait. Reentrant: a signal handler or a
        # communication hook may close the `GradSync` meanwhile.
        self._ending = threading.RLock()

    def send(self) -> None:
        """Launch the collectives that need not wait for others, whose errors `wait` raises; with a
        communication hook, `wait` launches them."""
        if self._step is not None:
            self._engine.note_in_flight(self._finish)
            with _on_streams(self._streams):
                send(self._step)

    @property
    def is_done(self) -> bool:
        """True if the step has ended, so that `wait` does not block."""
        return self._results is not None or self._error is not None

    @entrance
    def wait(self) -> Any:
        """Wait for the results and return them. Further calls return the same tensors.

        Returns:
            A tree with the structure of what was passed to the start: the mean, as of a call, or
            whole leaves, as of `GradSync.all_gather`.

        Raises:
            TreeMismatchError: what was passed does not fit the plan.
            TransformError: a `torch.func` transform or a tracer was active at the start; or a graph
                is captured, and was not then, or the other way round.
            WeightError, NonFiniteError: as of a call.
            ReentryError: called by what runs within another call of it.
            PeerError: another rank raised one of these.
            DesyncError: ranks are at different steps.
            ClosedError: the `GradSync` was closed before the step could end.
            RankLostError, SyncTimeoutError: a rank was lost, or did not start the step.
        """
        self._finish()
        if self._error is not None:
            raise self._error
        if self._results is None:
            raise ReentryError(
                "wait() was called while this thread ends the same step, as from a signal handler "
                "or a communication hook; return from there first"
            )
        treedef, leaves = self._results
        return treedef.unflatten(leaves)

    def _finish(self) -> None:
        """End the step, and keep its results or its error for `wait`."""
        with self._ending:
            step, self._step = self._step, None
            if step is None:
                return
            if step.code.is_captured and not step.is_captured:
                self._step = step
                raise TransformError(
                    f"step {step.number} was started outside of the capture of a graph, and is "
                    f"awaited inside of it; call wait() where start() was called"
                )
            self._engine.note_in_flight(None)
            try:
                with _on_streams(self._streams):
                    self._results = step.begin_result, self._engine.finish(step).leaves
                self.state = tuple(step.hook_states)
            except BaseException as error:
                self._error = error
                if not isinstance(error, Exception):
                    raise

    def __repr__(self) -> str:
        return f"StepHandle(is_done={self.is_done})"


@contextmanager
def _on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Make streams the current ones, for which those before wait at the end."""
    before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    with ExitStack() as stack:
        for outer, stream in zip(before, streams, strict=True):
            stack.callback(outer.wait_stream, stream)
            stack.enter_context(stream)
        yield


def start_step(
    engine: Engine, method: Method, begin: Callable[[Step], TreeDef], label: str = ""
) -> StepHandle:
    """Begin a step, and launch its collectives that need not wait for others.

    Args:
        engine: engine of the step.
        method, begin: as for `Engine.run`; `begin` returns the structure of the results.
        label: text that must be the same on all ranks, for errors.
    """
    engine.finish_in_flight()
    is_within_step, number = engine.is_in_step, engine.step
    try:
        handle = StepHandle(engine, engine.start(method, begin, label=label))
        with outside_transforms():
            handle.send()
    except BaseException as error:
        engine.end_interrupted(number, error)
        raise
    if is_within_step:
        # Ranks launch the step's further collectives at different times.
        engine.finish_in_flight()
    return handle
