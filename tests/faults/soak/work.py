"""Work of a rank in each turn, on a model of many kinds of leaves."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.tree.pytree import flatten
from tests.faults.soak.script import options, own_chance

if TYPE_CHECKING:
    import random

    from tests.faults.soak.script import Turn

HOOKS = (
    fddp.hooks.top_k(0.25),
    fddp.hooks.error_feedback(fddp.hooks.int8()),
    fddp.hooks.power_sgd(2),
    fddp.hooks.fp16_compress,
    fddp.hooks.chain(fddp.hooks.bf16_compress, fddp.hooks.top_k(0.5)),
)
_SPARSE = "table"
_RATE = 0.01


class TurnFailedError(Exception):
    """Raised by a loss function, on purpose."""


def make_params(seed: int) -> dict[str, Tensor]:
    """Dense, sparse, strided, empty, 0-d and half leaves, one too large for one piece."""
    made = torch.Generator().manual_seed(seed)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=made, dtype=dtype)

    layers = {f"layer{i}": rand(16, 16) for i in range(6)}
    return {
        **layers,
        _SPARSE: rand(40, 8),
        "conv": rand(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "half": rand(33).bfloat16(),
        "double": rand(7, dtype=torch.float64),
        "scalar": rand(),
        "empty": rand(0, 3),
        "large": rand(300, 200),
    }


class Layers(nn.Module):
    """Applies the layers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: Tensor, layers: list[int]) -> Tensor:
        for layer in layers:
            x = torch.tanh(self.layers[layer](x))
        return x


def make_module(seed: int) -> nn.Module:
    """For the wrapper."""
    torch.manual_seed(seed)
    return Layers()


def loss_of(params: dict[str, Tensor], chance: random.Random) -> Tensor:
    """Uses some of the leaves, in an order and with numbers of this rank's own."""
    names = [name for name in params if chance.random() < 0.8] or ["layer0"]
    chance.shuffle(names)
    total = torch.zeros(())
    for name in names:
        leaf, factor = params[name], chance.uniform(-2.0, 2.0)
        if name == _SPARSE:
            rows = torch.tensor([chance.randrange(40) for _ in range(5)])
            picked = F.embedding(rows, leaf, sparse=True)
            total = total + (factor * picked).sin().sum()
        elif name.startswith("layer") and chance.random() < 0.1:
            begin = torch.full((16,), factor, requires_grad=True)
            total = total + checkpoint(_layer, begin, leaf, use_reentrant=True).sum()
        else:
            total = total + (factor * leaf.float()).sin().sum()
    return total


def _layer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(weight @ x)


