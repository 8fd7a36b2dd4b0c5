"""`DistributedDataParallel`: torch's interface over fddp's engine.

The class is a subclass of torch's, because checkpointing, pipelining and dynamo test for it. It
inherits the methods that have nothing to do with gradients. Plans, schedules, hooks and the control
word are those of `GradSync`.

This file has the names that callers and torch use, and the order of things in a forward pass. The
parts do the work: `Steps`, `ForwardPasses` with a `Joiner`, `ParameterWatch`, `Delayed`,
`MixedPrecision` and the `Recorder`. None of them refers to the wrapper, which is freed without the
garbage collector. Its settings are `Options`, and `Settings` that may change between steps.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.nn import Module

from fddp.collectives.replicas.broadcast import AT_ONCE_BYTES
from fddp.core.entrance import entrance
from fddp.core.plan.plan import BucketPlan
from fddp.core.timeline import Timeline
from fddp.ddp import finalization
from fddp.ddp.active_module import activate, reset_after, restore
from fddp.ddp.arguments import (
    AS_GIVEN,
    STATIC_FINDS_UNUSED,
    Arguments,
    Options,
    Settings,
    check_policy,
    check_report_time,
    checked,
    group_of,
    managed,
)
from fddp.ddp.broadcast import broadcast_module, buffers_of
from fddp.ddp.comm_hooks import hook_error
from fddp.ddp.debug_logs import log_builtin_hook
from fddp.ddp.delayed_all_reduce import Delayed, end_of_backward
from fddp.ddp.failure_scope import step_scope
from fddp.ddp.forward_passes import ForwardPasses
from fddp.ddp.join import ModuleJoin, ModuleJoinHook, last_joiner
from fddp.ddp.joiner import Joiner
from fddp.ddp.local_gradients import LocalGradients, check_local_gradients
from fddp.ddp.logging_data import Recorder
from fddp.ddp.micro_batches import check_virtual
from fddp.ddp.mixed_precision import MixedPrecision
from fddp.ddp.parameter_watch import ParameterWatch
from fddp.ddp.rebuilding import Stateful, load_newest_
from fddp.ddp.reducer_facade import Reducer, refused
from fddp.ddp.request import FailedRequest
from fddp.ddp.steps import Steps
from fddp.ddp.tensor_parallel import make_local_
from fddp.ddp.torch_private import to_kwargs
from fddp.ddp.weights import check_weighable
from fddp.hooks import Hook, TorchHook, builtin
from fddp.hooks.choosing import named_hook
from fddp.native import extension
from fddp.native.untraced import untraced
from fddp.runtime.agreement import ReportTime
from fddp.runtime.inputs import outside_transforms
from fddp.runtime.nonfinite import Policy
from fddp.sync.engine import Engine
from fddp.sync.rebuild import check_between_steps
from fddp.sync.request import NoiseGroups
from fddp.telemetry.step_info import SyncInfo
from fddp.transport import TransportName
from fddp.transport.mesh import GroupAndTopology

_parallel: Any = torch.nn.parallel  # its wrapper is untyped, and so are the methods

_COMPILE_MODULE = (
    "compile the module before it is wrapped: DistributedDataParallel(torch.compile(module)); "
    "or compile the wrapper without fullgraph=True"
)

# Made anew when a wrapper is copied or unpickled.
_NOT_STATE = (
    *("process_group", "reducer", "logger", "_watch", "_steps"),
    *("_joiner", "_forward_passes", "_delayed"),
)


class DistributedDataParallel(_parallel.DistributedDataParallel):  # type: ignore[misc]
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
            its function; None for the default group. One whose class is written in Python must be
            registered with torch if it has several ranks.
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
            ranks and parameters. With `report="next"` as for `GradSync`: "skip" sets them to zero.
        report: as for `GradSync`. Not an argument of torch's class. With "next", the report of a
            step is read in the next forward pass outside of `no_sync`, or by `check`, and every
            step uses all parameters on all ranks.
        virtual_ranks: as for `GradSync`. Not an argument of torch's class. A step has one backward
            pass for each of `carried_ranks`, all but the last within `no_sync`, and gradients that
            were cleared before (`zero_grad()`); it sets `.grad` to the mean over virtual ranks.
        local_gradients: what a backward pass does that leaves gradients of this rank alone in
            `.grad`, outside of `no_sync`: it came through no output of the wrapper's forward. Not
            an argument of torch's class. "warn" warns, once for each line that calls backward, when
            parameters have changed before a step averaged these gradients. "raise" raises
            `ReplicationError` in the pass. Both name the parameters. "allow" is torch's silence.
        noise: as for `GradSync`, by names of parameters; see `sync_info`. Not an argument of
            torch's class. The gradient of a rank is all that `.grad` has of the step, also from
            passes within `no_sync`.

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

    gradient_as_bucket_view: bool
    static_graph: bool

    @entrance
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
        report: ReportTime = "now",
        virtual_ranks: int | None = None,
        local_gradients: LocalGradients = "warn",
        noise: NoiseGroups = None,
    ) -> None:
        arguments = Arguments.of_call(locals())
        delays = delay_all_reduce_named_params is not None
        Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = group_of(arguments)
        check_policy(nonfinite, delays=delays)
        check_report_time(arguments)
        check_local_gradients(local_gradients)
        try:
            if virtual_ranks is not None:
                check_virtual(module, delays=delays)
            make_local_(module, device_mesh)
            self._options = checked(module, arguments)
        except Exception as error:
            if not init_sync:
                raise
            # The module may be another one on other ranks, which wait for this one.
            span = GroupAndTopology(self.process_group, None)
            with outside_transforms():
                Engine(FailedRequest(error, span, transport))
            raise
        self._settings = Settings()
        self._expose(module, self._options)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._mixed: MixedPrecision | None = None
        self._delays = (arguments.delay_all_reduce_named_params, param_to_hook_all_reduce)
        with outside_transforms():
            self._attach()
            if init_sync and not self._all_delayed:
                broadcast_module(
                    self.steps.engine.transport,
                    module,
                    self._options.ignored,
                    0,
                    buffers=self._options.init_sync_buffers,
                )
            elif not self._all_delayed:
                self._steps.watch_unopened()
            if mixed_precision is not None:
                self._mixed = MixedPrecision(module, mixed_precision)

    def _expose(self, module: Module, options: Options) -> None:
        """Set the attributes of torch's class that others rely on."""
        self.module = module
        self.device = options.device
        self.device_type = options.device.type
        self.device_ids = None if options.device_ids is None else list(options.device_ids)
        self.output_device = options.output_device
        self.is_multi_device_module = options.is_multi_device
        self.forward_sync_buffers = options.forward_sync_buffers
        for name in AS_GIVEN:
            setattr(self, name, getattr(options.arguments, name))
        self.parameters_to_ignore = set(options.ignored)
        self.bucket_bytes_cap = options.cap_bytes
        self.bucket_bytes_cap_list = list(options.listed_caps_bytes)
        self.use_side_stream_for_tensor_copies = (
            os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        )
        self._module_parameters = list(managed(module, options.ignored).values())
        self._use_python_reducer = False
        self.broadcast_bucket_size = AT_ONCE_BYTES
        self._delay_all_reduce_params: list[Tensor] = []
        self.require_forward_param_sync = True  # the next forward synchronises buffers
        self._lazy_init_ran = False

    def _attach(self) -> None:
        """Make the parts that belong to this process. A copy makes its own."""
        self.logger = Recorder()
        self._watch = ParameterWatch(self.module, self._options.ignored)
        self._all_delayed = not self._watch.params
        self._optimizes_early = False  # an optimizer of `_register_fused_optim` steps in backward
        self._settings.enter_step(False)
        self._connect()
        self.reducer = Reducer(self)
        reset_after(self)

    def _connect(self) -> None:
        """Make the parts that communicate over the group."""
        self._steps = Steps(
            self.module,
            self._options,
            self.process_group,
            self._watch,
            self._settings,
            self.logger,
        )
        self._joiner = Joiner(self._steps)
        self._forward_passes = ForwardPasses(self._steps, self._joiner, self._watch)
        named, trigger = self._delays
        self._delayed: Delayed | None = None
        if named is not None and trigger is not None:
            self._delayed = Delayed(
                named,
                trigger,
                self.process_group,
                sparse=self._options.sparse,
                at_end=end_of_backward(self._steps, all_delayed=self._all_delayed),
            )

    @property
    def steps(self) -> Steps:
        """The steps. The first access opens their communicator, and is a collective call."""
        return self._steps.open()

    # Forward

    # Dynamo compiles the module, and not the code of the wrapper.
    @entrance
    @untraced(_COMPILE_MODULE, callees=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output. Backward passes through it synchronise gradients.

        Within a transform of `torch.func`, under a tracer or `FakeTensorMode`, and under
        `functional_call` with other tensors, nothing is communicated and gradients are this rank's
        own.
        """
        if extension.compiled.is_profiled():
            with torch.profiler.record_function("DistributedDataParallel.forward"):
                return self._forward(*inputs, **kwargs)
        return self._forward(*inputs, **kwargs)

    @untraced(_COMPILE_MODULE, callees=False)
    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        passes = self._forward_passes
        is_synced = passes.is_synced
        output = self._run_ddp_forward(*inputs, **kwargs)
        # Again, because the module may have called this wrapper itself.
        passes.resume(is_synced)
        return self._post_forward(output)

    # torch's `replicate` calls this and `_post_forward` around the forward of a module of its own.
    @untraced(_COMPILE_MODULE)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare for the module's forward. Return its inputs, on the module's device."""
        self._forward_passes.begin(self)
        if not self.device_ids:
            return inputs, kwargs
        device = torch.device(self.device_type, self.device_ids[0])
        moved, moved_kwargs = to_kwargs(
            inputs, kwargs, device, self.use_side_stream_for_tensor_copies
        )
        return moved[0], moved_kwargs[0]

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
        self._forward_passes.end(self, output)
        return output

    # Steps

    @entrance
    def in_step(self) -> AbstractContextManager[None]:
        """Mark one step. An exception raised inside on one rank is reported to the others.

        The block contains the input, forward passes, loss function and backward pass of one step,
        on every rank. The exception propagates on the rank that raised it. The others raise
        `PeerError` with its text at the end of their backward pass, or in the operator in which
        they wait for this rank. No rank has gradients of the step, and all can continue. Nothing
        is communicated if nothing is raised.

        The block contains one step and its earlier micro-batches under `no_sync`. A block of
        micro-batches alone must be under `no_sync` as a whole. With `forward_sync_buffers` or
        within `join`, the block has one forward pass outside of `no_sync`. Keep evaluation out of
        the block.

        Raises:
            RankLostError, SyncTimeoutError, DesyncError: the exception could not be reported. It is
                the context of this error.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     ddp = fddp.DistributedDataParallel(model, process_group=group)
            ...     try:
            ...         with ddp.in_step():
            ...             loss = ddp(torch.ones(1, 2)).sum()
            ...             if group.rank == 1:
            ...                 raise ValueError("a bad batch")
            ...             loss.backward()
            ...     except (ValueError, fddp.PeerError) as error:
            ...         return type(error).__name__, "a bad batch" in str(error)
            >>> fddp.loopback(2, train)
            [('PeerError', True), ('ValueError', True)]
        """
        return step_scope(self, self._steps, self._forward_passes)

    @entrance
    def weighted(self, weight: float | Tensor) -> AbstractContextManager[None]:
        """Give a micro-batch a weight in the mean, such as its number of samples or tokens.

        The block contains the forward and backward pass of a loss that is a *mean* over `weight`
        items. Gradients of a step are then the mean over all items of all ranks and micro-batches.
        Earlier micro-batches are under `no_sync`, each in a block of its own. Between them, `.grad`
        holds the sum of each weight times its gradient. Gradients of a block of weight 0 count as
        zeros, NaN included. A step without blocks has weight 1 on its rank.

        Clear gradients before the first block of a step, where values of `.grad` that were kept
        (`zero_grad(set_to_none=False)`) are read. An exception in the block leaves no weight.

        Args:
            weight: from 0 to 2**512; as for `GradSync`. A tensor has one element, and is read,
                which waits for its device.

        Raises:
            ValueError: the wrapper has virtual ranks, `report="next"`, parameters with a delayed
                all-reduce, or an optimizer that steps in backward.
            WeightError: a block is entered within another one. At the end of backward, on every
                rank: the weight is no number from 0 to 2**512, all weights are 0, `.grad` held
                other gradients, or a pass of the step was in no block.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     ddp = fddp.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
            ...     batch = torch.full((1 + 2 * group.rank, 1), 1.0 + group.rank)
            ...     with ddp.weighted(len(batch)):
            ...         ddp(batch).mean().backward()
            ...     return ddp.module.weight.grad.item()
            >>> fddp.loopback(2, train)  # (1 + 2 + 2 + 2) / 4
            [1.75, 1.75]
        """
        check_weighable(
            self._options.arguments,
            delays=self._delayed is not None,
            steps_early=self._optimizes_early or self._has_optimizers_in_backward(),
        )
        return self._steps.weights.block(weight)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """True if each step is closed by `finalize_backward`, and not by the end of backward.

        Call `finalize_backward` once for each backward pass that synchronises gradients, before the
        next forward pass. Until then gradients are undefined, or those of this rank. Outside of
        `in_step`, the last bucket is sent when backward ends, and an exception after that does not
        fail the step on other ranks.

        Raises:
            RuntimeError: it is set after a forward pass and before its step was closed, or all
                parameters have a delayed all-reduce.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     ddp = fddp.DistributedDataParallel(model, process_group=group)
            ...     ddp.require_manual_backward_finalization = True
            ...     ddp(torch.full((1, 2), 1.0 + group.rank)).sum().backward()
            ...     # Other work overlaps the all-reduce.
            ...     ddp.finalize_backward()
            ...     return model.weight.grad.tolist()
            >>> fddp.loopback(2, train)
            [[[1.5, 1.5]], [[1.5, 1.5]]]
        """
        return self._settings.is_manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if self._all_delayed:
            if required:
                raise RuntimeError(finalization.ALL_DELAYED)
            return
        if required != self._settings.is_manual and self._steps.is_in_progress:
            raise RuntimeError(finalization.TOO_LATE)
        self._settings.finalize_manually(required)

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if `finalize_backward` must wait until the coming backward pass has returned.

        If False, a hook within backward may call it once all parameters have their gradients. Read
        it after forward. It is always False without `require_manual_backward_finalization`. It is
        True before the plan was rebuilt, with mixed precision, delayed parameters or
        `find_unused_parameters`, and if the last step did not use all parameters.
        """
        if not self._settings.is_manual:
            return False
        return (
            self._mixed is not None
            or self._delayed is not None
            or self.find_unused_parameters
            or not self._steps.is_open
            or self._steps.needs_end_of_backward
        )

    @entrance
    @untraced(_COMPILE_MODULE)
    def finalize_backward(self) -> None:
        """Wait for the step's collectives, and write its gradients.

        A collective call, after backward or in a hook within it; see
        `should_finalize_after_backward`.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is not set, no backward pass has to
                be finalized, or parameters have no gradient yet within backward.
            Exception: the step failed, as at the end of backward without manual finalization.
        """
        if self._all_delayed:
            raise RuntimeError(finalization.ALL_DELAYED)
        if not self._settings.is_manual:
            raise RuntimeError(finalization.NOT_MANUAL)
        self.steps.finalize()

    def _raise_pending(self) -> None:
        if self._steps.is_open:
            self._steps.check_finalized()
            pending = self._steps.usage.pending
            if pending:
                self.logger.set_error_and_log(pending)
                raise RuntimeError(pending)

    # Ranks with fewer inputs

    @entrance
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> ModuleJoin:
        """Return a context for loops over inputs of unequal length, as torch's.

        Within it, ranks without further input shadow the collectives of the others.

        Args:
            divide_by_initial_world_size: True if joined ranks count in the mean.
            enable: False disables the context.
            throw_on_early_termination: raise on all ranks once one has no input left.

        Raises:
            RankLostError, SyncTimeoutError: a rank is lost, has left the block with an error, or
                is late; inside.
            RuntimeError: a rank has no input left and `throw_on_early_termination` is set; inside.
            ValueError: the wrapper has virtual ranks, or `report="next"`.
        """
        if self._options.arguments.report == "next":
            raise ValueError(
                "join() and report='next' can't be combined: a rank without inputs contributes "
                "nothing, which the report has to say before results are used; make the wrapper "
                "with report='now'"
            )
        if self._options.arguments.virtual_ranks is not None:
            raise ValueError(
                "join() and virtual_ranks can't be combined: ranks without inputs would leave out "
                "their virtual ranks; give each virtual rank a batch, or use fddp.GradSync, where "
                "fddp.EXHAUSTED stands for a virtual rank without input"
            )
        return ModuleJoin(
            self,
            self._joiner,
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    @entrance
    def join_hook(self, **kwargs: Any) -> ModuleJoinHook:
        """Return the hook that `torch.distributed.algorithms.join.Join` calls on joined ranks.

        Args:
            divide_by_initial_world_size: True if joined ranks count in the mean.
        """
        divide = kwargs.get("divide_by_initial_world_size", True)
        hook = ModuleJoinHook(self, divide)
        self._divide_by_initial_world_size = divide
        self.logger._set_uneven_input_join()
        return hook

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._authoritative_rank = src = last_joiner(self.steps, is_last=is_last_joiner)
        broadcast_module(
            self.steps.engine.transport,
            self.module,
            self._options.ignored,
            src,
            buffers=self.forward_sync_buffers,
        )

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in the others' step without gradients. A collective call."""
        self.steps.take_part(1.0)

    def _match_unused_params_allreduce(self) -> None:
        """No-op. Every step exchanges the use of parameters."""

    # Communication hooks

    @entrance
    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Reduce buckets by a hook. Call it once, before the first backward.

        Args:
            state: passed to a hook for torch's DDP; None for a hook of `fddp.hooks`, whose state is
                `comm_hook_state`.
            hook: `hook(state, bucket) -> torch.futures.Future[Tensor]`, or an `fddp.hooks.Hook`, or
                "auto" for `fddp.hooks.auto()`.
        """
        hook = named_hook(hook)
        if isinstance(hook, Hook):
            self._set_hook(hook, hook.name)
            return
        error = hook_error(hook)
        if error is not None:
            self._log_and_throw(type(error), str(error))
        name = getattr(hook, "__qualname__", type(hook).__name__)
        self._set_hook(TorchHook(state, hook, self._watch.latest), name)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._set_hook(builtin(comm_hook_type), str(comm_hook_type))
        log_builtin_hook(comm_hook_type.name)

    def _set_hook(self, hook: Hook[Any], name: str) -> None:
        engine = self.steps.engine
        if engine.hook is not None:
            self._log_and_throw(
                RuntimeError,
                "register_comm_hook or register_builtin_comm_hook can only be called once. Make a "
                "new wrapper for another hook",
            )
        engine.set_hook(hook)
        self.logger._set_comm_hook_name(name)

    def _setup_in_backward_optimizers(self) -> None:
        """Make optimizers that run in backward wait for the mean.

        See `torch.distributed.optim._apply_optimizer_in_backward`.
        """
        if self._has_optimizers_in_backward():
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
        self._optimizes_early = True
        super()._register_fused_optim(*args, **kwargs)

    def _has_optimizers_in_backward(self) -> bool:
        return any(hasattr(param, "_in_backward_optimizers") for param in self._module_parameters)

    def _check_steps_wait(self, way: str) -> None:
        # Gradients are checked at the end of a step; an optimizer must not have used some before.
        policy = self._options.arguments.nonfinite
        if policy != "propagate":
            raise ValueError(
                f"nonfinite={policy!r} and {way} can't be combined: the optimizer steps "
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

    # Buffers

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Synchronised buffers, by name."""
        return buffers_of(self.module, self._options.ignored)

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Synchronised buffers."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next forward synchronises at least one buffer."""
        # Walking a module for its buffers costs more than the rest of the work before a forward.
        is_on = self.require_forward_param_sync and self.forward_sync_buffers
        if not (is_on and self._watch.has_buffers):
            return False
        return any(name not in self._options.ignored for name, _ in self.module.named_buffers())

    def _assign_modules_buffers(self) -> None:
        """No-op. Buffers are looked up when needed."""

    # Settings

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if backward passes synchronise gradients.

        `no_sync` turns it off. Both the forward and the backward pass must be outside of it.
        """
        return self._settings.is_on

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._settings.synchronise(on)

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
        self.steps.declare_static(self._options)
        self.logger._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(STATIC_FINDS_UNUSED, stacklevel=2)

    def _remove_autograd_hooks(self) -> None:
        self.steps.stop()

    # Parts of torch's class around its reducer; see docs/ddp.md
    _ddp_init_helper = _register_accum_grad_hook = _clear_grad_buffer = refused
    _delayed_all_reduce_hook = _register_delay_all_reduce_hook = refused
    _root_copy_hook = _module_wait_for_copy_hook = refused

    # Plan, times and logging data

    @entrance
    def check(self) -> None:
        """Read the report of the last step, under `report="next"`; otherwise do nothing.

        As `GradSync.check`.
        """
        self._steps.settle()

    @property
    def stopping(self) -> bool:
        """True from the step on in which a rank has asked all ranks to stop: the same step on every
        rank. As `GradSync.stopping`."""
        return self._steps.stopping.agreed

    def request_stop(self) -> None:
        """Ask all ranks to stop, by the next step. As `GradSync.request_stop`."""
        self._steps.stopping.ask()

    @entrance
    def leave(self) -> None:
        """Take one more step on this rank, and none after it. As `GradSync.leave`: the next forward
        pass of the others raises `RankLostError` before it begins, and `rebuild` goes on. Not
        within `join`, whose block then ends with errors: this rank can't shadow the others' steps.
        """
        self.steps.engine.leave()

    @entrance
    def rebuild(self, *stateful: Stateful) -> None:
        """Go on with the ranks that are left, in place; a collective call of them.

        To be called after a `RankLostError`, between steps. `process_group` is then a group of the
        ranks that are left, as `GradSync.rebuild` makes it, and the number of the next step, the
        hook and a request to stop are kept. If ranks have finished different numbers of steps, all
        take the parameters, buffers and states of the newest rank. Gradients are not changed: clear
        them, and take the step again. A plan in the order of gradients is found anew.

        Args:
            stateful: what else a step changes, with `state_dict` and `load_state_dict`: optimizers,
                schedules. The same on all ranks.

        Raises:
            PlanMismatchError: states can't be compared; on every rank. Names the rank.
            RankLostError: another rank was lost during the call, or the others went on without this
                one. After a loss, call again.
            SyncTimeoutError: a rank did not make the call.

        Example:
            >>> import torch
            >>> from fddp import DistributedDataParallel as DDP, loopback
            >>> def train(group):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     ddp = DDP(model, process_group=group)
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            ...     ddp.rebuild(optimizer)  # after a RankLostError
            ...     ddp(torch.full((1, 2), 1.0 + group.rank)).sum().backward()
            ...     return model.weight.grad.tolist()
            >>> loopback(2, train)
            [[[1.5, 1.5]], [[1.5, 1.5]]]
        """
        before, group = self.steps, self.process_group
        engine = before.engine
        check_between_steps(engine)
        try:
            with outside_transforms():
                self._update_process_group(engine.transport.group_left() or group)
                newest = self.steps.engine
                finished = load_newest_(
                    newest.transport,
                    self.module,
                    self._options.ignored,
                    stateful,
                    engine.finished,
                )
                newest.continue_from(finished, finished)
        except BaseException:
            # For a second call: the ranks that are left are found by the old one.
            self._steps.close()
            self._steps, self.process_group = before, group
            raise
        self._steps.stopping.take_over(before.stopping)
        engine.transport.drop_groups()

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan in force."""
        return self.steps.engine.program.plan

    @property
    def carried_ranks(self) -> range:
        """Virtual ranks that this rank carries; empty without virtual ranks."""
        return self.steps.engine.program.carried

    @property
    def skipped(self) -> bool:
        """True if all ranks left out the last step, under `nonfinite="skip"`. With `report="next"`,
        reading it waits for the device."""
        found = self.found_inf if self._options.arguments.nonfinite == "skip" else None
        return self._steps.is_open and (self._steps.skipped or bool(found))

    @property
    def found_inf(self) -> Tensor | None:
        """Flag of non-finite results of the last step, for optimizers. As `GradSync.found_inf`."""
        return self._steps.engine.found_inf if self._steps.is_open else None

    def keep_sync_info(self) -> None:
        """Measure every step from now on, at the cost of `with_info=True`; see `sync_info`.

        A `Monitor` on the wrapped module calls it.
        """
        self.logger.keep_all()

    @property
    def sync_info(self) -> SyncInfo | None:
        """Measurements of the last measured step, or None before the first.

        Every step is measured after `keep_sync_info()`, otherwise the steps listed at `timeline`.
        The forward pass begins with the last call of the wrapped module. Backward begins when a
        gradient reaches one of its outputs.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     ddp = fddp.DistributedDataParallel(model, process_group=group)
            ...     ddp(torch.tensor([[3.0, 4.0]])).sum().backward()
            ...     return ddp.sync_info.step, ddp.sync_info.grad_norm
            >>> fddp.loopback(2, train)
            [(0, 5.0), (0, 5.0)]
        """
        return self.logger.info

    @entrance
    def timeline(self) -> Timeline:
        """Return the times of the last measured step: number 0 to 10, then one in a hundred.

        `_set_ddp_runtime_logging_sample_rate` changes the rate.

        Raises:
            ValueError: no step has been measured yet.
        """
        if self.logger.info is None:
            raise ValueError("no step has been taken yet; call backward first")
        return self.logger.info.timeline.to_timeline()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return DDP's logging data under DDP's keys; sizes in bytes, times in nanoseconds."""
        usage = self.steps.usage  # starts the log, too
        data: dict[str, Any] = dict(self.logger.data)
        if usage.last is not None:
            data["can_set_static_graph"] = int(usage.is_static)
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Record one in `sample_rate` steps, after the first ten."""
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                f"DDP runtime logging sample rate should be equal or greater than 1, "
                f"got {sample_rate}",
            )
        self.logger.sample(sample_rate)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """True if the plan follows the order in which gradients arrived.

        With `static_graph`, from the third forward pass on, as in torch. `hook_with_zero_step`
        skips the optimizer until then.
        """
        if not self._steps.is_open or (self.static_graph and self.logger.iterations < 3):
            return False
        return not self._steps.engine.program.control.with_order

    # Life cycle

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return {key: value for key, value in self.__dict__.items() if key not in _NOT_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Module.__setstate__(self, state)  # type: ignore[no-untyped-call]  # torch's
        # Older states lack them.
        self.__dict__.setdefault("require_forward_param_sync", True)
        self.__dict__.setdefault("_settings", Settings())
        self.process_group = group_of(Arguments())
        self._attach()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Continue with another group. A collective call on its members."""
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        hook = self._steps.engine.hook if self._steps.is_open else None
        weights = self._steps.weights  # of a block that may be open
        self._steps.close()
        if self._delayed is not None:
            self._delayed.close()
        self.process_group = new_process_group
        self._connect()
        self._steps.continue_with(weights)
        if hook is not None and self.steps.engine.hook is None:
            self.steps.engine.set_hook(hook)
