"""`DistributedDataParallel`: torch's interface over fddp's engine.

The class is a subclass of torch's, because checkpointing, pipelining and dynamo test for it. It
inherits the methods that have nothing to do with gradients. Plans, schedules, hooks and the control
word are those of `GradSync`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn import Module

from fddp.ddp.active_module import activate, restore
from fddp.ddp.arguments import STATIC_FINDS_UNUSED, Arguments, check_policy, checked, group_of
from fddp.ddp.broadcast import broadcast_module
from fddp.ddp.buffer_sync import BufferSync
from fddp.ddp.comm_hooks import CommHooks
from fddp.ddp.failure_scope import FailurePropagation
from fddp.ddp.join import UnevenInputs, notify, some_sync
from fddp.ddp.manual_finalization import ManualFinalization
from fddp.ddp.mixed_precision import MixedPrecision
from fddp.ddp.outputs import find_tensors, warn_if_hidden
from fddp.ddp.reducer_facade import Reducer
from fddp.ddp.tensor_parallel import make_local_
from fddp.ddp.virtual_steps import check_virtual
from fddp.native.profiling import is_profiled
from fddp.runtime.nonfinite import Policy
from fddp.runtime.untraced import untraced
from fddp.transport import TransportName

_LOCAL_GRADIENTS = (
    "gradients of tensors that torch.func.functional_call puts in place of a "
    "DistributedDataParallel's parameters stay local to this rank; use fddp.GradSync for their "
    "mean, or call it within `with ddp.no_sync():` if local gradients are wanted"
)
_COMPILE_MODULE = (
    "compile the module before it is wrapped: DistributedDataParallel(torch.compile(module)); "
    "or compile the wrapper without fullgraph=True"
)


class DistributedDataParallel(
    UnevenInputs, CommHooks, FailurePropagation, ManualFinalization, BufferSync
):
    """Wrapper that averages a module's gradients over ranks while backward runs.

    Drop-in replacement for `torch.nn.parallel.DistributedDataParallel` with the same arguments,
    methods and errors. `docs/ddp.md` lists intended differences. Construction is a collective call,
    and so are forward and backward.

    Args:
        module: the module to wrap. Its parameters and buffers are broadcast from rank 0.
        device_ids, output_device: the only device of a module on a GPU; None on the CPU.
        dim: dimension along which `scatter` and `gather` work.
        broadcast_buffers: deprecated name of `forward_sync_buffers`. False also leaves out the
            broadcast of buffers at the start.
        init_sync: compare shapes and broadcast parameters at the start. If False, the constructor
            is not a collective call, and the first forward with gradients enabled sets up the
            communicator.
        process_group: a group of `torch.distributed`, or the group that `fddp.loopback` passes to
            its function; None for the default group.
        bucket_cap_mb: size in MiB at which a bucket is closed; by default 25, and 1 for the first
            bucket.
        find_unused_parameters: allow unused parameters without an error. They are synchronised in
            any case.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: set `.grad` to views of the step's buckets. Otherwise results are
            written to the tensors that were there before backward.
        static_graph: declare that all steps use the same parameters; it is an error if not.
        delay_all_reduce_named_params: `(name, parameter)` pairs to average together, once
            `param_to_hook_all_reduce` has its gradient.
        param_to_hook_all_reduce: see above.
        mixed_precision: dtypes for computation, reduction and buffers.
        device_mesh: a one-dimensional `DeviceMesh` instead of `process_group`.
        skip_all_reduce_unused_params: leave out of a step the buckets that no rank used in the step
            before. If a rank does use one, all ranks reduce it at the end of the step.
        bucket_cap_mb_list: caps of the first, second, ... bucket, in MiB.
        batched_grad_copy: without effect; small gradients are always packed together.
        forward_sync_buffers: broadcast rank 0's buffers in every forward; by default True.
        lazy_bucket_allocation: allocate buckets when their gradients are complete, and release
            their memory when a step has ended. By default it is kept for the next step.
        transport: as for `GradSync`. Not an argument of torch's class.
        nonfinite: policy for steps in which a gradient or a sum is NaN or infinite. Not an argument
            of torch's class. "propagate" writes the results to `.grad`. "skip" leaves the step out
            on all ranks: it sets every synchronised `.grad` to None, so that optimizers skip it,
            and `skipped` to True. "raise" raises `NonFiniteError` on every rank, with the names of
            ranks and parameters.
        virtual_ranks: as for `GradSync`. Not an argument of torch's class. A step has one backward
            pass for each of `carried_ranks`, all but the last within `no_sync`, and gradients that
            were cleared before (`zero_grad()`); it sets `.grad` to the mean over virtual ranks.

    Raises:
        PlanMismatchError: parameters differ between ranks; on every rank. A RuntimeError, as DDP's.
        RuntimeError, ValueError: as torch's for invalid arguments. Also if `nonfinite` can't hold
            for all parameters, because some have a delayed all-reduce.

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
        lazy_bucket_allocation: bool = False,
        *,
        transport: TransportName = "auto",
        nonfinite: Policy = "propagate",
        virtual_ranks: int | None = None,
    ) -> None:
        arguments = Arguments.of_call(locals())
        Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = group_of(arguments)
        check_policy(nonfinite, delays=delay_all_reduce_named_params is not None)
        self._transport = transport
        self._nonfinite = nonfinite
        self._virtual_ranks = virtual_ranks
        if virtual_ranks is not None:
            check_virtual(module, arguments)
        make_local_(module, device_mesh)
        self._options = checked(module, arguments)
        self._expose(module, self._options)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._mixed: MixedPrecision | None = None
        self._delays = (arguments.delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._attach()
        if init_sync and not self._all_delayed:
            broadcast_module(
                self.steps.engine.transport,
                module,
                self._options.ignored,
                0,
                buffers=self._options.init_sync_buffers,
            )
        if mixed_precision is not None:
            self._mixed = MixedPrecision(module, mixed_precision)

    def _attach(self) -> None:
        super()._attach()
        self.reducer = Reducer(self)

    # Forward

    # Dynamo compiles the module, and not the code of the wrapper.
    @untraced(_COMPILE_MODULE, callees=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output. Backward passes through it synchronise gradients.

        Within a transform of `torch.func`, and under `functional_call` with other tensors, nothing
        is communicated and gradients are this rank's own.
        """
        if is_profiled():
            with torch.profiler.record_function("DistributedDataParallel.forward"):
                return self._forward(*inputs, **kwargs)
        return self._forward(*inputs, **kwargs)

    @untraced(_COMPILE_MODULE, callees=False)
    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        collectives = self._forward_collectives
        is_synced = collectives.is_synced
        output = self._run_ddp_forward(*inputs, **kwargs)
        # Again, because the module may have called this wrapper itself.
        collectives.is_synced = is_synced
        return self._post_forward(output)

    # torch's `replicate` calls this and `_post_forward` around the forward of a module of its own.
    @untraced(_COMPILE_MODULE)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare for the module's forward. Return its inputs, on the module's device."""
        self._forward_collectives.is_synced = self._begin_forward()
        if not self.device_ids:
            return inputs, kwargs
        device = torch.device(self.device_type, self.device_ids[0])
        moved, moved_kwargs = _to_kwargs(
            inputs, kwargs, device, self.use_side_stream_for_tensor_copies
        )
        return moved[0], moved_kwargs[0]

    def _begin_forward(self) -> bool:
        """Return False if the forward pass takes no part in synchronisation."""
        if self._all_delayed:
            return False
        change = self._watch.change()
        if change == "swapped":
            if self._syncs and self._watch.are_others_tracked:
                warnings.warn(_LOCAL_GRADIENTS, stacklevel=3)
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        if self._steps is None and self._is_local_forward():
            return False
        self._prepare(change == "changed")
        return True

    def _is_local_forward(self) -> bool:
        """Return True if this forward needs no communicator.

        Copies have none at first, and may be evaluated on one rank alone.
        """
        return (
            not torch.is_grad_enabled()
            and not self._join_config.enable
            and not self.will_sync_module_buffers()
        )

    # The methods below read each attribute once: those of a module are slow to read.

    def _prepare(self, changed: bool) -> None:
        logger, steps, is_grad_enabled = self.logger, self.steps, torch.is_grad_enabled()
        logger.forward_start_s = time.perf_counter()
        syncs = is_grad_enabled and self._switch.is_on
        runner = steps.runner
        steps.abort_stale_step()
        if not self._lazy_init_ran:
            self._lazy_init()
        if syncs:
            logger.iterations += 1
        if is_grad_enabled:
            self._raise_pending()
        if syncs:
            runner.usage.begin_forward()
        runner.usage.joining = self._join_config.enable
        if changed or not runner.parameters.hooks.intact():
            steps.change(self._request())
            logger.renumber(runner.usage.names)
        if is_grad_enabled:
            steps.begin_forward()
        self._sync_before_forward()

    def _sync_before_forward(self) -> None:
        collectives, is_joining = self._forward_collectives, self._join_config.enable
        collectives.is_open = True
        self.steps.runner.has_failed = False
        if is_joining:
            notify(self)
        if self._watch.has_buffers and self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if is_joining:
            some_sync(self, mine=self._syncs)
        collectives.done += 1
        collectives.is_open = False

    @untraced(_COMPILE_MODULE, callees=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        before = activate(self)
        try:
            if self._mixed is not None:
                return self._mixed.run(self.module, inputs, kwargs)
            # Faster than the attribute.
            return self._modules["module"](*inputs, **kwargs)
        finally:
            restore(before)

    @untraced(_COMPILE_MODULE)
    def _post_forward(self, output: Any) -> Any:
        if not self._forward_collectives.is_synced:
            return output
        self._sync_after_forward()
        syncs = self._syncs
        if self.require_forward_param_sync is not syncs:  # assignment takes microseconds
            self.require_forward_param_sync = syncs
        if (syncs or self._virtual_ranks) and not self._watch.all_frozen:
            tensors = find_tensors(output)
            if not tensors and torch.is_grad_enabled():
                warn_if_hidden(output)
            self.steps.expect(tensors)
        return output

    def _sync_after_forward(self) -> None:
        collectives = self._forward_collectives
        collectives.is_open = True
        if self._watch.has_buffers and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        collectives.done += 1
        collectives.is_open = False

    # Errors and settings

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self.logger.iterations:
            self._log_and_throw(
                RuntimeError,
                f"_set_static_graph() should be called before training loop starts, and this "
                f"wrapper has run {self.logger.iterations} forward passes",
            )
        self.static_graph = True
        static = replace(self._options.arguments, static_graph=True)
        self._options = replace(self._options, arguments=static)
        self.steps.runner.declare_static()
        self.logger.note(static_graph=1)
        if self.find_unused_parameters:
            warnings.warn(STATIC_FINDS_UNUSED, stacklevel=2)

    def _remove_autograd_hooks(self) -> None:
        self.steps.stop()
