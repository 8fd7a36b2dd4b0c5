"""Arguments of the constructor: checks, and the settings that follow from them and the module.

Ranks pass the same arguments, and usually the same module. If one finds an error here, the wrapper
reports it to the others, which may have found none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, device, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from fddp.core.plan.defaults import CAP_MB, FIRST_MB, MIB
from fddp.core.plan.leaf import MAX_COUNT
from fddp.core.text import choice_text, counted
from fddp.ddp.local_gradients import LocalGradients
from fddp.ddp.mixed_precision import Precision
from fddp.errors import NoGradientError
from fddp.runtime.agreement import ReportTime
from fddp.runtime.nonfinite import Policy
from fddp.sync.request import NoiseGroups
from fddp.transport import LoopbackGroup, TransportName, default_group

STATIC_FINDS_UNUSED = (
    "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will "
    "detect unused parameters automatically, so you do not need to set "
    "find_unused_parameters=true"
)

_TO_CALLER = 5  # frames from a warning to the call of the constructor

# Attributes of the wrapper with the values of the arguments.
AS_GIVEN = (
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "mixed_precision",
    "batched_grad_copy",
    "skip_all_reduce_unused_params",
    "lazy_bucket_allocation",
)


@dataclass(frozen=True)
class Arguments:
    """Arguments of the constructor except the module, in its order and with its defaults.

    `DistributedDataParallel` documents them.
    """

    device_ids: Sequence[Any] | None = None
    output_device: Any = None
    dim: int = 0
    broadcast_buffers: bool | None = None
    init_sync: bool = True
    process_group: dist.ProcessGroup | LoopbackGroup | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    delay_all_reduce_named_params: Iterable[tuple[str, Tensor]] | None = None
    param_to_hook_all_reduce: Tensor | None = None
    mixed_precision: Precision | None = None
    device_mesh: DeviceMesh | None = None
    skip_all_reduce_unused_params: bool = False
    bucket_cap_mb_list: Sequence[float] | None = None
    batched_grad_copy: bool = False
    forward_sync_buffers: bool | None = None
    lazy_bucket_allocation: bool = False
    transport: TransportName = "auto"
    nonfinite: Policy = "propagate"
    report: ReportTime = "now"
    virtual_ranks: int | None = None
    local_gradients: LocalGradients = "warn"
    noise: NoiseGroups = None

    def __post_init__(self) -> None:
        delayed = self.delay_all_reduce_named_params
        if delayed is not None:  # an iterator could be read only once
            object.__setattr__(self, "delay_all_reduce_named_params", tuple(delayed))

    @classmethod
    def of_call(cls, call: Mapping[str, Any]) -> Arguments:
        """Pick the arguments from the local variables of the constructor."""
        return cls(**{field.name: call[field.name] for field in fields(cls)})


@dataclass
class Settings:
    """Settings of a wrapper that may change between steps. Copies of the wrapper have them, too."""

    is_on: bool = True  # backward passes synchronise gradients; also read by compiled code
    is_manual: bool = False  # `finalize` closes steps; see [Note: manual finalization]
    in_step: bool = False  # the thread is within `in_step`

    @property
    def syncs(self) -> bool:
        """True if a forward pass that begins now is followed by a synchronised backward pass."""
        return self.is_on and torch.is_grad_enabled()

    def synchronise(self, on: bool) -> None:
        """Set `is_on`."""
        self.is_on = on

    def finalize_manually(self, required: bool) -> None:
        """Set `is_manual`."""
        self.is_manual = required

    def enter_step(self, inside: bool) -> None:
        """Set `in_step`."""
        self.in_step = inside


@dataclass(frozen=True)
class Options:
    """Settings of a wrapper, derived from its arguments and its module. They can be pickled.

    Attributes:
        arguments: the arguments, without groups and parameters.
        device: device of the first parameter.
        is_multi_device: True if parameters lie on several devices.
        device_ids: index of the only device; None for CPU and multi-device modules.
        output_device: that index, or another one.
        ignored: names of parameters and buffers to leave alone, including parameters with a delayed
            all-reduce.
        sparse: names of parameters with sparse gradients, including ignored ones.
        has_sync_batch_norm: True if the module has a `SyncBatchNorm`.
        forward_sync_buffers: True if every forward broadcasts buffers.
        init_sync_buffers: True if buffers are broadcast at the start, if anything is.
        cap_bytes: a bucket is closed at this size.
        first_cap_bytes: the same for the first bucket.
        listed_caps_bytes: caps of the first, second, ... bucket; empty if none were listed.
    """

    arguments: Arguments
    device: device
    is_multi_device: bool
    device_ids: tuple[int, ...] | None
    output_device: int | None
    ignored: frozenset[str]
    sparse: frozenset[str]
    has_sync_batch_norm: bool
    forward_sync_buffers: bool
    init_sync_buffers: bool
    cap_bytes: int
    first_cap_bytes: int
    listed_caps_bytes: tuple[int, ...]

    @property
    def initial_caps_bytes(self) -> tuple[int, ...]:
        """Caps of the plan of the first step.

        There is a single bucket unless caps were listed or parameters may go unused, because the
        plan will be rebuilt from the order in which gradients arrive.
        """
        may_go_unused = self.arguments.find_unused_parameters and not self.arguments.static_graph
        if not self.listed_caps_bytes and not may_go_unused:
            return (MAX_COUNT,)
        return self.rebuilt_caps_bytes

    @property
    def rebuilt_caps_bytes(self) -> tuple[int, ...]:
        """Caps of the plan of later steps."""
        return self.listed_caps_bytes or (self.first_cap_bytes, self.cap_bytes)


def group_of(arguments: Arguments) -> dist.ProcessGroup | LoopbackGroup:
    """Return the group of the arguments: `process_group`, that of `device_mesh`, or the default.

    Raises:
        RuntimeError: both are given, or the mesh has several dimensions.
        ValueError: there is no default group, or this rank is no member of the group.
    """
    group, mesh = arguments.process_group, arguments.device_mesh
    if mesh is not None:
        if group is not None:
            raise RuntimeError(
                "Cannot specify both process_group and device_mesh arguments. Pass one of them: a "
                "DeviceMesh brings its own group"
            )
        if mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {mesh}. Pass the dimension to average "
                f"over: mesh[name]"
            )
        return mesh.get_group(mesh_dim=0)
    group = default_group() if group is None else group
    if group is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group, or pass process_group"
        )
    if not isinstance(group, (dist.ProcessGroup, LoopbackGroup)):
        raise ValueError(
            f"process_group is {group!r}: this rank is no member of it; wrap the module only on "
            f"the ranks that belong to the group"
        )
    return group


def check_policy(policy: Policy, *, delays: bool) -> None:
    """Raise a ValueError if `nonfinite` is unknown, or does not support delayed parameters."""
    if policy not in get_args(Policy):
        raise ValueError(choice_text("nonfinite", policy, get_args(Policy)))
    if delays and policy != "propagate":
        raise ValueError(
            f"nonfinite={policy!r} and delay_all_reduce_named_params can't be combined: "
            f"parameters with a delayed all-reduce are averaged separately, and could be neither "
            f"checked nor skipped with the others; leave out one of the two"
        )


def check_report_time(arguments: Arguments) -> None:
    """Raise a ValueError if `report` is unknown, or an argument needs reports before results."""
    report = arguments.report
    if report not in get_args(ReportTime):
        raise ValueError(choice_text("report", report, get_args(ReportTime)))
    for name in ("find_unused_parameters", "skip_all_reduce_unused_params"):
        if report == "next" and getattr(arguments, name):
            raise ValueError(
                f"{name} and report='next' can't be combined: which parameters are used on other "
                f"ranks is known when the report is read; leave out one of the two"
            )


def managed(module: nn.Module, ignored: frozenset[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that are not ignored, by name; a shared one once, by its first name."""
    return {name: p for name, p in module.named_parameters() if name not in ignored}


