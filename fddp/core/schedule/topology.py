"""Topologies: the ranks of a group as a grid with named axes.

Ranks are numbered in row-major order, outermost axis first: in `Topology(host=4, local=8)`, rank 11
has the coordinate 3 on `local` and 1 on `host`. A *group* along some axes is a set of ranks that
differ only in these axes: along `local` the 8 ranks of one host, along `host` 4 ranks, one per
host.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fddp.core.entrance import entrance

if TYPE_CHECKING:
    from typing_extensions import Self

_LARGEST = 2**31 - 1  # rank numbers of backends are 32-bit ints


@dataclass(frozen=True, init=False)
class Topology:
    """Named axes of the ranks of a group, outermost first.

    Attributes:
        axes: pairs of name and size; the world size is the product of the sizes.

    Raises:
        ValueError: no axis, a size that is not a positive int, or a world size above 2**31 - 1.

    Example:
        >>> topology = Topology(host=4, local=8)
        >>> topology.world_size, topology.coordinates(11)
        (32, (1, 3))
        >>> topology.group(("host",), rank=11)
        (3, 11, 19, 27)
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, /, **axes: int) -> None:
        if not axes:
            raise ValueError("a topology needs at least one axis, such as Topology(world=4)")
        for name, size in axes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"axis {name!r} needs an int of at least 1 as size, got {size!r}")
        object.__setattr__(self, "axes", tuple(axes.items()))
        if self.world_size > _LARGEST:
            raise ValueError(f"{self} has {self.world_size} ranks; the limit is {_LARGEST}")

    @classmethod
    @entrance
    def of(cls, ranks: Topology | int) -> Topology:
        """Return a topology unchanged, or that of a number of ranks, with the one axis "world".

        Raises:
            TypeError: `ranks` is neither.
            ValueError: there is no rank.

        Example:
            >>> Topology.of(4)
            Topology(world=4)
        """
        if isinstance(ranks, Topology):
            return ranks
        if type(ranks) is not int:
            raise TypeError(
                f"topology must be a Topology, such as Topology(host=4, local=8), or a number of "
                f"ranks, got a {type(ranks).__name__}"
            )
        return cls(world=ranks)

    @classmethod
    @entrance
    def from_group(cls, group: Any) -> Self:
        """Return the topology of a process group (one axis, "world") or of a torch `DeviceMesh`.

        Args:
            group: a `torch.distributed` group, the group of `fddp.loopback`, or a `DeviceMesh`,
                whose dimensions become the axes. Unnamed dimensions are called `dim0`, `dim1`, ...

        Raises:
            TypeError: `group` is something else.

        Example:
            >>> import fddp
            >>> fddp.loopback(2, Topology.from_group)
            [Topology(world=2), Topology(world=2)]
        """
        shape = getattr(group, "shape", None)
        if hasattr(group, "mesh_dim_names") and shape is not None:
            names = group.mesh_dim_names or [f"dim{i}" for i in range(len(shape))]
            return cls(**{name: int(size) for name, size in zip(names, shape, strict=True)})
        size = getattr(group, "size", None)
        if callable(size):
            size = size()
        if type(size) is not int:
            raise TypeError(
                f"group must be a process group or DeviceMesh, got "
                f"{type(group).__name__}; for the default group pass torch.distributed.group.WORLD"
            )
        return cls(world=size)

    def __repr__(self) -> str:
        return f"Topology({', '.join(f'{name}={size}' for name, size in self.axes)})"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def size(self, axes: Collection[str]) -> int:
        """Number of ranks in a group along `axes`; 1 without axes.

        Raises:
            KeyError: an axis is unknown.
        """
        return math.prod(self._sizes[name] for name in axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinate of a rank on each axis."""
        coordinates = []
        for _, size in reversed(self.axes):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def group(self, axes: Collection[str], rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` only in `axes`, in ascending order."""
        ranks, stride = [rank], self.world_size
        for (name, size), coordinate in zip(self.axes, self.coordinates(rank), strict=True):
            stride //= size
            if name in axes:
                ranks = [base + (i - coordinate) * stride for base in ranks for i in range(size)]
        return tuple(ranks)
