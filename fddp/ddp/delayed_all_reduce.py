"""Delayed all-reduce: some gradients are averaged together once a trigger has its gradient.

Some parameters accumulate gradients over several backward passes, for example in the stages of a
pipeline. Averaging after each pass would be wasteful. These parameters are in no bucket. They are
averaged in one all-reduce per dtype, at the end of the backward pass that produces the gradient of
the trigger, another parameter which receives its gradient last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fddp.collectives.replicas.broadcast import broadcast
from fddp.core.plan.defaults import MIB
from fddp.core.plan.leaf import MAX_COUNT
from fddp.ddp.steps import Steps
from fddp.ddp.weak_callback import weak_callback
from fddp.native.torch_private import queue_callback
from fddp.native.untraced import untraced
from fddp.sync.grad_sync import GradSync
from fddp.transport import Group


class Delayed:
    """Averages gradients of some parameters when a trigger has its gradient.

    Construction is a collective call, which broadcasts rank 0's parameters. On every rank, the same
    backward passes must produce a gradient of the trigger.

    Args:
        named: `(name, parameter)` pairs.
        trigger: the parameter whose gradient arrives last; it may be one of `named`.
        group: the group to average over.
        sparse: names of parameters with sparse gradients.
        at_end: called during backward with a callback for its end. It ignores the callback in
            backward passes without synchronisation.

    Raises:
        ValueError: the trigger requires no gradient.
        PlanMismatchError: parameters differ between ranks.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        trigger: Tensor,
        group: Group,
        *,
        sparse: Collection[str] = (),
        at_end: Callable[[Callable[[], None]], object],
    ) -> None:
        self._parameters = dict(named)
        self._at_end = at_end
        if not trigger.requires_grad:
            raise ValueError(
                f"param_to_hook_all_reduce, of shape {tuple(trigger.shape)}, does not require a "
                f"gradient, so the delayed all-reduce would never run; pass another parameter"
            )
        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        for name, value in broadcast(values, group=group).items():
            values[name].copy_(value)
        whole_mb = MAX_COUNT // MIB
        self._sync = GradSync(
            values,
            group=group,
            bucket_cap_mb=whole_mb,
            first_bucket_mb=whole_mb,
            sparse=self._parameters.keys() & set(sparse),
        )
        register: Any = trigger.register_post_accumulate_grad_hook  # torch has no types for it
        self._handle: RemovableHandle = register(weak_callback(self._ready))

    @untraced()
    def average(self) -> None:
        """Average the current gradients. A collective call.

        A gradient that no rank has stays None.

        Raises:
            As calling a `GradSync`.
        """
        own = {name: parameter.grad for name, parameter in self._parameters.items()}
        for name, mean in self._sync.reduce_(own).items():
            self._parameters[name].grad = mean

    def close(self) -> None:
        """Free the communicator and release the parameters."""
        self._handle.remove()
        self._sync.close()

    def _ready(self) -> None:
        self._at_end(self.average)


def end_of_backward(steps: Steps, *, all_delayed: bool) -> Callable[[Callable[[], None]], None]:
    """Return the `at_end` of a wrapped module.

    Args:
        steps: its steps, which wait for the callback. It is ignored without synchronisation.
        all_delayed: True if there are none, because all parameters are delayed.
    """

    def at_end(average: Callable[[], None]) -> None:
        if not steps.settings.is_on or steps.is_stopped:
            return
        if all_delayed:
            queue_callback(average)
        else:
            steps.open().work.append(average)

    return at_end
