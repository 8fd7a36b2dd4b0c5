"""Backward passes that leave local gradients in wrapped parameters, and those that only seem to."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.models import rand
from tests.support.ranks import RankPool
from tests.support.wrapped_net import DDP

ALL = ("first.bias", "first.weight", "last.bias", "last.weight")


class Model(nn.Module):
    """Two layers, with a forward, a method that is not forward, and checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant: bool | None = None  # of the checkpoint around the first layer
        self.kept: Tensor  # of the last forward pass

    def forward(self, x: Tensor, leave_out_last: bool = False) -> Tensor:
        if leave_out_last:
            return self.first(x)
        if self.reentrant is None:
            return self.method(x)
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))

    def method(self, x: Tensor) -> Tensor:
        self.kept = self.first(x)
        return self.last(self.kept)


def batch() -> Tensor:
    return torch.ones(2, 3, requires_grad=True)


def step(ddp: Any) -> None:
    ddp(batch()).sum().backward()


# Programs that leave local gradients in the named parameters


def module_of_the_wrapper(ddp: Any) -> tuple[str, ...]:
    ddp.module(batch()).sum().backward()
    return ALL


def method_of_the_module(ddp: Any) -> tuple[str, ...]:
    step(ddp)
    ddp.module.method(batch()).sum().backward()
    return ALL


def submodule_kept_elsewhere(ddp: Any) -> tuple[str, ...]:
    head = ddp.module.last
    step(ddp)
    head(batch()).sum().backward()
    return ("last.bias", "last.weight")


def functional_call_of_the_module(ddp: Any) -> tuple[str, ...]:
    own = dict(ddp.module.named_parameters())
    functional_call(ddp.module, own, (batch(),)).sum().backward()
    return ALL


def rollout_and_then_the_module(ddp: Any) -> tuple[str, ...]:
    with torch.no_grad():
        ddp(batch())
    ddp.module(batch()).sum().backward()
    return ALL


def second_forward_not_wrapped(ddp: Any) -> tuple[str, ...]:
    wrapped, bare = ddp(batch()), ddp.module(batch())
    wrapped.sum().backward()
    bare.sum().backward()
    return ALL


def second_loss_on_the_parameters(ddp: Any) -> tuple[str, ...]:
    step(ddp)
    ddp.module.first.weight.square().sum().backward()
    return ("first.weight",)


def alternating_wrappers(ddp: Any) -> tuple[str, ...]:
    """A generator and a discriminator, which the generator's loss calls without its wrapper."""
    generator = DDP(nn.Linear(3, 3), process_group=ddp.process_group, local_gradients="raise")
    ddp(generator(batch()).detach()).sum().backward()
    ddp.module(generator(batch())).sum().backward()
    return ALL


def tensor_kept_by_the_module(ddp: Any) -> tuple[str, ...]:
    ddp.module.method(batch())
    kept = ddp.module.kept
    step(ddp)
    (kept + ddp.module.method(batch()).sum()).sum().backward()
    return ALL


def checkpointed_method(ddp: Any) -> tuple[str, ...]:
    checkpoint(ddp.module.method, batch(), use_reentrant=False).sum().backward()
    return ALL


def reentrant_checkpoint(ddp: Any) -> tuple[str, ...]:
    checkpoint(ddp.module.method, batch(), use_reentrant=True).sum().backward()
    return ALL


def last_micro_batch_without_the_wrapper(ddp: Any) -> tuple[str, ...]:
    with ddp.no_sync():
        step(ddp)
    ddp.module(batch()).sum().backward()
    return ALL


def explicit_inputs(ddp: Any) -> tuple[str, ...]:
    ddp.module(batch()).sum().backward(inputs=[ddp.module.first.bias])
    return ("first.bias",)


def with_an_output_of_no_weight(ddp: Any) -> tuple[str, ...]:
    with ddp.no_sync():
        out = ddp(batch())
    (ddp.module(batch()).sum() + 0.0 * out.sum()).backward()
    return ALL


LOCAL = [
    with_an_output_of_no_weight,
    module_of_the_wrapper,
    method_of_the_module,
    submodule_kept_elsewhere,
    functional_call_of_the_module,
    rollout_and_then_the_module,
    second_forward_not_wrapped,
    second_loss_on_the_parameters,
    alternating_wrappers,
    tensor_kept_by_the_module,
    checkpointed_method,
    reentrant_checkpoint,
    last_micro_batch_without_the_wrapper,
    explicit_inputs,
]


