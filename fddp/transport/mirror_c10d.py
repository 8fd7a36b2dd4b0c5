"""Process groups of torch.distributed whose other ranks mirror this one."""

# Methods take what torch passes, which is less than the overloads of its declarations.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from fddp.transport.loopback import CollectiveKey, LoopbackGroup, Rendezvous
from fddp.transport.mirror import MirrorState
from fddp.transport.operation import Operation, OperationKind
from fddp.transport.torch_private import separate_world

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor

_BACKEND = "fddp_mirror"
_COMBINED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


@contextmanager
def mirrored_process_group(group: LoopbackGroup) -> Iterator[dist.ProcessGroup]:
    """Make the default group of `torch.distributed` one of the ranks of a mirrored group.

    Collectives of `torch.distributed`, called directly or by DistributedDataParallel, FSDP, DTensor
    and functional collectives, are operations of `group`. A default group that exists already is
    put back at the end. For one thread, as it is global to the process.

    Args:
        group: of `mirrored`.

    Raises:
        NotImplementedError: from `send`, `recv` and uneven all-to-alls within the block.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from fddp.extend import mirrored
        >>> with mirrored(0, 4, lambda rendezvous, operation, result: result) as group:
        ...     with mirrored_process_group(group):
        ...         total = torch.tensor(3.0)
        ...         dist.all_reduce(total)
        >>> total
        tensor(12.)
    """

    def create(options: Any, _: Any) -> MirroredProcessGroup:
        ranks = tuple(options.global_ranks_in_group)
        own = _part(group, ranks) if ranks else group
        return MirroredProcessGroup(own, options.group_id)

    refused = vars(MirroredProcessGroup).keys() & vars(dist.ProcessGroup).keys() - {"__init__"}
    with separate_world(_BACKEND, create, refused):
        dist.init_process_group(
            _BACKEND, rank=group.rank, world_size=group.size, store=dist.HashStore()
        )
        try:
            yield cast("dist.ProcessGroup", dist.group.WORLD)
        finally:
            dist.destroy_process_group()


def _part(group: LoopbackGroup, ranks: Sequence[int]) -> LoopbackGroup:
    state = cast("MirrorState", group.state)
    return LoopbackGroup(ranks.index(group.rank), MirrorState(len(ranks), state.transfer))


