"""Backward passes within compiled functions, in which dynamo's frame hook is on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._dynamo.types import ConvertFrameReturn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel.distributed import _MixedPrecision

import fddp
from tests.support.models import rand
from tests.support.ranks import RankPool

PACKAGE = str(Path(fddp.__file__).parent)
WIDTH = 8
SMALL_MB = 0.0001  # several buckets
STEPS = 3


# No frame of the package is offered to dynamo


@contextmanager
def frame_hook(seen: list[str]) -> Iterator[None]:
    """Note the functions of the package that dynamo would compile."""

    def note(frame: Any, *_: Any) -> ConvertFrameReturn:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            seen.append(f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_name}")
        return ConvertFrameReturn(apply_to_code=False)  # the next one is offered again

    before = eval_frame.set_eval_frame(note)
    try:
        yield
    finally:
        eval_frame.set_eval_frame(before)


class Layers(nn.Module):
    """Layers of a bucket each, behind an embedding, with one that is not used."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(WIDTH, WIDTH, sparse=sparse)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.rows(torch.arange(len(x))))  # type: ignore[no-any-return]


class _Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("of this backward pass")


Prepare = Callable[[fddp.DistributedDataParallel], object]


def wrapped(
    transport: str, prepare: Prepare = lambda ddp: None, *, sparse: bool = False, **options: Any
) -> fddp.DistributedDataParallel:
    options = {"find_unused_parameters": True, **options}
    ddp = fddp.DistributedDataParallel(
        Layers(sparse=sparse), bucket_cap_mb=SMALL_MB, transport=transport, **options
    )
    prepare(ddp)
    return ddp


def taken_steps(seen: list[str], ddp: fddp.DistributedDataParallel, *, passes: int = 1) -> None:
    for step in range(STEPS):
        ddp.zero_grad()
        for _ in range(passes - 1):
            with ddp.no_sync():
                loss = ddp(rand(2, WIDTH, seed=step, dtype=torch.float32)).sum()
                with frame_hook(seen):
                    loss.backward()
        loss = ddp(rand(2, WIDTH, seed=step, dtype=torch.float32)).sum()
        is_manual = ddp.require_manual_backward_finalization
        with frame_hook(seen):
            loss.backward()
            if is_manual:
                ddp.finalize_backward()


def aborted_steps(seen: list[str], ddp: fddp.DistributedDataParallel) -> None:
    for _ in range(STEPS):
        with pytest.raises(ArithmeticError), ddp.in_step():  # noqa: PT012  # forward is in the block
            loss = ddp(_Boom.apply(torch.ones(2, WIDTH, requires_grad=True))).sum()
            with frame_hook(seen):
                loss.backward()


def delayed(transport: str) -> fddp.DistributedDataParallel:
    module = Layers()
    return fddp.DistributedDataParallel(
        module,
        bucket_cap_mb=SMALL_MB,
        transport=transport,
        find_unused_parameters=True,
        delay_all_reduce_named_params=[("layers.0.weight", module.layers[0].weight)],
        param_to_hook_all_reduce=module.layers[2].weight,
    )


def operators(seen: list[str]) -> None:
    leaf = torch.ones(3, requires_grad=True)
    for operator in (fddp.pmean, fddp.psum, fddp.pmax, fddp.all_gather, fddp.sync_on_backward):
        total = operator(leaf).sum()
        with frame_hook(seen):
            total.backward()


def functional(seen: list[str], transport: str) -> None:
    params = {name: param.detach() for name, param in Layers().named_parameters()}

    def loss_fn(values: Any) -> Tensor:
        return torch.func.functional_call(Layers(), values, (torch.ones(2, WIDTH),)).sum()

    with fddp.GradSync(params, bucket_cap_mb=SMALL_MB, transport=transport) as sync:
        step = sync.value_and_grad(loss_fn)
        for _ in range(STEPS):
            with frame_hook(seen):
                sync(step(params)[1])


def hooked(state: Any, hook: Any) -> Prepare:
    return lambda ddp: ddp.register_comm_hook(state, hook)


def manual(ddp: fddp.DistributedDataParallel) -> None:
    ddp.require_manual_backward_finalization = True