# Programs without such gradients, or that ask for them


def micro_batches(ddp: Any) -> None:
    with ddp.no_sync():
        step(ddp)
    step(ddp)


def forward_alone_in_no_sync(ddp: Any) -> None:
    with ddp.no_sync():
        out = ddp(batch())
    out.sum().backward()


def backward_alone_in_no_sync(ddp: Any) -> None:
    out = ddp(batch())
    with ddp.no_sync():
        out.sum().backward()


def module_in_no_sync(ddp: Any) -> None:
    with ddp.no_sync():
        ddp.module(batch()).sum().backward()


def reentrant_in_no_sync(ddp: Any) -> None:
    ddp.module.reentrant = True
    with ddp.no_sync():
        out = ddp(batch())
    out.sum().backward()


def several_passes_of_one_forward(ddp: Any) -> None:
    out = ddp(batch()).sum()
    out.backward(retain_graph=True)
    (out + ddp.module.first.weight.sum()).backward()


def gradient_before_the_output(ddp: Any) -> None:
    """A second pass whose first gradient, which only rank 1 had in the first, arrives before it
    reaches the output by which it takes a step."""
    out = ddp(batch(), ddp.process_group.rank == 0).sum()
    out.backward(retain_graph=True)
    (out + ddp.module.last.weight.sum()).backward()


def checkpoints(ddp: Any) -> None:
    for ddp.module.reentrant in (False, True):
        step(ddp)


def tensor_kept_by_the_forward(ddp: Any) -> None:
    ddp(batch()).sum().backward(retain_graph=True)
    ddp.module.kept.sum().backward()


def gradients_of_inputs(ddp: Any) -> None:
    x = batch()
    torch.autograd.grad(ddp.module(x).sum(), x)
    torch.autograd.grad(ddp.module(x).sum(), ddp.module.first.weight)


def other_tensors(ddp: Any) -> None:
    own = {name: p.detach().requires_grad_() for name, p in ddp.module.named_parameters()}
    functional_call(ddp.module, own, (batch(),)).sum().backward()
    torch.func.grad(lambda p: functional_call(ddp.module, p, (batch(),)).sum())(own)


def loss_elsewhere_after_forward(ddp: Any) -> None:
    """Gradients from a forward pass on belong to its step, wherever they come from."""
    ddp(batch())
    ddp.module(batch()).sum().backward()


def failed_pass(ddp: Any) -> None:
    out = ddp.module(batch())
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()


def hooks_removed(ddp: Any) -> None:
    ddp._remove_autograd_hooks()
    ddp.module(batch()).sum().backward()


def output_that_is_a_parameter(ddp: Any) -> None:
    ddp.module.method = lambda x: ddp.module.last.weight
    with ddp.no_sync():
        out = ddp(batch())
    out.sum().backward()


def gradient_before_an_output_that_is_a_parameter(ddp: Any) -> None:
    """No node of the forward pass shows beforehand that the pass reaches an output."""
    ddp.module.method = lambda x: ddp.module.last.weight
    out = ddp(batch()).sum()
    out.backward(retain_graph=True)
    (out + ddp.module.first.weight.sum()).backward()


def another_wrapper_of_the_module(ddp: Any) -> None:
    step(DDP(ddp.module, process_group=ddp.process_group, local_gradients="raise"))


def frozen(ddp: Any) -> None:
    ddp.module.requires_grad_(False)
    ddp.module(batch()).sum().backward()


MEANT = [
    micro_batches,
    forward_alone_in_no_sync,
    backward_alone_in_no_sync,
    module_in_no_sync,
    reentrant_in_no_sync,
    several_passes_of_one_forward,
    gradient_before_the_output,
    checkpoints,
    tensor_kept_by_the_forward,
    gradients_of_inputs,
    other_tensors,
    loss_elsewhere_after_forward,
    failed_pass,
    hooks_removed,
    output_that_is_a_parameter,
    gradient_before_an_output_that_is_a_parameter,
    another_wrapper_of_the_module,
    frozen,
]


def named(program: Callable[..., object]) -> str:
    return program.__name__


