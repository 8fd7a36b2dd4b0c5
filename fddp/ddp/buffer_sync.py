"""Buffers of a wrapped module, which are those of rank 0 in every forward."""

from __future__ import annotations

import torch

from fddp.ddp.broadcast import broadcast_buffers
from fddp.ddp.join import last_rank
from fddp.ddp.state import WrapperState
from fddp.telemetry.flight.dump import dump_failures


class BufferSync(WrapperState):
    """A wrapped module whose forward passes synchronise buffers."""

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next forward synchronises at least one buffer."""
        # Walking a module for its buffers costs more than the rest of the work before a forward.
        is_on = self.require_forward_param_sync and self.forward_sync_buffers
        return is_on and self._watch.has_buffers and bool(self.named_module_buffers)

    def _assign_modules_buffers(self) -> None:
        """No-op. Buffers are looked up when needed."""

    def _sync_buffers(self, *, has_inputs: bool = True) -> None:
        """Broadcast buffers from rank 0, or within `join` from a rank that still has inputs."""
        if torch._C._current_graph_task_id() >= 0:
            return  # a checkpoint runs forward again, and ranks may be at different points
        self.steps.engine.check_usable()
        transport = self.steps.engine.transport
        src = 0
        if self._join_config.enable:
            src = last_rank(transport, mine=has_inputs) or 0
        with dump_failures(), torch.no_grad(), torch.inference_mode(False):
            if not hasattr(self, "buffer_hook"):
                broadcast_buffers(transport, self.module, self._options.ignored, src)
                return
            hook = self.buffer_hook
            # The hook may call operators, and also runs on ranks that have failed.
            with transport.step_scope(None):
                state, buffers = hook.buffer_comm_hook_state, self.named_module_buffers
                futures = hook.buffer_comm_hook(state, buffers)
            self.steps.runner.work.extend(future.wait for future in futures or ())
