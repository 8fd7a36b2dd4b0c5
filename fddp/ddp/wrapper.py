"""`DistributedDataParallel`: the interface of torch's, over fddp's engine.

The class is torch's subclass, because checkpointing, pipelining and dynamo test for it, and takes
from it what has nothing to do with gradients. Everything else it asks of the engine: plans,
schedules, hooks and the control word are those of `GradSync`.
"""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn import Module

from fddp.ddp.arguments import Arguments, checked, group_of
from fddp.ddp.broadcast import broadcast_buffers, broadcast_module, buffers_of
from fddp.ddp.comm_hooks import CommHooks
from fddp.ddp.failure_scope import FailurePropagation
from fddp.ddp.introspection import Introspection
from fddp.ddp.join import ModuleJoin, ModuleJoinHook, last_rank, notify, some_sync
from fddp.ddp.mixed_precision import MixedPrecision
from fddp.ddp.nonfinite import check_policy
from fddp.ddp.outputs import find_tensors
from fddp.ddp.tensor_parallel import make_local_
from fddp.errors import InternalError
from fddp.runtime.nonfinite import Policy
from fddp.telemetry.flight.dump import dump_failures
from fddp.transport import TransportName

# What is made anew where a wrapper is copied or unpickled.
_NOT_STATE = (
    "process_group",
    "reducer",
    "logger",
    "_steps",
    "_watch",
    "_recorder",
    "_delayed",
    "_meetings",
)