def change(ddp: Any) -> None:
    with torch.no_grad():
        for param in ddp.parameters():
            param.add_(1.0)


@pytest.mark.parametrize("program", LOCAL, ids=named)
def test_local_gradients_raise_or_warn_where_used(
    program: Callable[[Any], tuple[str, ...]],
) -> None:
    def run(group: Any, policy: Any) -> tuple[str, ...]:
        ddp = DDP(Model(), process_group=group, local_gradients=policy)
        names = program(ddp)
        change(ddp)
        ddp(batch())
        return names

    with pytest.raises(fddp.errors.ReplicationError, match="rank 0: a backward pass") as raised:
        fddp.loopback(1, run, "raise")
    assert raised.value.path in ALL
    fddp.loopback(1, run, "allow")  # without a warning
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        (names,) = fddp.loopback(1, run, "warn")
    (warning,) = seen
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    assert f"gradients in {len(names)} of 4 parameters" in str(warning.message)
    assert f"DistributedDataParallel ({shown}): it came through no output" in str(warning.message)
    assert warning.filename == __file__


def accumulation(ddp: Any) -> None:
    ddp.module(batch()).sum().backward()
    step(ddp)


def attack_on_the_input(ddp: Any) -> None:
    for _ in range(2):
        ddp.module(batch()).sum().backward()
        ddp.zero_grad()
    step(ddp)


def adversary(ddp: Any) -> None:
    generator = DDP(nn.Linear(3, 3), process_group=ddp.process_group)
    ddp.module(generator(batch())).sum().backward()
    change(generator)
    ddp.zero_grad(set_to_none=False)
    step(ddp)


@pytest.mark.parametrize("program", [accumulation, attack_on_the_input, adversary], ids=named)
def test_harmless_passes_do_not_warn(program: Callable[[Any], None]) -> None:
    def run(group: Any) -> None:
        ddp = DDP(Model(), process_group=group)
        for _ in range(2):
            program(ddp)
            change(ddp)
            ddp.zero_grad()

    fddp.loopback(2, run)


def write_data(ddp: Any) -> None:
    for param in ddp.parameters():
        param.data -= 0.1 * param.grad


def fused(ddp: Any) -> None:
    torch.optim.SGD(ddp.parameters(), lr=0.1, fused=True).step()


@pytest.mark.parametrize("use", [write_data, fused], ids=named)
def test_changes_without_a_version_are_seen(use: Callable[[Any], None]) -> None:
    def run(group: Any) -> None:
        ddp = DDP(Model(), process_group=group)
        module_of_the_wrapper(ddp)
        use(ddp)
        ddp.zero_grad()
        ddp(batch())

    with pytest.warns(UserWarning, match="no step averaged them before parameters changed"):
        fddp.loopback(1, run)


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_wrappers_without_a_communicator_report(policy: Any) -> None:
    """Two passes, the first one used; no forward of the wrapper."""

    def run(group: Any) -> None:
        ddp = DDP(Model(), process_group=group, init_sync=False, local_gradients=policy)
        for _ in range(2):
            module_of_the_wrapper(ddp)
            change(ddp)

    if policy == "warn":
        with pytest.warns(UserWarning, match="gradients in 4 of 4 parameters"):
            fddp.loopback(1, run)
    else:
        with pytest.raises(fddp.errors.ReplicationError, match="gradients in 4 of 4 parameters"):
            fddp.loopback(1, run)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
@pytest.mark.parametrize("program", MEANT, ids=named)
def test_other_passes_are_not_reported(program: Callable[[Any], None]) -> None:
    def run(group: Any) -> None:
        options = {"local_gradients": "raise", "find_unused_parameters": True}
        program(DDP(Model(), process_group=group, **options))

    fddp.loopback(2, run)


def test_each_line_warns_once() -> None:
    def run(group: Any) -> None:
        ddp = DDP(Model(), process_group=group)
        for _ in range(3):
            module_of_the_wrapper(ddp)
            method = ddp.module.method(batch())
            method.sum().backward()
            change(ddp)
            step(ddp)

    with pytest.warns(UserWarning, match="Further ones of this line are not reported") as seen:
        fddp.loopback(1, run)
    assert len({warning.lineno for warning in seen}) == len(seen) == 2


