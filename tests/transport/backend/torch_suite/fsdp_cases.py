"""Tests of sharded parameters on torch's base class for them, with torch's models and checks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.common_fsdp import (
    DoubleLinear,
    FSDPTest,
    MLPStack,
    check_sharded_parity,
)
from torch.testing._internal.common_utils import set_rng_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DIM = 10  # not divisible by 4
_STEPS = 2


def run(rank: int, world_size: int, name: str, backend: str, folder: str) -> None:
    """Run a test in a default group of its own.

    Args:
        name: of the test method.
        backend: of the group.
        folder: empty, the same on all ranks, and used by no other test.
    """
    dist.destroy_process_group()
    case = FsdpCases(name)
    case.rank, case.file_name = rank, str(Path(folder) / "store")
    dist.init_process_group(backend, init_method=case.init_method, rank=rank, world_size=world_size)
    set_rng_seed()
    getattr(case, name)()
    dist.barrier()
    dist.destroy_process_group()


class _Options(NamedTuple):
    """A training run of `fully_shard`."""

    reshard_after_forward: bool = True
    param_dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    largest_norm: float | None = None


class FsdpCases(FSDPTest):
    """The methods run on each rank; `run` stands for the processes that the base would start."""

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def test_parity(self) -> None:
        for reshard_after_forward in (True, False):
            self._check_training(_Options(reshard_after_forward))

    def test_mixed_precision(self) -> None:
        for reshard_after_forward in (True, False):
            self._check_training(_Options(reshard_after_forward, torch.bfloat16))

    def test_accumulated_gradients(self) -> None:
        self._check_training(_Options(micro_batches=3))
        self._check_training(
            _Options(reshard_after_forward=False, param_dtype=torch.bfloat16, micro_batches=2)
        )

    def test_clipped_norm(self) -> None:
        self._check_training(_Options(largest_norm=0.05))

    def test_unused_parameters(self) -> None:
        """Gradients of the second layer are None."""
        self._check_training(_Options(), lambda: DoubleLinear(_DIM))

    def test_hybrid_shards(self) -> None:
        """Shards on pairs of ranks, replicated between the pairs."""
        shape = (self.world_size // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        self._check_training(_Options(), meshes=[mesh])

    def _check_training(
        self,
        options: _Options,
        make: Callable[[], nn.Module] = lambda: nn.Sequential(MLPStack(_DIM), DoubleLinear(_DIM)),
        meshes: Sequence[DeviceMesh] = (),
    ) -> None:
        """Compare with replicas whose gradients gloo averages, and with the same run over gloo.

        Args:
            options: of the run.
            make: the model.
            meshes: one mesh to use instead of both groups.
        """
        over_gloo = dist.new_group(backend="gloo")
        groups = (self.process_group, over_gloo)
        set_rng_seed()
        replicas = make()
        models = [
            _sharded(replicas, mesh, options)
            for mesh in meshes or [DeviceMesh.from_group(group, "cpu") for group in groups]
        ]
        optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (replicas, *models)]
        for step in range(_STEPS):
            norms = [_train(model, options, self.rank, step) for model in models]
            expected = _train_replicas(replicas, options, self.rank, step, over_gloo)
            for norm in norms:
                torch.testing.assert_close(norm, expected)
            check_sharded_parity(self, replicas, models[0])
            for optimizer in optimizers:
                optimizer.step()
        pairs = zip(models[0].parameters(), models[-1].parameters(), strict=True)
        for ours, theirs in pairs:
            # Sums of two numbers do not depend on their order, which gloo chooses.
            same_bits: dict[str, Any] = {"rtol": 0, "atol": 0} if self.world_size == 2 else {}
            torch.testing.assert_close(ours.to_local(), theirs.to_local(), **same_bits)


def _sharded(replicas: nn.Module, mesh: DeviceMesh, options: _Options) -> FSDPModule:
    model = copy.deepcopy(replicas)
    policy = MixedPrecisionPolicy(options.param_dtype, reduce_dtype=torch.float32)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": policy,
    }
    for child in model.children():
        fully_shard(child, **arguments)
    return fully_shard(model, **arguments)


def _inputs(options: _Options, rank: int, step: int) -> list[torch.Tensor]:
    """Micro-batches of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batches = torch.randn(options.micro_batches, 4, _DIM, generator=generator)
    return list(batches.to(options.param_dtype))


def _loss(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    first = output if isinstance(output, torch.Tensor) else output[0]
    return first.float().square().mean()


def _train(model: nn.Module, options: _Options, rank: int, step: int) -> torch.Tensor | None:
    """Gradients of a step; the norm before it is clipped."""
    assert isinstance(model, FSDPModule)
    model.zero_grad()
    for number, batch in enumerate(_inputs(options, rank, step), start=1):
        model.set_requires_gradient_sync(number == options.micro_batches)
        _loss(model(batch)).backward()
    if options.largest_norm is None:
        return None
    norm = nn.utils.clip_grad_norm_(model.parameters(), options.largest_norm)
    return norm.full_tensor()


def _train_replicas(
    replicas: nn.Module, options: _Options, rank: int, step: int, group: dist.ProcessGroup
) -> torch.Tensor | None:
    computed = copy.deepcopy(replicas).to(options.param_dtype)
    sums: dict[str, torch.Tensor] = {}
    for batch in _inputs(options, rank, step):
        computed.zero_grad()
        _loss(computed(batch)).backward()
        for name, parameter in computed.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad.float()
    replicas.zero_grad()
    for name, parameter in replicas.named_parameters():
        if name in sums:
            dist.all_reduce(sums[name], group=group)
            parameter.grad = sums[name] / group.size()
    if options.largest_norm is None:
        return None
    return nn.utils.clip_grad_norm_(replicas.parameters(), options.largest_norm)