def checked(module: nn.Module, arguments: Arguments) -> Options:
    """Check the arguments against the module, and derive the settings.

    The module is taken after `make_local_`. Deprecation warnings point at the constructor's caller.

    Raises:
        NoGradientError: no parameter requires a gradient. It is a RuntimeError, as torch raises.
        RuntimeError: a parameter is not initialised.
        ValueError: parameters on devices of several types, other devices than theirs,
            `SyncBatchNorm` on the CPU, an invalid cap, or only one of the two arguments that delay
            an all-reduce.

    Example:
        >>> from torch import nn
        >>> options = checked(nn.Linear(2, 2), Arguments(bucket_cap_mb=0.5))
        >>> options.device, options.rebuilt_caps_bytes
        (device(type='cpu'), (524288, 524288))
    """
    delayed = _delayed(arguments)
    ignored = _ignored_names(module) | delayed.keys()
    own = managed(module, ignored)
    _check_parameters(own, has_delayed=bool(delayed))
    placed = [tensor.device for tensor in (own or delayed).values()]
    device_ids, output_device = _device_indices(arguments, set(placed))
    batch_norms = [n for n, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if batch_norms and placed[0].type == "cpu":
        raise ValueError(
            f"SyncBatchNorm layers only work with GPU modules, and {batch_norms[0]!r} is on the "
            f"CPU; use BatchNorm there"
        )
    _warn_of_needless(arguments)
    forward_sync, init_sync = _buffer_syncs(arguments)
    cap_bytes, first_cap_bytes, listed_caps_bytes = _caps(arguments)
    return Options(
        arguments=replace(
            arguments,
            process_group=None,
            device_mesh=None,
            delay_all_reduce_named_params=None,
            param_to_hook_all_reduce=None,
        ),
        device=placed[0],
        is_multi_device=len(set(placed)) > 1,
        device_ids=device_ids,
        output_device=output_device,
        ignored=ignored,
        sparse=_sparse_names(module),
        has_sync_batch_norm=bool(batch_norms),
        forward_sync_buffers=forward_sync,
        init_sync_buffers=init_sync,
        cap_bytes=cap_bytes,
        first_cap_bytes=first_cap_bytes,
        listed_caps_bytes=listed_caps_bytes,
    )


def _delayed(arguments: Arguments) -> dict[str, Tensor]:
    named, trigger = arguments.delay_all_reduce_named_params, arguments.param_to_hook_all_reduce
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            f"time. {'The first' if named is None else 'The second'} is None"
        )
    return dict(named or ())


