"""Data parallelism along one axis of a mesh, for a module that is split along others.

The parameters of a tensor-parallel module are `DTensor`s. Data parallelism averages their local
parts, so these become the module's parameters. While the module runs, they are swapped for
`DTensor`s made from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fddp.ddp.parameter_swap import ParameterSwap

if TYPE_CHECKING:  # `torch.distributed.tensor` takes a second to import
    from torch.distributed.tensor.placement_types import Placement


_SPLITS = "_fddp_splits"  # attribute of a submodule: the splits of its parameters, by name


class _Split(NamedTuple):
    """Description of a `DTensor` parameter."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: Size
    strides: tuple[int, ...]


def _whole(part: nn.Module, name: str, own: Tensor) -> Tensor | None:
    """Return the `DTensor` of a parameter that was made local.

    Its description is an attribute of the submodule, so that copies have it, too.
    """
    split = part.__dict__.get(_SPLITS, {}).get(name)
    if split is None:
        return None
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, split.mesh, split.placements, run_check=False, shape=split.shape, stride=split.strides
    )


def make_local_(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Replace `DTensor` parameters by their local parts if `mesh` is an axis of a larger mesh."""
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
        ParameterSwap(module, _whole, lambda: True)
