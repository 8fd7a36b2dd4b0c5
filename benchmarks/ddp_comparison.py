"""torch's DDP, its `replicate`, and fddp side by side: `python -m benchmarks.ddp_comparison`.

Two ranks run each case with each of them: first derivatives by different means, unused parameters,
the bits of gradients, and the time of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate

import fddp
from benchmarks.measure import Series, measure, ratio, rounds_s
from benchmarks.models import WORKLOADS
from benchmarks.scripts import options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages

DDP, REPLICATE, WRAPPER, GRAD_SYNC = "DDP", "replicate", "fddp's DDP", "GradSync"
_WORKLOADS = ("mlp", "small")
_WARM_UP, _STEPS = 4, 5
_TEXT = 34  # characters of an error's text

Params = dict[str, Tensor]


class Results(NamedTuple):
    """Outcome of each case, and times of steps by workload, both by contestant."""

    cases: dict[str, dict[str, str]]
    steps: dict[str, dict[str, Series]]


def _replicated(module: nn.Module) -> nn.Module:
    replicate(module)
    return module


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    DDP: nn.parallel.DistributedDataParallel,
    REPLICATE: _replicated,
    WRAPPER: fddp.DistributedDataParallel,
}


class Net(nn.Module):
    """A small network; a layer of it is unused."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.unused = nn.Linear(2, 1).double() if has_unused else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.layers(x).square().mean()
        return loss


def main() -> None:
    """Measures and prints; about a minute."""
    args = options(__doc__, rounds=9).parse_args()
    results = launch(2, run_rank, args.rounds)[0]
    values = {"cases": results.cases, "steps": rounds_s(results.steps)}
    publish([_cases_table(results.cases), _times_table(results.steps)], [], values, args.json)