class Done(dist.Work):
    """A work that has finished."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class MirroredProcessGroup(dist.ProcessGroup):
    """A process group of the ranks of a mirrored group.

    Its methods are those that torch calls, which has two names for some.

    Attributes:
        loopback: the mirrored group.
    """

    def __init__(self, loopback: LoopbackGroup, group_name: str) -> None:
        super().__init__(loopback.rank, loopback.size)
        self.loopback, self._name = loopback, group_name

    @property
    def group_name(self) -> Any:
        """Name that torch gave it."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend."""
        return _BACKEND

    def size(self) -> int:
        """Number of ranks."""
        return self.loopback.size

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        """Reduce tensors over ranks."""
        for tensor in tensors:
            tensor.copy_(self._reduced("all_reduce", tensor, _op(options)))
        return Done(tensors)

    def reduce(self, tensors: list[Tensor], options: Any) -> Done:
        """Reduce tensors over ranks, to one of them."""
        for tensor in tensors:
            total = self._reduced("reduce", tensor, _op(options))
            if options.rootRank == self.loopback.rank:
                tensor.copy_(total)
        return Done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Done:
        """Send tensors of one rank to all."""
        for tensor in tensors:
            tensor.copy_(self._run("broadcast", "broadcast", tensor, src=options.rootRank))
        return Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any = None) -> Done:
        """Gather tensors of all ranks."""
        for parts, own in zip(outputs, inputs, strict=True):
            for part, gathered in zip(parts, self._gathered("all_gather", own), strict=True):
                part.copy_(gathered.view(part.shape))
        return Done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, _: Any = None) -> Done:
        """Gather tensors of all ranks in one."""
        output.copy_(self._gathered("all_gather_into_tensor", own).view(output.shape))
        return Done([output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], _: Any = None
    ) -> Done:
        """Gather several tensors."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return Done(outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None
    ) -> Done:
        """Reduce parts over ranks, each to one of them."""
        for output, parts in zip(outputs, inputs, strict=True):
            flat = torch.cat([part.reshape(-1) for part in parts])
            output.copy_(self._own_part("reduce_scatter", flat, options).view(output.shape))
        return Done(outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any = None) -> Done:
        """Reduce parts of a tensor over ranks, each to one of them."""
        own = self._own_part("reduce_scatter_tensor", whole, options)
        output.copy_(own.view(output.shape))
        return Done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Done:
        """Reduce parts of several tensors."""
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, options)
        return Done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Done:
        """Gather tensors of all ranks on one of them."""
        for number, own in enumerate(inputs):
            gathered = self._gathered("gather", own)
            if options.rootRank == self.loopback.rank:
                for part, found in zip(outputs[number], gathered, strict=True):
                    part.copy_(found.view(part.shape))
        return Done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> Done:
        """Send parts of one rank, each to one rank."""
        for number, output in enumerate(outputs):
            parts = inputs[number] if inputs else [output] * self.loopback.size
            whole = torch.cat([part.reshape(-1) for part in parts])
            sent = self._run("scatter", "broadcast", whole, src=options.rootRank)
            output.copy_(sent.chunk(self.loopback.size)[self.loopback.rank].view(output.shape))
        return Done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        _: Any = None,
    ) -> Done:
        """Send a part to each rank."""
        if len({*output_sizes, *input_sizes}) > 1:
            raise _unsimulated("all_to_all_single with parts of different sizes")
        output.copy_(self._run("all_to_all_single", "all_to_all", own.reshape(-1)).view_as(output))
        return Done([output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], _: Any = None) -> Done:
        """Send a tensor to each rank."""
        if len({part.numel() for part in (*outputs, *inputs)}) > 1:
            raise _unsimulated("all_to_all with tensors of different sizes")
        flat = torch.cat([part.reshape(-1) for part in inputs])
        for output, part in zip(
            outputs, self._run("all_to_all", "all_to_all", flat).chunk(len(outputs)), strict=True
        ):
            output.copy_(part.view(output.shape))
        return Done(outputs)

    def barrier(self, opts: Any = None) -> Done:
        """Wait for all ranks."""
        self._gathered("barrier", torch.zeros(1, dtype=torch.uint8))
        return Done([])

    def send(self, *_: Any) -> Done:
        """Refuse to send."""
        raise _unsimulated("send")

    def recv(self, *_: Any) -> Done:
        """Refuse to receive."""
        raise _unsimulated("recv")

    recv_anysource = recv
    allreduce_coalesced = allreduce
    allgather_coalesced = allgather
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _reduced(self, name: str, tensor: Tensor, op: Any) -> Tensor:
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return self._run(f"{name}({op.name})", "all_reduce", tensor, average=_averages(op))
        if op not in _COMBINED:
            raise _unsimulated(f"{name} with {op}")
        gathered = self._gathered(f"{name}({op.name})", tensor)
        return reduce(_COMBINED[op], gathered.unbind(0)).view(tensor.shape)

    def _own_part(self, name: str, whole: Tensor, options: Any) -> Tensor:
        op = _op(options)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise _unsimulated(f"{name} with {op}")
        flat = whole.reshape(-1)
        done = self._run(f"{name}({op.name})", "reduce_scatter", flat, average=_averages(op))
        return done.chunk(self.loopback.size)[self.loopback.rank]

    def _gathered(self, name: str, own: Tensor) -> Tensor:
        """A row for each rank."""
        n = self.loopback.size
        buffer = own.new_zeros(n, own.numel())
        buffer[self.loopback.rank] = own.reshape(-1)
        return self._run(name, "all_gather", buffer.view(-1)).view(n, own.numel())

    def _run(self, name: str, kind: OperationKind, tensor: Tensor, **options: Any) -> Tensor:
        """Result of an operation; the tensor is not changed."""
        ranks = tuple(range(self.loopback.size))
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        operation = Operation(kind, own, ranks, **options)
        rendezvous = Rendezvous(CollectiveKey(-1, ranks, 0))
        rendezvous.what = f"torch.distributed.{name} of {own.dtype} {tuple(tensor.shape)}"
        cast("MirrorState", self.loopback.state).perform(rendezvous, self.loopback.rank, operation)
        return own


def _op(options: Any) -> Any:
    """The reduction that options name."""
    op = dist.ReduceOp.SUM if options is None else options.reduceOp
    return next(
        (known for known in dist.ReduceOp.RedOpType.__members__.values() if op == known), op
    )


def _averages(op: Any) -> bool:
    return bool(op == dist.ReduceOp.AVG)


def _unsimulated(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch.distributed.{name} can't be simulated in one process; check the step without it, "
        f"or on real ranks"
    )
