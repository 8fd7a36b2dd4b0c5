"""State of a wrapped module: options, steps, and the attributes of torch's class."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module

from fddp.collectives.replicas.broadcast import AT_ONCE_BYTES
from fddp.core.plan.plan import BucketPlan
from fddp.core.timeline import Timeline
from fddp.ddp.arguments import AS_GIVEN, Arguments, Options, group_of, managed
from fddp.ddp.backward_steps import Switch
from fddp.ddp.debug_logs import log_initialised
from fddp.ddp.delayed_all_reduce import Delayed
from fddp.ddp.finalization import FinalizingDriver
from fddp.ddp.logging_data import Recorder
from fddp.ddp.mixed_precision import wire_dtype
from fddp.ddp.parameter_watch import ParameterWatch
from fddp.ddp.request import ModuleRequest
from fddp.ddp.step_runner import BucketMemory, StepRunner
from fddp.ddp.virtual_steps import VirtualDriver, VirtualRunner
from fddp.errors import FddpError, InternalError
from fddp.hooks import cast as cast_hook
from fddp.telemetry.step_info import SyncInfo
from fddp.transport import Group
from fddp.transport.mesh import GroupAndTopology

# Untyped, and so are its methods.
_TorchDDP: Any = torch.nn.parallel.DistributedDataParallel

# Made anew when a wrapper is copied or unpickled.
_NOT_STATE = (
    "process_group",
    "reducer",
    "logger",
    "_steps",
    "_watch",
    "_delayed",
    "_forward_collectives",
)


@dataclass
class ForwardCollectives:
    """Collectives that this rank has run around forward passes.

    Attributes:
        done: number of rounds: one before and one after each forward pass.
        is_open: True if a round is running, or was left by an exception.
        some_sync: True if, within `join`, the backward pass of some rank with input will
            synchronise gradients.
        is_synced: True if the running forward pass takes part in synchronisation.
        failure: error of the last step that this rank shadowed within `join`, if it failed.
    """

    done: int = 0
    is_open: bool = False
    some_sync: bool = False
    is_synced: bool = False
    failure: FddpError | None = None


class WrapperState(_TorchDDP):  # type: ignore[misc]
    """State of a wrapped module. The wrapper has the constructor."""

    gradient_as_bucket_view: bool
    static_graph: bool

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
        self._switch = Switch()
        self.require_forward_param_sync = True  # the next forward synchronises buffers
        self._lazy_init_ran = False

    def _attach(self) -> None:
        """Set the attributes that belong to this process. A copy makes its own."""
        self.logger = Recorder()
        self._watch = ParameterWatch(self.module, self._options.ignored)
        self._steps: FinalizingDriver | None = None
        self._all_delayed = not self._watch.params
        self._forward_collectives = ForwardCollectives()
        self._switch.in_step = False
        self._delayed = self._delay(*self._delays)

    def _delay(self, named: Any, trigger: Tensor | None) -> Delayed | None:
        if named is None or trigger is None:
            return None
        owner = weakref.ref(self)

        def at_end(average: Callable[[], None]) -> None:
            ddp = owner()
            if ddp is None or not ddp.require_backward_grad_sync:
                return
            if ddp._steps is not None and ddp._steps.is_stopped:
                return
            if ddp._all_delayed:
                Variable._execution_engine.queue_callback(average)
            else:
                ddp.steps.runner.work.append(average)

        group = cast(Group, self.process_group)
        return Delayed(named, trigger, group, sparse=self._options.sparse, at_end=at_end)

    # Steps

    @property
    def steps(self) -> FinalizingDriver:
        """The driver of steps. The first access creates it, and is a collective call."""
        steps = self._steps
        if steps is None:
            try:
                self._steps = steps = self._make_steps()
                if self._switch.in_step:
                    engine = steps.engine
                    engine.transport.enter_step(engine.step)
            except AttributeError as error:  # which a property must not raise
                raise InternalError(f"the steps could not be made: {error}") from error
        return steps

    def _make_steps(self) -> FinalizingDriver:
        kinds: tuple[Any, Any] = StepRunner, FinalizingDriver
        if self._virtual_ranks is not None:
            kinds = VirtualRunner, VirtualDriver
        new_runner, new_driver = kinds
        runner = new_runner(
            self._request(),
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
            memory=BucketMemory(self.gradient_as_bucket_view, self.lazy_bucket_allocation),
            recorder=self.logger,
        )
        steps: FinalizingDriver = new_driver(runner, self._switch)
        log_initialised(self._options.cap_bytes, self._options.first_cap_bytes)
        transport = steps.engine.transport
        self.logger.start(
            self._options,
            steps.engine.program.plan,
            runner.usage.names,
            _backend_of(self.process_group),
            module_name=type(self.module).__name__,
            rank=transport.rank,
            world_size=transport.world_size,
        )
        wire = wire_dtype(self.mixed_precision) if self.mixed_precision else None
        if wire is not None:
            steps.engine.set_hook(cast_hook(wire))
            self.logger.note(comm_hook=f"{wire} gradients")
        return steps

    def _request(self) -> ModuleRequest:
        return ModuleRequest(
            params=self._watch.find_replaced(),
            options=self._options,
            span=GroupAndTopology(cast(Group, self.process_group), None),
            last_is_small=os.environ.get("DDP_SET_LAST_BUCKET_CAP", "0") == "1",
            transport=self._transport,
            nonfinite=self._nonfinite,
            virtual_ranks=self._virtual_ranks,
        )

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if backward passes synchronise gradients.

        `no_sync` turns it off. Both the forward and the backward pass must be outside of it.
        """
        return self._switch.is_on

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, on: bool) -> None:
        self._switch.is_on = on

    @property
    def _syncs(self) -> bool:
        return torch.is_grad_enabled() and self._switch.is_on

    # Plan, times and logging data

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan in force."""
        return self.steps.engine.program.plan

    @property
    def skipped(self) -> bool:
        """True if all ranks left out the last step, under `nonfinite="skip"`."""
        return self._steps is not None and self._steps.runner.skipped

    def keep_sync_info(self) -> None:
        """Measure every step from now on, at the cost of `with_info=True`; see `sync_info`.

        A `Monitor` on the wrapped module calls it.
        """
        self.logger.keeps_all = True

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
        usage = self.steps.runner.usage  # starts the log, too
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
        self.logger.sample_rate = sample_rate

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """True if the plan follows the order in which gradients arrived.

        With `static_graph`, from the third forward pass on, as in torch. `hook_with_zero_step`
        skips the optimizer until then.
        """
        if self._steps is None or (self.static_graph and self.logger.iterations < 3):
            return False
        return not self._steps.engine.program.control.with_order

    # Life cycle

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return {key: value for key, value in self.__dict__.items() if key not in _NOT_STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Module.__setstate__(self, state)  # type: ignore[no-untyped-call]  # torch's
        self.process_group = group_of(Arguments())
        self._attach()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Continue with another group. A collective call on its members."""
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


def _backend_of(group: Any) -> str:
    return dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else "loopback"