class Rig:
    """A rank's replicas, and what synchronises them. Making one is a collective call.

    Attributes:
        params: a replica, updated in every turn that gives gradients.
        module: another one, which is wrapped.
    """

    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        self._seed, self._rank, self._ranks = seed, rank, ranks
        self.params = fddp.broadcast(make_params(seed + rank))
        self.module = make_module(seed + rank)
        self._open(seed)

    def take(self, turn: Turn) -> None:
        """Does what a turn says."""
        getattr(self, f"turn_{turn.kind}")(turn, own_chance(self._seed, turn.number, self._rank))

    def digest(self) -> bytes:
        """Of all bits of both replicas."""
        found = hashlib.sha256()
        state = self.module.state_dict()
        for leaf in flatten((self.params, dict(state)))[0]:
            assert isinstance(leaf, Tensor)
            found.update(leaf.detach().contiguous().flatten().view(torch.uint8).numpy())
        return found.digest()

    def settle(self) -> None:
        """Opens all anew as at the start, so that what is open can be compared with earlier."""
        self.close()
        self._open(self._seed)

    def close(self) -> None:
        """Closes all that is open."""
        self._sync.close()
        self._hooked.close()
        self._sharded.close()

    # Opening

    def _open(self, choice: int) -> None:
        self._sync = fddp.GradSync(self.params, sparse=[_SPARSE], **options(choice))
        self._sharded = fddp.GradSync(
            self._dense(self.params), algorithm="reduce_scatter", **options(choice + 1)
        )
        self._open_hooked(choice)
        self._wrapped = fddp.DistributedDataParallel(
            self.module,
            bucket_cap_mb=0.002,
            find_unused_parameters=True,
            gradient_as_bucket_view=choice % 2 == 0,
        )

    def _open_hooked(self, choice: int) -> None:
        arguments = {**options(choice + 2), "deterministic": False}
        hook = HOOKS[choice % len(HOOKS)]
        self._hooked = fddp.GradSync(self._dense(self.params), hook=hook, **arguments)
        self._states = self._hooked.init_state()

    def _dense(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Without the leaf whose gradients are sparse, which hooks and shards leave alone."""
        return {name: leaf for name, leaf in tree.items() if name != _SPARSE}

    def _descend(self, grads: dict[str, Any]) -> None:
        def moved(param: Tensor, grad: Tensor | None) -> Tensor:
            if grad is None:
                return param
            step = grad.to_dense() if grad.is_sparse else grad
            # Bounded, so that no run of turns leads out of the finite numbers.
            return (0.999 * param - _RATE * step.clamp(-10.0, 10.0)).to(param.dtype)

        self.params = {name: moved(param, grads.get(name)) for name, param in self.params.items()}

    # Turns

    def turn_differentiate(self, turn: Turn, chance: random.Random) -> None:
        step = self._sync.value_and_grad(
            loss_of, with_info=turn.choice % 3 == 0, weight_fn=lambda *_: turn.weights[self._rank]
        )
        _, grads, *_ = step(self.params, chance)
        self._descend(grads)
        if turn.choice % 5 == 0:
            self._sync.donate(grads)

    def turn_sync(self, turn: Turn, chance: random.Random) -> None:
        grads = {**self._local_grads(chance), _SPARSE: None}
        self._descend(self._sync(grads, weight=turn.weights[self._rank]))

    def turn_reduce_in_place(self, turn: Turn, chance: random.Random) -> None:
        grads = {**self._local_grads(chance), _SPARSE: None}
        self._descend(self._sync.reduce_(grads))

    def turn_compress(self, turn: Turn, chance: random.Random) -> None:
        grads = self._local_grads(chance)
        mean, self._states = self._hooked.update(
            grads, self._states, weight=turn.weights[self._rank]
        )
        self._descend(mean)

    def turn_wrapped(self, turn: Turn, chance: random.Random) -> None:
        layers = [layer for layer in range(4) if chance.random() < 0.7] or [0]
        x = torch.full((2, 16), chance.uniform(-1.0, 1.0))
        self._wrapped(x, layers).square().mean().backward()
        with torch.no_grad():
            for param in self.module.parameters():
                if param.grad is not None:
                    param.add_(param.grad, alpha=-_RATE)
                    param.grad = None

    def turn_uneven(self, turn: Turn, chance: random.Random) -> None:
        step = self._sync.value_and_grad(loss_of)
        for batch in fddp.uneven([chance] * turn.lengths[self._rank], self._sync):
            _, grads = step(self.params, batch)
            self._descend(grads)

    def turn_shards(self, turn: Turn, chance: random.Random) -> None:
        shards = self._sharded.reduce_scatter(self._local_grads(chance))
        self._descend(self._sharded.all_gather(shards))

    def turn_operators(self, turn: Turn, chance: random.Random) -> None:
        def loss(layer: Tensor) -> Tensor:
            return fddp.pmean((fddp.sync_on_backward(layer) * chance.random()).sin().sum())

        self._descend({"layer0": torch.func.grad(loss)(self.params["layer0"])})

    def turn_broadcast(self, turn: Turn, chance: random.Random) -> None:
        own = {**self.params, "layer1": self.params["layer1"] * chance.uniform(0.9, 1.1)}
        self.params = fddp.broadcast(own, src=turn.culprit)

    def turn_fail(self, turn: Turn, chance: random.Random) -> None:
        def failing(params: dict[str, Tensor], chance: random.Random) -> Tensor:
            if self._rank == turn.culprit:
                raise TurnFailedError(f"in turn {turn.number}")
            return loss_of(params, chance)

        try:
            self._sync.value_and_grad(failing)(self.params, chance)
        except (TurnFailedError, fddp.PeerError):
            return
        raise AssertionError(f"turn {turn.number} went through on rank {self._rank}")

    def turn_replan(self, turn: Turn, chance: random.Random) -> None:
        plan = self._sync.plan
        # Not that of all leaves: what is in no bucket stays there.
        order = list(plan.order)
        own_chance(self._seed, turn.number, 0).shuffle(order)
        self._sync._engine.set_plan(fddp.rebucket(plan, order))

    def turn_change_hook(self, turn: Turn, chance: random.Random) -> None:
        hook = [None, *HOOKS][turn.choice % (1 + len(HOOKS))]
        self._wrapped.steps.engine.set_hook(hook)
        self._hooked.close()
        self._open_hooked(turn.choice)

    def turn_reopen(self, turn: Turn, chance: random.Random) -> None:
        self.close()
        self._open(turn.choice)

    def turn_tune(self, turn: Turn, chance: random.Random) -> None:
        step = self._sync.value_and_grad(loss_of)
        self._sync.tune(step, self.params, chance, rounds=1)

    def _local_grads(self, chance: random.Random) -> dict[str, Any]:
        """Dense gradients of this rank's own; None of leaves that it does not use."""
        dense = self._dense(self.params)
        leaves = [leaf.detach().requires_grad_() for leaf in dense.values()]
        loss_of(dict(zip(dense, leaves, strict=True)), chance).backward()
        return {name: leaf.grad for name, leaf in zip(dense, leaves, strict=True)}
