"""What a wrapped module holds: options, the steps, and the attributes that torch's class has."""

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
from fddp.ddp.arguments import Options, managed
from fddp.ddp.backward_steps import Steps, Switches
from fddp.ddp.delayed_all_reduce import Delayed
from fddp.ddp.logger import Recorder
from fddp.ddp.logging_data import StaticLoggingData, start_log
from fddp.ddp.mixed_precision import wire_dtype
from fddp.ddp.parameter_watch import ParameterWatch
from fddp.ddp.request import ModuleRequest
from fddp.errors import FddpError, InternalError
from fddp.hooks import cast as cast_hook
from fddp.transport import Group
from fddp.transport.mesh import GroupAndTopology

# Untyped, and so are its methods.
_TorchDDP: Any = torch.nn.parallel.DistributedDataParallel


@dataclass
class ForwardCollectives:
    """What this rank has done together with the others around forward passes.

    Attributes:
        done: how many it has been to: one before and one after each forward pass.
        is_open: whether one is under way, or was left by an exception.
        some_sync: whether a rank that has input said, within `join`, that its backward pass will
            synchronise gradients.
        in_step: whether this rank is within a step that it fails with the others.
        failure: of the last step that this rank shadowed within `join`, if it failed.
    """

    done: int = 0
    is_open: bool = False
    some_sync: bool = False
    in_step: bool = False
    failure: FddpError | None = None


class WrapperState(_TorchDDP):  # type: ignore[misc]
    """The state of a wrapped module. Its constructor is that of the wrapper."""

    def _expose(self, module: Module, options: Options) -> None:
        """Sets the attributes that torch's class has, and others rely on."""
        self.module = module
        self.device = options.device
        self.device_type = options.device.type
        self.device_ids = None if options.device_ids is None else list(options.device_ids)
        self.output_device = options.output_device
        self.is_multi_device_module = options.is_multi_device
        self.dim = options.dim
        self.forward_sync_buffers = options.forward_sync_buffers
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.static_graph = options.static_graph
        self.mixed_precision = options.mixed_precision
        self.batched_grad_copy = options.batched_grad_copy
        self.skip_all_reduce_unused_params = options.skip_all_reduce_unused_params
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
        self._switches = Switches()
        self._lazy_init_ran = False

    def _attach(self) -> None:
        """Sets what hangs on this process, and is made anew for a copy."""
        self.logger = self._recorder = Recorder()
        self._watch = ParameterWatch(self.module, self._options.ignored)
        self._steps: Steps | None = None
        self._all_delayed = not self._watch.params
        self._forward_collectives = ForwardCollectives()
        self._delayed = self._delay(*self._delays)

    def _delay(self, named: Any, trigger: Tensor | None) -> Delayed | None:
        """Has some parameters averaged by themselves; see `fddp.ddp.delayed_all_reduce`."""
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
                ddp.steps.work.append(average)

        group = cast(Group, self.process_group)
        return Delayed(named, trigger, group, sparse=self._options.sparse, at_end=at_end)

    @property
    def steps(self) -> Steps:
        """Carries gradients through the engine; made at the first use, by all ranks together."""
        if self._steps is None:
            try:
                self._steps = self._make_steps()
                if self._forward_collectives.in_step:
                    self._steps.enter()
            except AttributeError as error:  # which a property must not raise
                raise InternalError(f"the steps could not be made: {error}") from error
        return self._steps

    def _make_steps(self) -> Steps:
        steps = Steps(
            self._request(),
            self._switches,
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
            replace=self.gradient_as_bucket_view,
            recorder=self._recorder,
        )
        self._recorder.log = start_log(self._facts(steps))
        wire = wire_dtype(self.mixed_precision) if self.mixed_precision else None
        if wire is not None:
            steps.engine.set_hook(cast_hook(wire))
            self._recorder.note(comm_hook=f"{wire} gradients")
        return steps

    def _request(self) -> ModuleRequest:
        return ModuleRequest(
            params=self._watch.find_replaced(),
            options=self._options,
            span=GroupAndTopology(cast(Group, self.process_group), None),
            last_is_small=os.environ.get("DDP_SET_LAST_BUCKET_CAP", "0") == "1",
            transport=self._transport,
            nonfinite=self._nonfinite,
        )

    def _facts(self, steps: Steps) -> StaticLoggingData:
        group = self.process_group
        backend = dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else "loopback"
        return StaticLoggingData(
            module_name=type(self.module).__name__,
            rank=steps.engine.transport.rank,
            world_size=steps.engine.transport.world_size,
            backend_name=backend,
            backend_threads=2 if backend == "gloo" else None,
            options=self._options,
            plan=steps.engine.program.plan,
            names=tuple(steps.usage.names),
            environment=os.environ,
        )
