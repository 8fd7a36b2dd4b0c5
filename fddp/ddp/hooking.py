"""Communication hooks of a wrapped module: torch's interface, and fddp's."""

from __future__ import annotations

from typing import Any

from fddp.ddp.holder import Holder
from fddp.hooks import Hook, TorchHook, builtin


class Hooked(Holder):
    """A wrapped module that takes hooks."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Has a hook carry out the reduction of buckets; before the first backward, and once.

        Args:
            state: passed to a hook that was written for torch's DDP; None for one of `fddp.hooks`,
                whose state is `comm_hook_state`.
            hook: `hook(state, bucket) -> torch.futures.Future[Tensor]`, or a `fddp.hooks.Hook`.
        """
        if isinstance(hook, Hook):
            self._set_hook(hook, hook.name)
            return
        self._check_comm_hook(hook)
        self._set_hook(TorchHook(state, hook, self._watch.params), hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """The same with one of torch's compiled hooks."""
        self._set_hook(builtin(comm_hook_type), str(comm_hook_type))

    def _set_hook(self, hook: Hook[Any], name: str) -> None:
        engine = self.steps.engine
        if engine.hook is not None:
            self._log_and_throw(
                RuntimeError,
                "register_comm_hook or register_builtin_comm_hook can only be called once. Make a "
                "new wrapper for another hook",
            )
        engine.set_hook(hook)
        self._recorder.note(comm_hook=name)

    def _setup_in_backward_optimizers(self) -> None:
        """Has optimizers that run in backward wait for the mean; see
        `torch.distributed.optim._apply_optimizer_in_backward`."""
        # The hook finds no views of buckets in `.grad` during backward, in either mode.
        as_view, self.gradient_as_bucket_view = self.gradient_as_bucket_view, False
        try:
            super()._setup_in_backward_optimizers()
        finally:
            self.gradient_as_bucket_view = as_view

    @property
    def comm_hook_state(self) -> Any:
        """State of a hook of `fddp.hooks`; a pytree to save, and to set again on resuming."""
        return self.steps.engine.hook_states

    @comm_hook_state.setter
    def comm_hook_state(self, states: Any) -> None:
        engine = self.steps.engine
        engine.hook_states = tuple(engine.checked_states(states, "comm_hook_state"))
