"""Data parallelism along one axis of a mesh, over a module that is split along others.

The parameters of a tensor-parallel module are `DTensor`s. What data parallelism averages are their
local parts, so those become the module's parameters. While it runs, `DTensor`s made from them stand
in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fddp.ddp.parameter_swap import ParameterSwap

if TYPE_CHECKING:  # `torch.distributed.tensor` takes a second to import
    from torch.distributed.tensor.placement_types import Placement


_SPLITS = "_fddp_splits"  # attribute of a part: how each of its parameters is split, by name


class _Split(NamedTuple):
    """How a whole parameter is made of its local parts."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: Size
    strides: tuple[int, ...]


def _whole(part: nn.Module, name: str, own: Tensor) -> Tensor | None:
    """The `DTensor` of a parameter that was made local. What it takes lies with the part, so that
    copies of a module have it, too."""
    split = part.__dict__.get(_SPLITS, {}).get(name)
    if split is None:
        return None
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own,
        split.mesh,
        split.placements,
        run_check=False,
        shape=split.shape,
        stride=split.strides,
    )


def make_local_(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Makes the local parts of `DTensor` parameters the module's parameters, if `mesh` is an axis
    of a larger one, along whose other axes they may be split."""
    if mesh is None or mesh._get_root_mesh() == mesh:
        return
    from torch.distributed.tensor import DTensor

    local: dict[Tensor, nn.Parameter] = {}  # a shared one stays shared
    for part in module.modules():
        for name, whole in part._parameters.items():
            if isinstance(whole, DTensor):
                if whole not in local:
                    own = whole.to_local().detach()
                    local[whole] = nn.Parameter(own, requires_grad=whole.requires_grad)
                split = _Split(whole.device_mesh, whole.placements, whole.shape, whole.stride())
                part.__dict__.setdefault(_SPLITS, {})[name] = split
                part._parameters[name] = local[whole]
    if local:
        ParameterSwap(module, _whole, _always)


def _always() -> bool:
    return True