class DistributedDataParallel(Introspection, CommHooks, FailurePropagation):
    """A module whose gradients are averaged over ranks while backward runs.

    Takes the place of `torch.nn.parallel.DistributedDataParallel`: the same arguments, methods and
    errors. Where it differs on purpose, see the table in `docs/ddp.md`. Making one is a collective
    call, as are forward and backward.

    Args:
        module: what to wrap. Its parameters and buffers are broadcast from rank 0.
        device_ids, output_device: the one device of a module on a GPU; None on the CPU.
        dim: the dimension along which `scatter` and `gather` work.
        broadcast_buffers: the deprecated name of `forward_sync_buffers`.
        init_sync: False makes nothing of this call collective; the first forward is then.
        process_group: a group of `torch.distributed`, or the group that `fddp.loopback` hands out;
            None for the default group.
        bucket_cap_mb: MiB at which a bucket is closed; 25, with a first one of 1, by default.
        find_unused_parameters: parameters may go unused without complaint. They are always
            synchronised, whatever this says.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: every step puts new tensors, over its buckets' memory, in `.grad`;
            otherwise tensors that were there before backward are written.
        static_graph: all steps use the same parameters; an error says if not.
        delay_all_reduce_named_params: `(name, parameter)` pairs to average together, when the
            gradient of `param_to_hook_all_reduce` is there.
        param_to_hook_all_reduce: see above.
        mixed_precision: dtypes to compute, to reduce and to keep buffers in.
        device_mesh: a one-dimensional `DeviceMesh` instead of `process_group`.
        skip_all_reduce_unused_params: buckets that no rank used in one step are left out of the
            next; if a rank does use one then, all reduce it once they know.
        bucket_cap_mb_list: caps of the first, second, ... bucket, in MiB.
        batched_grad_copy: without effect: small gradients are always packed together.
        forward_sync_buffers: every forward starts with rank 0's buffers.
        transport: as for `GradSync`; torch's class has no such argument.
        nonfinite: what becomes of a step in which a rank's gradient, or a sum, is NaN or infinite;
            torch's class has no such argument. "propagate" puts what came out into `.grad`. "skip"
            leaves the step out on all ranks: every `.grad` that the wrapper looks after is None, so
            that an optimizer passes over it, and `skipped` is True. "raise" is a `NonFiniteError`
            on every rank, which names ranks and parameters.

    Raises:
        PlanMismatchError: ranks' parameters differ; on every rank. A RuntimeError, as DDP's is.
        RuntimeError, ValueError: as torch's, for arguments that make no sense; and where
            `nonfinite` can't hold for all parameters, because some have a delayed all-reduce.

    Example:
        >>> import torch
        >>> from fddp import DistributedDataParallel as DDP, loopback
        >>> def train(group):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     ddp = DDP(model, process_group=group)
        ...     ddp(torch.full((1, 2), 1.0 + group.rank)).sum().backward()
        ...     return model.weight.grad.tolist()
        >>> loopback(2, train)
        [[[1.5, 1.5]], [[1.5, 1.5]]]
    """

    def __init__(
        self,
        module: Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Tensor | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: TransportName = "auto",
        nonfinite: Policy = "propagate",
    ) -> None:
        Module.__init__(self)
        Joinable.__init__(self)
        arguments = Arguments(
            device_ids,
            output_device,
            dim,
            broadcast_buffers,
            init_sync,
            process_group,
            bucket_cap_mb,
            find_unused_parameters,
            check_reduction,
            gradient_as_bucket_view,
            static_graph,
            delay_all_reduce_named_params,
            param_to_hook_all_reduce,
            mixed_precision,
            device_mesh,
            skip_all_reduce_unused_params,
            bucket_cap_mb_list,
            batched_grad_copy,
            forward_sync_buffers,
        )
        self.process_group = group_of(arguments)
        check_policy(nonfinite, delays=delay_all_reduce_named_params is not None)
        self._transport = transport
        self._nonfinite = nonfinite
        make_local_(module, device_mesh)
        self._options = checked(module, arguments)
        self._expose(module, self._options)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._mixed: MixedPrecision | None = None
        self._delays = (arguments.delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._attach()
        if self._options.init_sync and not self._all_delayed:
            self._init_sync()
        if mixed_precision is not None:
            self._mixed = MixedPrecision(module, mixed_precision)

    def _init_sync(self) -> None:
        broadcast_module(
            self.steps.engine.transport,
            self.module,
            self._options.ignored,
            0,
            buffers=self._options.init_sync_buffers,
        )

    # Forward

    # Dynamo leaves the wrapper's own code alone, and compiles the module.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output; gradients are synchronised by the backward passes through it.

        Within a transform of `torch.func`, and under `functional_call` with other tensors, it is
        the module's function alone: nothing is communicated, and gradients are this rank's own.
        """
        with torch.profiler.record_function("DistributedDataParallel.forward"):
            is_followed = self._pre_forward()
            output = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(output) if is_followed else output

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _pre_forward(self) -> bool:
        """What comes before the module's own forward; whether it is one that steps follow."""
        if self._all_delayed or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        change = self._watch.change()
        if change == "swapped":
            return False
        self._prepare(change == "changed")
        return True

    def _prepare(self, changed: bool) -> None:
        """What comes before the module's own forward."""
        self._recorder.forward_start_s = time.perf_counter()
        steps, syncs = self.steps, self._syncs
        steps.give_up_stale()
        if not self._lazy_init_ran:
            self._lazy_init()
        if syncs:
            self._raise_pending()
            steps.usage.begin_forward()
        steps.usage.joining = self._join_config.enable
        if changed or not steps.intact():
            steps.change(self._request())
            self._recorder.renumber(steps.usage.names)
        if torch.is_grad_enabled():
            steps.begin_forward()
        self._sync_before_forward()

    def _sync_before_forward(self) -> None:
        """What ranks do together before the module's own forward."""
        self._forward_collectives.is_open = True
        self.steps.has_failed = False
        if self._join_config.enable:
            notify(self)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            some_sync(self, mine=self._syncs)
        self._forward_collectives.done += 1
        self._forward_collectives.is_open = False

    @property
    def _syncs(self) -> bool:
        return torch.is_grad_enabled() and self._switches.backward

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(
                inputs, kwargs, device, self.use_side_stream_for_tensor_copies
            )
            inputs, kwargs = moved[0], moved_kwargs[0]
        # Dynamo learns from a global of torch's that this is DDP; ranks that are threads share it.
        is_process = isinstance(self.process_group, dist.ProcessGroup)
        with self._inside_ddp_forward() if is_process else nullcontext():
            if self._mixed is not None:
                return self._mixed.run(self.module, inputs, kwargs)
            return self.module(*inputs, **kwargs)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _post_forward(self, output: Any) -> Any:
        self._sync_after_forward()
        self.require_forward_param_sync = self._syncs
        if self._syncs and not self._watch.all_frozen:
            self.steps.expect(find_tensors(output))
        return output

    def _sync_after_forward(self) -> None:
        """What ranks do together after the module's own forward."""
        self._forward_collectives.is_open = True
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self._forward_collectives.done += 1
        self._forward_collectives.is_open = False

    def _raise_pending(self) -> None:
        """Raises what is to be said of the last step."""
        if self._steps is not None and self._steps.usage.pending:
            self._log_and_throw(RuntimeError, self._steps.usage.pending)

    # Switches

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes synchronise gradients; `no_sync` turns it off. The forward and
        the backward pass must both be outside of it."""
        return self._switches.backward

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._switches.backward = on

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return self._switches.forward

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, on: bool) -> None:
        self._switches.forward = on

    # Buffers

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronised, by name."""
        return buffers_of(self.module, self._options.ignored)

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The same without names."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronises buffers, of which there are some."""
        # To walk a module for its buffers costs more than all else that comes before a forward.
        if not (self._switches.forward and self.forward_sync_buffers and self._watch.has_buffers):
            return False
        return bool(self.named_module_buffers)

    def _assign_modules_buffers(self) -> None:
        """Nothing to do: buffers are looked up when they are wanted."""

    def _sync_buffers(self, *, has_inputs: bool = True) -> None:
        """Brings buffers to rank 0's values, or to those of a rank that still has inputs."""
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
            # It may call operators, and runs on ranks that have failed as well.
            with transport.step_scope(None):
                state, buffers = hook.buffer_comm_hook_state, self.named_module_buffers
                futures = hook.buffer_comm_hook(state, buffers)
            self.steps.work += [future.wait for future in futures or ()]

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> ModuleJoin:
        """For loops over inputs of unequal length, as torch's: within it ranks that have none left
        shadow what the others do.

        Args:
            divide_by_initial_world_size: whether ranks that have joined still count in the mean.
            enable: False does nothing.
            throw_on_early_termination: all ranks raise once one has no input left.

        Raises:
            RankLostError, SyncTimeoutError: a rank is gone or has left the block with an error, or
                did not come; inside.
            RuntimeError: a rank has no input left, and callers asked for this error; inside.
        """
        return ModuleJoin(
            self,
            divide=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> ModuleJoinHook:
        """What `torch.distributed.algorithms.join.Join` calls on ranks without further input.

        Args:
            divide_by_initial_world_size: whether ranks that have joined still count in the mean.
        """
        divide = kwargs.get("divide_by_initial_world_size", True)
        hook = ModuleJoinHook(self, divide)
        self._recorder.note(join_uneven_inputs=1)
        return hook

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self.steps.give_up_stale()
        transport = self.steps.engine.transport
        src = last_rank(transport, mine=is_last_joiner)
        if src is None:
            raise InternalError("no rank was the last to join")
        self._authoritative_rank = src
        broadcast_module(
            transport,
            self.module,
            self._options.ignored,
            src,
            buffers=self.forward_sync_buffers,
        )

    # Life cycle

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return {key: value for key, value in self.__dict__.items() if key not in _NOT_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Module.__setstate__(self, state)  # type: ignore[no-untyped-call]  # torch's
        self.process_group = group_of(Arguments())
        self._attach()

    def _set_static_graph(self) -> None:
        """Declares that all steps use the same parameters."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self._steps is not None and self._steps.engine.step:
            self._log_and_throw(
                RuntimeError,
                f"_set_static_graph() should be called before training loop starts, and this "
                f"wrapper has taken {self._steps.engine.step} steps",
            )
        self.static_graph = True
        self._options = replace(self._options, static_graph=True)
        self.steps.usage.static = True
        self._recorder.note(static_graph=1)
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so you do not "
                "need to set it",
                stacklevel=2,
            )

    def _remove_autograd_hooks(self) -> None:
        """Leaves gradients alone from now on."""
        self.steps.stop()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Goes on with another group; a collective call on its members."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        hook = None if self._steps is None else self._steps.engine.hook
        if self._steps is not None:
            self._steps.close()
        if self._delayed is not None:
            self._delayed.close()
        self.process_group = new_process_group
        self._steps = None
        self._delayed = self._delay(*self._delays)
        if hook is not None and self.steps.engine.hook is None:
            self.steps.engine.set_hook(hook)
