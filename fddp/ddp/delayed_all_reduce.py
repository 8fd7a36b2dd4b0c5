"""Parameters whose gradients are averaged together, in the backward pass that a chosen one ends.

Some parameters collect gradients over several backward passes, as the stages of a pipeline do.
Averaging after each would be waste. So these are in no bucket: they are averaged in one all-reduce
for each dtype, at the end of the backward pass that brings the gradient of another parameter, the
last one to get any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fddp.collectives.replicas.broadcast import broadcast
from fddp.core.plan.leaf import MAX_COUNT
from fddp.ddp.weak_callback import weak_callback
from fddp.sync.grad_sync import GradSync
from fddp.transport import Group
from fddp.tree.planner import MIB_BYTES


class Delayed:
    """Averages the gradients of some parameters when that of another one is there. Making it is a
    collective call, which brings the parameters to rank 0's values.

    Every rank must get a gradient of the other one in the same backward passes.

    Args:
        named: the parameters, by name.
        trigger: the parameter whose gradient is the last to come; it may be one of them.
        group: whom to average with.
        sparse: names of parameters whose gradients are sparse.
        at_end: called during backward with what is to be done at its end. It does nothing for
            backward passes that are not to be synchronised.

    Raises:
        ValueError: the trigger requires no gradient.
        PlanMismatchError: ranks have other parameters.
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
                f"gradient, so that the delayed all-reduce would never come; pass another one"
            )
        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        for name, value in broadcast(values, group=group).items():
            values[name].copy_(value)
        whole_mb = MAX_COUNT // MIB_BYTES
        self._sync = GradSync(
            values,
            group=group,
            bucket_cap_mb=whole_mb,
            first_bucket_mb=whole_mb,
            sparse=self._parameters.keys() & set(sparse),
        )
        register: Any = trigger.register_post_accumulate_grad_hook  # torch has no types for it
        self._handle: RemovableHandle = register(weak_callback(self._ready))

    def average(self) -> None:
        """Averages the gradients as they are now; a collective call.

        Where no rank has a gradient, there is none afterwards.

        Raises:
            As calling a `GradSync`.
        """
        own = {name: parameter.grad for name, parameter in self._parameters.items()}
        for name, mean in self._sync.reduce_(own).items():
            self._parameters[name].grad = mean

    def close(self) -> None:
        """Frees the communicator, and lets go of the parameters."""
        self._handle.remove()
        self._sync.close()

    def _ready(self) -> None:
        self._at_end(self.average)
