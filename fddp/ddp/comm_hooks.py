"""Communication hooks of a wrapped module: torch's interface and fddp's."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from fddp.ddp.broadcast import buffers_of
from fddp.ddp.state import WrapperState
from fddp.hooks import Hook, TorchHook, builtin


class CommHooks(WrapperState):
    """A wrapped module that accepts communication hooks, for gradients and for buffers."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Synchronised buffers, by name."""
        return buffers_of(self.module, self._options.ignored)

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Synchronised buffers."""
        return list(self.named_module_buffers.values())

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Reduce buckets by a hook. Call it once, before the first backward.

        Args:
            state: passed to a hook for torch's DDP; None for a hook of `fddp.hooks`, whose state is
                `comm_hook_state`.
            hook: `hook(state, bucket) -> torch.futures.Future[Tensor]`, or an `fddp.hooks.Hook`.
        """
        if isinstance(hook, Hook):
            self._set_hook(hook, hook.name)
            return
        self._check_comm_hook(hook)
        name = getattr(hook, "__qualname__", type(hook).__name__)
        self._set_hook(TorchHook(state, hook, self._watch.latest), name)

    def _check_comm_hook(self, hook: Any) -> None:
        """Raise DDP's error if the signature is not a hook's."""
        if not callable(hook):
            self._log_and_throw(
                TypeError, f"Communication hook must be callable, got {type(hook).__name__}."
            )
        try:
            signature = inspect.signature(hook)
            names = list(signature.bind(None, None).arguments)
        except (TypeError, ValueError) as error:
            self._log_and_throw(
                TypeError, f"Communication hook must take a state and a bucket: {error}"
            )
        bucket, result = _annotation(hook, names[-1]), _annotation(hook, "return")
        if bucket not in (Any, dist.GradBucket):
            self._log_and_throw(
                ValueError,
                f"Communication hook: bucket annotation should be dist.GradBucket, got {bucket}.",
            )
        if result not in (Any, torch.futures.Future, torch.futures.Future[Tensor]):
            self._log_and_throw(
                ValueError,
                f"Communication hook: return annotation should be "
                f"torch.futures.Future[torch.Tensor], got {result}.",
            )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
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
        self.logger.note(comm_hook=name)

    def _setup_in_backward_optimizers(self) -> None:
        """Make optimizers that run in backward wait for the mean.

        See `torch.distributed.optim._apply_optimizer_in_backward`.
        """
        if any(hasattr(param, "_in_backward_optimizers") for param in self._module_parameters):
            self._check_steps_wait("_apply_optimizer_in_backward")
        # In both modes, `.grad` is no view of a bucket when the hook runs.
        as_view, self.gradient_as_bucket_view = self.gradient_as_bucket_view, False
        try:
            super()._setup_in_backward_optimizers()
        finally:
            self.gradient_as_bucket_view = as_view

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> None:
        """Run an optimizer in a hook, bucket by bucket, as torch does."""
        self._check_steps_wait("_register_fused_optim")
        super()._register_fused_optim(*args, **kwargs)

    def _check_steps_wait(self, way: str) -> None:
        # Gradients are checked at the end of a step; an optimizer must not have used some before.
        if self._nonfinite != "propagate":
            raise ValueError(
                f"nonfinite={self._nonfinite!r} and {way} can't be combined: the optimizer steps "
                f"bucket by bucket, before it is known if all gradients are finite; call "
                f"optimizer.step() after backward, or leave out nonfinite"
            )

    @property
    def comm_hook_state(self) -> Any:
        """State of a hook of `fddp.hooks`: a pytree to save, and to set when resuming."""
        return self.steps.engine.hook_states

    @comm_hook_state.setter
    def comm_hook_state(self, states: Any) -> None:
        engine = self.steps.engine
        engine.hook_states = engine.checked_states(states, "comm_hook_state")


def _annotation(hook: Any, name: str) -> Any:
    try:
        return get_type_hints(hook).get(name, Any)
    except Exception:  # quoted annotations may refer to unknown names
        return Any