def test_an_error_leaves_the_wrapper_usable() -> None:
    def run(group: Any) -> list[Any]:
        torch.manual_seed(0)
        ddp = DDP(Model(), process_group=group, local_gradients="raise")
        for _ in range(2):
            with pytest.raises(fddp.errors.ReplicationError):
                module_of_the_wrapper(ddp)
        ddp.zero_grad()
        (ddp(batch()).sum() * (1.0 + group.rank)).backward()
        return [p.grad for p in ddp.module.parameters()]

    one, two = fddp.loopback(2, run)
    torch.testing.assert_close(one, two, rtol=0, atol=0)


# Generated programs

FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "wrapper": lambda ddp, x: ddp(x),
    "wrapper, a part": lambda ddp, x: ddp(x, True),
    "module": lambda ddp, x: ddp.module(x),
    "method": lambda ddp, x: ddp.module.method(x),
    "submodule": lambda ddp, x: ddp.module.last(x),
    "checkpoint": lambda ddp, x: checkpoint(ddp, x, use_reentrant=False),
    "kept": lambda ddp, x: (ddp(x), ddp.module.kept)[1],
    "parameter": lambda ddp, x: ddp.module.last.weight * x.sum(),
}


class Forward(NamedTuple):
    """A forward pass, whose output later passes may use."""

    name: str
    quiet: bool  # within no_sync


class Backward(NamedTuple):
    """A backward pass through some of the outputs so far."""

    of: frozenset[int]
    quiet: bool


def passes() -> st.SearchStrategy[list[Forward | Backward]]:
    forward = st.builds(Forward, st.sampled_from(sorted(FORWARDS)), st.booleans())
    some = st.frozensets(st.integers(0, 3), min_size=1, max_size=2)
    return st.lists(forward | st.builds(Backward, some, st.booleans()), min_size=2, max_size=10)


def reported(group: Any, program: list[Forward | Backward]) -> list[tuple[bool, bool, list[Any]]]:
    """For each backward pass whether it raised, whether it may be local, and its gradients."""
    torch.manual_seed(0)
    ddp = DDP(Model(), process_group=group, local_gradients="raise", find_unused_parameters=True)
    outputs: list[tuple[Tensor, bool]] = []
    found = []
    for number, item in enumerate(program):
        with ddp.no_sync() if item.quiet else contextlib.nullcontext():
            if isinstance(item, Forward):
                x = rand(2, 3, seed=2 * number + group.rank, dtype=torch.float32).requires_grad_()
                is_seen = item.name.startswith(("wrapper", "checkpoint"))
                outputs.append((FORWARDS[item.name](ddp, x), item.quiet and is_seen))
                continue
            used = [outputs[i] for i in sorted(item.of) if i < len(outputs)]
            if not used:
                continue
            ddp.zero_grad()
            raised = False
            try:
                loss = torch.stack([out.square().mean() for out, _ in used]).sum()
                loss.backward(retain_graph=True)
            except fddp.errors.ReplicationError:
                raised = True
            may_be_local = item.quiet or any(quiet for _, quiet in used)
            found.append((raised, may_be_local, [p.grad for p in ddp.module.parameters()]))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
@given(program=passes())
def test_generated_passes_raise_if_they_leave_different_gradients(program: Any) -> None:
    for one, two in zip(*fddp.loopback(2, reported, program), strict=True):
        (raised, may_be_local, first), (also, _, second) = one, two
        try:
            torch.testing.assert_close(first, second, rtol=1e-6, atol=0)
            differ = False
        except AssertionError:
            differ = True
        assert raised == also == (differ and not may_be_local)


def extra_forward_on_a_rank(rank: int, world_size: int, buffers: bool) -> str:
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) if buffers else Model()
    ddp = DDP(model, local_gradients="raise")
    step(ddp)
    try:
        with ddp.in_step():
            if rank == 1:
                ddp.module(batch()).sum().backward()
            step(ddp)
    except fddp.FddpError as error:
        step(ddp)
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("buffers", [False, True])
def test_one_rank_alone_raises_on_every_rank(ranks: RankPool, buffers: bool) -> None:
    first, second = ranks.run(2, extra_forward_on_a_rank, buffers)
    said = "rank 1: a backward pass left this rank's own gradients in"
    assert second.startswith("ReplicationError")
    assert first.startswith("PeerError")
    assert said in second
    assert said in first
