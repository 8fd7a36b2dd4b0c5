"""Sharded updates of a wrapped module, whose parameters are gathered during the next forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter

from fddp.ddp.request import ModuleRequest
from fddp.ddp.state import WrapperState
from fddp.ddp.step_runner import StepRunner
from fddp.errors import InternalError
from fddp.native.backward_watch import BackwardWatch
from fddp.runtime.pending_leaf import PendingParameter, give_back_, make_pending_
from fddp.runtime.results import shards_of
from fddp.sync.engine import Engine
from fddp.sync.gathering import Gathering

_CHANGED = (
    "the parameters of a module with a sharded optimizer have changed, and shards would change "
    "their owners; save the module, wrap it anew and make a new optimizer"
)


class ShardedRunner(StepRunner):
    """Runs steps of a wrapped module that leave each rank its shard of the mean.

    Attributes:
        shards: this rank's shards of the parameters, by leaf; their `.grad` is set by steps.
    """

    shards: Sequence[Tensor | None] = ()

    def open(self, *, again: bool = False) -> None:
        """As `StepRunner.open`, with shards as results."""
        super().open(again=again)
        self._write = self._keep

    def open_distributed(self, context: int) -> None:
        """Fail a step whose gradients are in a context of distributed autograd."""
        super().open_distributed(context)
        if self.step is not None:
            problem = "gradients in a context of distributed autograd can't be sharded"
            self.step.fail(RuntimeError(problem))

    def change_parameters(self, request: ModuleRequest, watch: BackwardWatch) -> None:
        """Raise an error: shards would change their owners."""
        raise RuntimeError(_CHANGED)

    def _keep(self, leaves: Sequence[Tensor | None]) -> None:
        """Add this rank's shards of the mean to the gradients of the shards."""
        parameters = self.parameters
        parameters.hooks.assign([None] * len(parameters.leaves), False)
        for param in parameters.leaves:
            param.grad = None
        for shard, grad in zip(self.shards, leaves, strict=True):
            if shard is not None and grad is not None:
                shard.grad = grad if shard.grad is None else shard.grad + grad


class ShardedOptimizer:
    """An optimizer that keeps on each rank the state of its shard of the parameters only.

    Made by `DistributedDataParallel.sharded_optimizer`. With `overlap`, `step` does not wait for
    the parameters, which are gathered from all ranks while the program goes on. Functions of torch
    wait for a parameter before they use it, and modules that were compiled before this was made
    wait for all of theirs; see [Note: pending leaves]. Call `wait` before anything else reads
    parameters, because it finds NaN: extensions in C++, transforms of `torch.func`, TorchScript,
    code that was compiled later, and other threads.

    Attributes:
        inner: the optimizer of the shards, for schedulers of the learning rate.
    """

    def __init__(
        self,
        module: Module,
        runner: ShardedRunner,
        make: Callable[[Mapping[str, Tensor]], torch.optim.Optimizer],
        *,
        overlap: bool,
    ) -> None:
        self._runner = runner
        self._overlaps = overlap
        self._engine.prepare_gathering_ahead()
        self._params = runner.parameters.leaves
        self._names = runner.parameters.names
        self._gathering: Gathering | None = None
        self._missing: dict[int, Tensor] = {}  # memory of parameters that have not arrived, by leaf
        self._read_shards()
        self.inner = make(dict(zip(self._names, self._shards, strict=True)))
        for part in module.modules():
            if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
                part.register_forward_pre_hook(self._before_compiled, prepend=True)

    @property
    def _engine(self) -> Engine:
        return self._runner.engine

    @property
    def _shards(self) -> list[Tensor]:
        return [shard for shard in self._runner.shards if shard is not None]

    def step(self) -> None:
        """Update this rank's shards by the gradients of the last backward pass, clear these, and
        gather the parameters, or with `overlap` start to; a collective call.

        Parameters that were written since the last step, such as by `load_state_dict`, are used as
        they are now. They must be equal on all ranks.

        Raises:
            RankLostError, SyncTimeoutError: as `wait`.
        """
        self.wait()
        self._read_shards()
        self.inner.step()
        self.zero_grad()
        gathering = Gathering(self._engine, dict(zip(self._names, self._shards, strict=True)))
        memory, _ = gathering.leaves()
        if not self._overlaps:
            gathering.wait()
        for leaf, (param, into) in enumerate(zip(self._params, memory, strict=True)):
            if into is None:
                raise InternalError(f"no memory for parameter {self._names[leaf]!r}")
            into = _with_strides_of(param, into)
            if self._overlaps:
                self._missing[leaf] = into
                make_pending_(param, partial(self._arrive, leaf))
            else:
                param.data = into
        self._gathering = gathering if self._overlaps else None

    def zero_grad(self) -> None:
        """Clear the gradients of the shards, as `step` does."""
        for shard in self._shards:
            shard.grad = None

    def wait(self) -> None:
        """Wait for all parameters.

        Raises:
            RankLostError, SyncTimeoutError: a rank was lost, or took no step. Parameters that have
                not arrived can't be read any more: go on from a checkpoint.
        """
        if self._gathering is not None:
            self._gathering.wait()
            self._set([*self._missing])
            self._gathering = None

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer on this rank, for its own shards; differs between ranks."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of this rank, saved with the same plan on as many ranks."""
        self.inner.load_state_dict(state)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a sharded optimizer can't be pickled; save state_dict() of it and its module"
        )

    def _read_shards(self) -> None:
        """Take this rank's shards from the parameters."""
        found = shards_of(self._engine.program, [param.detach() for param in self._params])
        if not self._runner.shards:
            self._runner.shards = found
        for shard, new in zip(self._shards, found, strict=True):
            if new is not None and new is not shard:
                shard.copy_(new)

    def _before_compiled(self, part: Module, _: Any) -> None:
        # Compiled code reads parameters in its own way.
        for param in part.parameters():
            if isinstance(param, PendingParameter):
                param._arrive()

    def _arrive(self, leaf: int) -> None:
        """Wait for a parameter, and give it its memory."""
        if self._gathering is None:
            raise InternalError(f"parameter {self._names[leaf]!r} has no memory")
        self._gathering.arrive(self._engine.program.plan.bucket_of[leaf])
        self._set([leaf])

    def _set(self, leaves: Sequence[int]) -> None:
        for leaf in leaves:
            give_back_(self._params[leaf], self._missing.pop(leaf))