def _ignored_names(module: nn.Module) -> frozenset[str]:
    """Return the names set by `_set_params_and_buffers_to_ignore_for_model`.

    Names set on a submodule are relative to it.
    """
    return frozenset(
        # Torch's recipe for these names joins the root's empty name and a dot.
        f"{path}.{name.removeprefix('.')}".removeprefix(".")
        for path, part in module.named_modules()
        for name in getattr(part, "_ddp_params_and_buffers_to_ignore", ())
    )


def _check_parameters(own: Mapping[str, nn.Parameter], has_delayed: bool) -> None:
    if not has_delayed and not any(p.requires_grad for p in own.values()):
        raise NoGradientError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            f"requires a gradient. This one has {counted(len(own), 'parameter')}, apart from "
            f"ignored ones; call requires_grad_() on those to train, or use the module without the "
            f"wrapper"
        )
    for name, parameter in own.items():
        if isinstance(parameter, UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the "
                f"modules; {name!r} is not initialised"
            )


def _device_indices(
    arguments: Arguments, devices: set[device]
) -> tuple[tuple[int, ...] | None, int | None]:
    ids, output_device = arguments.device_ids, arguments.output_device
    if ids is not None and len(ids) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element. Got "
            f"{list(ids)}: start one process for each device"
        )
    types = sorted({device.type for device in devices})
    if len(types) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but "
            f"input module parameters locate in {types}."
        )
    if ids and types != ["cpu"] and len(devices) == 1:
        indices = tuple(map(_index, ids))
        return indices, indices[0] if output_device is None else _index(output_device)
    if ids or output_device:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got "
            f"device_ids {ids}, output_device {output_device}, and module parameters "
            f"{sorted(map(str, devices))}. Leave both out unless the module is on one GPU"
        )
    return None, None


def _warn_of_needless(arguments: Arguments) -> None:
    if arguments.broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated; its value is ignored, because "
            "`forward_sync_buffers` was given, too."
            if arguments.forward_sync_buffers is not None
            else "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; but with "
            "`forward_sync_buffers=False` buffers are still broadcast once, at the start, and "
            "with `broadcast_buffers=False` never.",
            FutureWarning,
            stacklevel=_TO_CALLER,
        )
    if arguments.check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` is deprecated and has no "
            "effect. Leave it out.",
            FutureWarning,
            stacklevel=_TO_CALLER,
        )
    if arguments.static_graph and arguments.find_unused_parameters:
        warnings.warn(STATIC_FINDS_UNUSED, stacklevel=_TO_CALLER)


def _index(device: int | str | torch.device) -> int:
    """Index of a device; that of the current device if the device has none."""
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _buffer_syncs(arguments: Arguments) -> tuple[bool, bool]:
    """Return if buffers are broadcast at every forward, and if they are at the start."""
    if arguments.forward_sync_buffers is not None:
        return arguments.forward_sync_buffers, True
    both = arguments.broadcast_buffers is None or arguments.broadcast_buffers
    return both, both


def _caps(arguments: Arguments) -> tuple[int, int, tuple[int, ...]]:
    """Return the cap, that of the first bucket and the listed ones, in bytes."""
    # As in torch, a list overrides the single cap.
    if arguments.bucket_cap_mb_list:
        listed = tuple(_bytes("bucket_cap_mb_list", cap) for cap in arguments.bucket_cap_mb_list)
        return max(listed), max(listed), listed
    if arguments.bucket_cap_mb is None:
        return int(CAP_MB * MIB), int(FIRST_MB * MIB), ()
    cap_bytes = _bytes("bucket_cap_mb", arguments.bucket_cap_mb)
    return cap_bytes, cap_bytes, ()


def _bytes(name: str, cap_mb: object) -> int:
    if not isinstance(cap_mb, Real) or not 0 <= float(cap_mb) * MIB <= MAX_COUNT:
        raise ValueError(
            f"{name} must hold MB (of {MIB} bytes), at least 0 and finite, got {cap_mb!r}"
        )
    return max(1, int(float(cap_mb) * MIB))  # with 0, every leaf has a bucket of its own


def _sparse_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters with sparse gradients."""
    layers = dict(module.named_modules(remove_duplicate=False))
    owners = ((name, layers[name.rpartition(".")[0]]) for name, _ in module.named_parameters())
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return frozenset(n for n, layer in owners if isinstance(layer, embeddings) and layer.sparse)