def run_rank(rounds: int, workloads: Iterable[str] = _WORKLOADS) -> Results:
    """All cases and times; a collective call."""
    x = torch.randn(5, 3, dtype=torch.float64, generator=_seeded(dist.get_rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # local gradients, for one: they are what is looked for
        cases = {title: _outcomes(case, x) for title, case in _CASES.items()}
    with Stages(shown=dist.get_rank() == 0) as stages:
        steps = {name: _times(name, rounds, stages) for name in workloads}
    return Results(cases, steps)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _outcomes(case: Callable[[str, Tensor], str], x: Tensor) -> dict[str, str]:
    """Outcome by contestant; the type and the beginning of the error if it fails."""
    found = {}
    for name in (*WRAPPED, GRAD_SYNC):
        try:
            found[name] = case(name, x)
        except Exception as error:
            text = str(error).splitlines()[0]
            found[name] = f"{type(error).__name__}: {text[:_TEXT].rstrip()} ..."
        dist.barrier()
    return found


# Cases


def _judged(grads: Iterable[Tensor], x: Tensor) -> str:
    """Compare gradients with those of this rank's loss, and with their mean over ranks."""
    net = Net()
    net(x).backward()
    local = [_grad(parameter) for parameter in net.parameters()]
    mean = fddp.pmean(local)
    for wanted, verdict in ((mean, "mean"), (local, "this rank's own")):
        if all(torch.allclose(a, b) for a, b in zip(grads, wanted, strict=True)):
            return verdict
    return "other values"


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def _functional(name: str) -> tuple[Callable[[Params, Tensor], Tensor], Params]:
    """A loss function and its parameters; for `GradSync`, of a plain module."""
    module = Net() if name == GRAD_SYNC else WRAPPED[name](Net())
    params = {key: value.detach() for key, value in module.named_parameters()}
    return lambda params, x: torch.func.functional_call(module, params, (x,)), params


def backward(name: str, x: Tensor) -> str:
    """Gradients of `loss.backward()`; of a step for `GradSync`."""
    if name == GRAD_SYNC:
        loss_fn, params = _functional(name)
        with fddp.GradSync(params) as sync:
            return _judged(sync.value_and_grad(loss_fn)(params, x)[1].values(), x)
    model = WRAPPED[name](Net())
    model(x).backward()
    return _judged(map(_grad, model.parameters()), x)


def autograd_grad(name: str, x: Tensor) -> str:
    """Gradients of `torch.autograd.grad`."""
    module = Net()
    model = module if name == GRAD_SYNC else WRAPPED[name](module)
    grads = torch.autograd.grad(model(x), list(module.parameters()))
    return _judged(fddp.pmean(grads) if name == GRAD_SYNC else grads, x)


def func_grad(name: str, x: Tensor) -> str:
    """Gradients of `torch.func.grad`, which `sync(grads)` averages."""
    loss_fn, params = _functional(name)
    grads = torch.func.grad(loss_fn)(params, x)
    if name == GRAD_SYNC:
        with fddp.GradSync(params) as sync:
            grads = sync(grads)
    return _judged(grads.values(), x)


def jvp(name: str, x: Tensor) -> str:
    """A directional derivative in the parameters, of `pmean` of the loss for fddp's functions."""
    loss_fn, params = _functional(name)
    ones = {key: torch.ones_like(value) for key, value in params.items()}
    ours = name == GRAD_SYNC
    fn = (lambda p: fddp.pmean(loss_fn(p, x))) if ours else (lambda p: loss_fn(p, x))
    slope: Tensor = torch.func.jvp(fn, (params,), (ones,))[1]
    net = Net()
    net(x).backward()
    own = torch.stack([_grad(parameter).sum() for parameter in net.parameters()]).sum()
    if torch.allclose(slope, fddp.pmean(own)):
        return "mean"
    return "this rank's own" if torch.allclose(slope, own) else "other values"


def unused(name: str, x: Tensor) -> str:
    """Two steps of a module with an unused parameter, without an option for that."""
    module = Net(has_unused=True)
    if name == GRAD_SYNC:
        params = dict(module.named_parameters())
        with fddp.GradSync(params) as sync:
            step = sync.value_and_grad(lambda p, x: torch.func.functional_call(module, p, (x,)))
            grads = [step(params, x)[1] for _ in range(2)][1]
        return f"works, gradient {grads['unused.weight']}"
    model = WRAPPED[name](module)
    for _ in range(2):
        model(x).backward()
    assert module.unused is not None
    return f"works, gradient {module.unused.weight.grad}"


def bits(name: str, x: Tensor) -> str:
    """Gradients in the third step, in float32, against those of torch's class."""
    steps = [_third_step(of, x.float()) for of in (DDP, name)]
    same = all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
    return "DDP's" if same else "others"


def _third_step(name: str, x: Tensor) -> list[Tensor]:
    """Gradients, over gloo."""
    net = Net().float()
    if name == GRAD_SYNC:
        params = dict(net.named_parameters())
        with fddp.GradSync(params, transport="c10d") as sync:
            step = sync.value_and_grad(lambda p, x: torch.func.functional_call(net, p, (x,)))
            return list([step(params, x)[1] for _ in range(3)][2].values())
    if name == WRAPPER:
        model: nn.Module = fddp.DistributedDataParallel(net, transport="c10d")
    else:
        model = WRAPPED[name](net)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    return list(map(_grad, net.parameters()))


_CASES: dict[str, Callable[[str, Tensor], str]] = {
    "loss.backward()": backward,
    "torch.autograd.grad": autograd_grad,
    "torch.func.grad": func_grad,
    "torch.func.jvp": jvp,
    "unused parameter, no option": unused,
    "bits over gloo": bits,
}


# Times


def _times(name: str, rounds: int, stages: Stages) -> dict[str, Series]:
    workload = WORKLOADS[name]
    stages.begin(workload.title, rounds)
    batch = workload.batch(dist.get_rank())
    steps: dict[str, Callable[[], object]] = {}
    for contestant, wrap in {**WRAPPED, WRAPPER + ", gloo": _over_gloo}.items():
        steps[contestant] = _step_of(wrap(workload.build()), batch)
    params, loss_fn, _ = workload.to_function(workload.build())
    with (
        fddp.GradSync(params) as sync,
        fddp.GradSync(params, transport="c10d") as over_gloo,
    ):
        for contestant, one in ((GRAD_SYNC, sync), (GRAD_SYNC + ", gloo", over_gloo)):
            steps[contestant] = _bound(one.value_and_grad(loss_fn), params, batch)
        for step in steps.values():
            for _ in range(_WARM_UP):
                step()
        return measure(steps, rounds, _STEPS, stages.advance)


def _over_gloo(module: nn.Module) -> nn.Module:
    return fddp.DistributedDataParallel(module, transport="c10d")


def _step_of(model: nn.Module, batch: Tensor) -> Callable[[], object]:
    def step() -> None:
        model.zero_grad()
        model(batch).backward()

    return step


def _bound(step: Callable[..., Any], params: Any, batch: Tensor) -> Callable[[], object]:
    grads: Any = None

    def bound() -> None:
        nonlocal grads  # the old gradients live until the new ones take their name
        _, grads = step(params, batch)

    return bound


# Tables


def _cases_table(cases: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table(title="Two ranks on the CPU", box=box.SIMPLE_HEAVY, pad_edge=False)
    for heading in ("", DDP, REPLICATE, WRAPPER, GRAD_SYNC):
        table.add_column(heading)
    for title, outcomes in cases.items():
        table.add_row(title, *outcomes.values())
    return table


def _times_table(steps: Mapping[str, Mapping[str, Series]]) -> Table:
    table = Table(title="Steps", box=box.SIMPLE_HEAVY, pad_edge=False)
    for heading in ("", "", "ms", "ratio to DDP"):
        table.add_column(heading)
    for name, series in steps.items():
        for contestant, of_contestant in series.items():
            against = ratio(of_contestant, series[DDP]).text()
            table.add_row(name, contestant, f"{of_contestant.median_s * 1e3:.1f}", against)
    return table


if __name__ == "__main__":
    main()