MIXED = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offered(rank: int, world_size: int, transport: str) -> dict[str, set[str]]:
    """Functions that were offered to dynamo, by case."""
    warnings.simplefilter("ignore")
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    modules: dict[str, Callable[[], fddp.DistributedDataParallel]] = {
        "as it is": lambda: wrapped(transport),
        "static graph": lambda: wrapped(transport, static_graph=True),
        "views": lambda: wrapped(transport, gradient_as_bucket_view=True),
        "sparse": lambda: wrapped(transport, sparse=True),
        "mixed precision": lambda: wrapped(transport, mixed_precision=MIXED),
        "non-finite": lambda: wrapped(transport, nonfinite="skip"),
        "torch's hook": lambda: wrapped(transport, hooked(None, default_hooks.allreduce_hook)),
        "PowerSGD": lambda: wrapped(transport, hooked(power, powerSGD_hook.powerSGD_hook)),
        "own hook": lambda: wrapped(transport, hooked(None, fddp.hooks.int8())),
        "manual finalization": lambda: wrapped(transport, manual),
        "delayed": lambda: delayed(transport),
    }
    found: dict[str, list[str]] = {}
    for name, make in modules.items():
        taken_steps(found.setdefault(name, []), make())
    taken_steps(found.setdefault("no_sync", []), wrapped(transport), passes=2)
    virtual = wrapped(transport, virtual_ranks=2 * world_size)
    taken_steps(found.setdefault("virtual ranks", []), virtual, passes=2)
    aborted_steps(found.setdefault("aborted", []), wrapped(transport))
    operators(found.setdefault("operators", []))
    functional(found.setdefault("value_and_grad", []), transport)
    return {name: set(functions) for name, functions in found.items() if functions}


# Dynamo makes these calls a part of the graph.
IN_GRAPHS = {"value_and_grad": {"sync/tree_sync.py: __call__", "sync/value_and_grad.py: __call__"}}


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_dynamo_is_offered_no_function_of_the_package(ranks: RankPool, transport: str) -> None:
    assert ranks.run(2, offered, transport, timeout_s=100.0) == [IN_GRAPHS, IN_GRAPHS]


# Whole training steps


def loss_and_backward(ddp: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss: Tensor = ddp(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def loop(ddp: Any, optimizer: Any, x: Tensor) -> Tensor:
    for part in x.split(1):
        loss = loss_and_backward(ddp, optimizer, part)
    return loss


def accumulated(ddp: Any, optimizer: Any, x: Tensor) -> Tensor:
    with ddp.no_sync():
        ddp(x[:1]).square().mean().backward()
    return loss_and_backward(ddp, optimizer, x[1:])


def clipped(ddp: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss: Tensor = ddp(x).square().mean()
    torch.autograd.backward([loss])
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


STEPS_OF_USERS = {f.__name__: f for f in (loss_and_backward, loop, accumulated, clipped)}
# `accumulated` calls the first, and its graphs have those of `loop`.
SAMPLE = ("accumulated", "clipped")


def trained(
    rank: int, world_size: int, name: str, transport: str, backends: tuple[str | None, ...]
) -> list[dict[str, Tensor]]:
    """Parameters after steps that are compiled by each of these; None: not compiled."""
    warnings.simplefilter("ignore")
    found = []
    for backend in backends:
        torch._dynamo.reset()
        ddp = wrapped(transport)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        run: Any = STEPS_OF_USERS[name]
        if backend is not None:
            run = torch.compile(run, backend=backend, dynamic=name == "loop")
        for step in range(STEPS):
            run(ddp, optimizer, rand(2, WIDTH, seed=2 * step + rank, dtype=torch.float32))
        found.append({key: value.clone() for key, value in ddp.state_dict().items()})
    return found


@pytest.mark.parametrize("transport", ["shm", pytest.param("c10d", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n not in SAMPLE)) for n in STEPS_OF_USERS],
)
def test_compiled_steps_train_as_others(ranks: RankPool, name: str, transport: str) -> None:
    backends = (None, "eager", "aot_eager")
    for plain, *compiled in ranks.run(2, trained, name, transport, backends, timeout_s=100.0):
        for params in compiled:
            torch.testing.assert_close(params, plain)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STEPS_OF_USERS)
def test_steps_of_inductor_train_as_others(ranks: RankPool, name: str) -> None:
    for plain, compiled in ranks.run(2, trained, name, "shm", (None, "inductor"), timeout_s=600.0):
        torch.testing.assert_close(compiled, plain)


def test_a_full_graph_is_refused_with_advice() -> None:
    def run(group: Any) -> str:
        ddp = fddp.DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        step = torch.compile(lambda x: ddp(x).sum(), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
            step(torch.ones(1, 2))
        return str(raised.value)

    assert "compile the module before it is wrapped" in fddp.loopback(1, run)[0]