class ShardedUpdates(WrapperState):
    """The method of a wrapper that makes a sharded optimizer."""

    _sharded_runner = ShardedRunner

    def sharded_optimizer(
        self,
        make: Callable[[Mapping[str, Tensor]], torch.optim.Optimizer],
        *,
        overlap: bool = False,
    ) -> ShardedOptimizer:
        """Shard updates from now on, and return the optimizer; a collective call.

        Backward passes then reduce-scatter gradients, which do not appear in the `.grad` of
        parameters, and the optimizer all-gathers updated parameters. Call it before the first
        backward pass.

        Args:
            make: makes the optimizer of this rank's shards from a dict of names and shards, which
                are flat tensors, some of them empty. It must be elementwise, such as
                `lambda shards: torch.optim.AdamW(shards.values(), lr=1e-3)`.
            overlap: True to gather during the next forward pass; see `ShardedOptimizer` for what
                then has to call its `wait`.

        Raises:
            ValueError: the wrapper has virtual ranks, mixed precision, a communication hook, a
                delayed all-reduce, sparse or no gradients, or `skip_all_reduce_unused_params`; with
                `overlap` also subclasses of `Parameter` and TorchScript.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     module = torch.nn.Linear(2, 1, bias=False)
            ...     torch.nn.init.ones_(module.weight)
            ...     ddp = fddp.DistributedDataParallel(module, process_group=group)
            ...     optimizer = ddp.sharded_optimizer(
            ...         lambda shards: torch.optim.SGD(shards.values(), lr=0.1), overlap=True)
            ...     for _ in range(2):
            ...         ddp(torch.full((1, 2), 1.0 + group.rank)).sum().backward()
            ...         optimizer.step()
            ...     return [round(x, 3) for x in module.state_dict()["weight"][0].tolist()]
            >>> fddp.loopback(2, train)
            [[0.7, 0.7], [0.7, 0.7]]
        """
        problem = self._unshardable() or (_never_pending(self.module) if overlap else None)
        if problem is not None:
            raise ValueError(f"a sharded optimizer does not go with {problem}")
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._shards_updates = True
        runner = self.steps.runner
        if not isinstance(runner, ShardedRunner):
            raise InternalError("steps were made that give no shards")
        return ShardedOptimizer(self.module, runner, make, overlap=overlap)

    def _unshardable(self) -> str | None:
        """Return the setting that rules out sharded updates, if there is one."""
        has_hook = self._steps is not None and self._steps.engine.hook is not None
        for name, found in (
            ("a second one", self._shards_updates),
            ("virtual_ranks", self._virtual_ranks is not None),
            ("mixed_precision", self._mixed is not None),
            ("a communication hook", has_hook),
            ("delay_all_reduce_named_params", self._delayed is not None),
            ("sparse gradients", bool(self._options.sparse)),
            ("skip_all_reduce_unused_params", self.skip_all_reduce_unused_params),
        ):
            if found:
                return name
        return None


def _with_strides_of(param: Tensor, memory: Tensor) -> Tensor:
    """Return the memory of a parameter with its strides. They may be any along dimensions of one
    element, which operators take as a sign of the memory format."""
    slots = zip(param.shape, param.stride(), memory.stride(), strict=True)
    if all(size <= 1 or old == new for size, old, new in slots):
        return memory.as_strided(param.shape, param.stride())
    return memory  # dense, as the parameter was not


def _never_pending(module: Module) -> str | None:
    """Return the part of a module whose parameters cannot wait for their use, if there is one."""
    for name, part in module.named_modules():
        if isinstance(part, ScriptModule):
            return f"overlap=True and TorchScript (module {name!r}), which reads them in C++"
    for name, param in module.named_parameters():
        if type(param) is not Parameter:
            return f"overlap=True and a {type(param).__name__} ({name!r}), only with a Parameter"
    return None
