"""Training steps for `check_equivalence`: those that do on n ranks what they do on one device, and
faults that are silent, each with its cause.

A step is written as on the pages: short names, no types.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch
import torchopt
from torch.func import grad, grad_and_value
from torch.nn.functional import cross_entropy, linear, mse_loss, normalize

import fddp
from tests.testing.replication.loops import descend, init_params, loss_fn, make_module

ROWS, IGNORED = 16, -100


class Case(NamedTuple):
    """A step with its inputs.

    Attributes:
        step: the step.
        state, batch: its inputs.
        options: of `check_equivalence`.
        cause: part of the error's text; "" if the step is right.
    """

    step: Callable[..., Any]
    state: tuple[Any, ...]
    batch: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    cause: str = ""

    @property
    def name(self) -> str:
        return self.step.__name__


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def rows():
    x = numbers(ROWS, 4)
    return x, x.sum(dim=1, keepdim=True) + 0.1 * x[:, :1] ** 2


def tokens():
    x, generator = numbers(ROWS, 5, 4), torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (ROWS, 5), generator=generator)
    lengths = torch.arange(ROWS) % 5
    return x, torch.where(torch.arange(5) > lengths[:, None], IGNORED, labels)


def sum_loss(params, batch):
    return loss_fn(params, batch) * len(batch[0])


def token_loss(params, batch, reduction="mean"):
    x, labels = batch
    return cross_entropy(
        (x @ params["w"]).flatten(0, 1), labels.flatten(), reduction=reduction, ignore_index=IGNORED
    )


def token_params():
    return {"w": 0.3 * numbers(4, 3)}


def module_with(make, **options):
    module = make_module(0)
    return module, make(module.parameters(), lr=0.01, **options)


# Right


def sum_over_count(params, x, y):
    grads = fddp.psum(grad(sum_loss)(params, (x, y)))
    count = fddp.psum(torch.tensor(len(x)))
    return descend(params, fddp.tree_map(lambda g: g / count, grads))


def weighted_sync(params, x, y):
    with fddp.GradSync(params) as sync:
        grads = sync(grad(loss_fn)(params, (x, y)), weight=len(x))
    return descend(params, grads)


def weighted_step(params, x, y):
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(loss_fn, weight_fn=lambda params, batch: len(batch[0]))
        _, grads = step(params, (x, y))
    return descend(params, grads)


def even_mean(params, x, y):
    return descend(params, fddp.pmean(grad(loss_fn)(params, (x, y))))


def wrapped_adamw(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    mse_loss(ddp(x), y).backward()
    optimizer.step()


def wrapped_with_weighted_loss(module, optimizer, x, y, group):
    share = len(x) * group.size / fddp.psum(torch.tensor(float(len(x))))
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    loss = mse_loss(ddp(x), y) * share
    loss.backward()
    optimizer.step()
    return fddp.pmean(loss.detach())


def by_hand_with_decay(module, optimizer, x, y):
    optimizer.zero_grad()
    mse_loss(module(x), y, reduction="sum").backward()
    total = fddp.psum(torch.tensor(len(x)))
    for p, g in zip(
        module.parameters(), fddp.psum([p.grad for p in module.parameters()]), strict=True
    ):
        p.grad = g / total
    optimizer.step()


def clip_after_the_mean(params, x, y):
    with fddp.GradSync(params) as sync:
        grads, info = sync(grad(loss_fn)(params, (x, y)), weight=len(x), with_info=True)
    factor = min(1.0, 0.1 / info.grad_norm)
    return descend(params, fddp.tree_map(lambda g: g * factor, grads))


def accumulated(params, micro_batches):
    with fddp.GradSync(params) as sync:
        total = fddp.tree_map(torch.zeros_like, params)
        for batch in micro_batches:
            total = fddp.tree_map(torch.add, total, grad(sum_loss)(params, batch))
        count = sum(len(x) for x, _ in micro_batches)
        mean = fddp.tree_map(lambda g: g / count, total)
        return descend(params, sync(mean, weight=count))


def micro_batches_of_two(params, x, y):
    total = fddp.tree_map(torch.zeros_like, params)
    for part in zip(x.split(2), y.split(2), strict=True):
        total = fddp.tree_map(torch.add, total, grad(sum_loss)(params, part))
    grads, count = fddp.psum((total, torch.tensor(float(len(x)))))
    return descend(params, fddp.tree_map(lambda g: g / count, grads))


def token_mean(params, x, labels):
    with fddp.GradSync(params) as sync:
        count = (labels != IGNORED).sum()
        loss, grads = (value := grad_and_value(token_loss)(params, (x, labels)))[1], value[0]
        grads = sync(grads, weight=float(count))
    total = fddp.psum(loss * count) / fddp.psum(count)
    return descend(params, grads), total


def mean_loss_with_derivative(params, x, y):
    def global_loss(params):
        total, count = fddp.psum(
            (sum_loss(fddp.sync_on_backward(params), (x, y)), torch.tensor(float(len(x))))
        )
        return total / count

    grads, loss = grad_and_value(global_loss)(params)
    return params, loss, grads


def objective_is_a_sum(params, x, y):
    grads = fddp.psum(grad(sum_loss)(params, (x, y)))
    return fddp.tree_map(lambda p, g: p - 1e-3 * g, params, grads)


def moving_average(params, average, step_number, x, y):
    params = weighted_sync(params, x, y)
    average = fddp.tree_map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    return params, average, step_number + 1


def counters(params, seen, x, y, group):
    params = weighted_sync(params, x, y)
    local = loss_fn(params, (x, y)).item()
    return params, seen + int(fddp.psum(torch.tensor(len(x)))), local, group.rank, "text"


def functional_adam(params, moments, x, y):
    grads = sum_gradients(params, x, y)
    updates, moments = torchopt.adam(1e-2).update(grads, moments, inplace=False)
    return torchopt.apply_updates(params, updates, inplace=False), moments


def sum_gradients(params, x, y):
    grads, count = fddp.psum((grad(sum_loss)(params, (x, y)), torch.tensor(float(len(x)))))
    return fddp.tree_map(lambda g: g / count, grads)


def written_in_place(params, x, y):
    loss = sum_loss(params, (x, y)) / fddp.psum(torch.tensor(float(len(x))))
    leaves = [tensor for layer in params["layers"] for tensor in layer.values()]
    grads = fddp.psum(list(torch.autograd.grad(loss, leaves)))
    with torch.no_grad():
        for leaf, g in zip(leaves, grads, strict=True):
            leaf -= 0.1 * g
    return fddp.psum(loss.detach())


def in_float32(params, x, y):
    grads = fddp.psum(grad(sum_loss)(params, (x.float(), y.float())))
    count = fddp.psum(torch.tensor(len(x)))
    return fddp.tree_map(lambda p, g: p.float() - 0.1 * g.float() / count, params, grads)


def normalised_by_all_ranks(params, x, y):
    total, squares, count = fddp.psum((x.sum(0), (x**2).sum(0), torch.tensor(float(len(x)))))
    mean = total / count
    x = (x - mean) / (squares / count - mean**2 + 1e-5).sqrt()
    return weighted_sync(params, x, y)


def contrastive(params, x, y):
    def loss(params):
        a = normalize(linear(x, params["w"]), dim=1)
        return -(a @ everyone(a).T).logsumexp(1).sum()

    def everyone(a):
        flat = torch.zeros(ROWS, a.shape[1], dtype=a.dtype)
        start = int(fddp.all_gather(torch.tensor(len(a)))[: group_rank()].sum())
        return fddp.psum(flat.index_put((torch.arange(start, start + len(a)),), a))

    def group_rank():
        return fddp.extend.resolve(None).rank

    grads = fddp.psum(grad(loss)(params))
    return descend(params, fddp.tree_map(lambda g: g / ROWS, grads))


def noise_after_the_sum(params, x, y):
    grads = sum_gradients(params, x, y)
    torch.manual_seed(7)
    return descend(params, fddp.tree_map(lambda g: g + 0.1 * torch.randn_like(g), grads))


def own_generator(params, generator, x, y):
    noise = torch.randn(4, generator=generator)
    params = weighted_sync(params, x + noise, y)
    return params, generator


def sharded(params, x, y, group):
    flat = grad(lambda p: ((x @ p - y[:, 0]) ** 2).sum())(params)
    rows = flat.new_zeros(-len(flat) % group.size)
    shard = fddp.reduce_scatter(torch.cat([flat, rows]), tiled=True)
    whole = fddp.all_gather(shard, tiled=True)[: len(flat)]
    return params - 0.1 * whole / fddp.psum(torch.tensor(len(x)))


def optax_adam(params, moments, x):
    grads = jax.grad(jax_loss)(params, x)
    with fddp.GradSync(params) as sync:
        grads = sync(grads, weight=len(x))
    updates, moments = optax.adam(1e-2).update(grads, moments)
    return optax.apply_updates(params, updates), moments


def jax_loss(params, x):
    return jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - x[:, :3]).mean()


def jitted(params, x, group):
    @jax.jit
    def step(params, x):
        grads = jax.grad(lambda p: jax_loss(p, x) * len(x))(params)
        grads, count = fddp.jax.psum((grads, jnp.full((), 1.0 * len(x))), group)
        return jax.tree.map(lambda p, g: p - 0.1 * g / count, params, grads)

    return step(params, x)


def virtual(params, batches):
    with fddp.GradSync(params, virtual_ranks=4) as sync:
        step = sync.value_and_grad(
            noisy_loss, weight_fn=lambda params, batch, virtual_rank: len(batch[0])
        )
        numbers = sync.virtual_batches(sync.carried_ranks)
        losses, grads = step(params, sync.virtual_batches(batches), numbers)
    return descend(params, grads), losses


def noisy_loss(params, batch, virtual_rank):
    with fddp.virtual_rng(0, virtual_rank):
        return loss_fn(params, (torch.nn.functional.dropout(batch[0], 0.3), batch[1]))


def jax_params():
    return {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.zeros(3)}


def leaves_that_require_grad():
    return fddp.tree_map(lambda p: p.clone().requires_grad_(), init_params(0))


EVEN = {"parts": ((1, 1), (1, 1, 1, 1))}


def right() -> list[Case]:
    """Right steps, with new inputs."""
    params, batch = init_params(0), rows()
    micro = [(x, y) for x, y in zip(batch[0].split(8), batch[1].split(8), strict=True)]
    jax_rows = jnp.asarray(numbers(ROWS, 4).numpy())
    moments = torchopt.adam(1e-2).init(params)
    simple = (
        *(sum_over_count, weighted_sync, weighted_step, clip_after_the_mean),
        *(micro_batches_of_two, mean_loss_with_derivative, objective_is_a_sum, in_float32),
        *(normalised_by_all_ranks, noise_after_the_sum),
    )
    return [
        *(Case(step, (params,), batch) for step in simple),
        Case(even_mean, (params,), batch, EVEN),
        Case(wrapped_adamw, module_with(torch.optim.AdamW), batch, EVEN),
        Case(wrapped_with_weighted_loss, module_with(torch.optim.AdamW), batch),
        Case(
            by_hand_with_decay,
            module_with(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
            batch,
        ),
        Case(accumulated, (params,), (micro,)),
        Case(token_mean, (token_params(),), tokens()),
        Case(moving_average, (params, copy.deepcopy(params), 0), batch),
        Case(counters, (params, 0), batch),
        Case(functional_adam, (params, moments), batch),
        Case(written_in_place, (leaves_that_require_grad(),), batch),
        Case(contrastive, ({"w": numbers(3, 4)},), batch),
        Case(own_generator, (params, torch.Generator().manual_seed(0)), batch),
        Case(sharded, (torch.ones(4),), batch),
        Case(optax_adam, (jax_params(), optax.adam(1e-2).init(jax_params())), (jax_rows,)),
        Case(jitted, (jax_params(),), (jax_rows,)),
        Case(virtual, (params,), (micro_batches(batch),), {"virtual_ranks": 4}),
    ]


def micro_batches(batch):
    return [*zip(*(tensor.split(4) for tensor in batch), strict=True)]


# Faults


def summed(params, x, y):
    return descend(params, fddp.psum(grad(loss_fn)(params, (x, y))))


def summed_with_adamw(module, optimizer, x, y):
    optimizer.zero_grad()
    mse_loss(module(x), y).backward()
    for p in module.parameters():
        p.grad = fddp.psum(p.grad)
    optimizer.step()


def sum_that_is_averaged(params, x, y):
    return descend(params, fddp.pmean(grad(sum_loss)(params, (x, y))))


def mean_of_means(params, x, y):
    with fddp.GradSync(params) as sync:
        _, grads = sync.value_and_grad(loss_fn)(params, (x, y))
    return descend(params, grads)


def mean_of_token_means(params, x, labels):
    grads = grad(token_loss)(params, (x, labels))
    with fddp.GradSync(params) as sync:
        grads = sync(grads, weight=len(x))
    return descend(params, grads)


def clipped_before_the_mean(params, x, y):
    grads = grad(loss_fn)(params, (x, y))
    leaves = [g for layer in grads["layers"] for g in layer.values()]
    norm = torch.stack([g.norm() for g in leaves]).norm()
    grads = fddp.tree_map(lambda g: g * (0.05 / norm).clamp(max=1.0), grads)
    with fddp.GradSync(params) as sync:
        return descend(params, sync(grads, weight=len(x)))


def clipped_module_before_the_mean(module, optimizer, x, y):
    optimizer.zero_grad()
    mse_loss(module(x), y).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    for p in module.parameters():
        p.grad = fddp.pmean(p.grad)
    optimizer.step()


def divided_twice(params, x, y, group):
    with fddp.GradSync(params) as sync:
        grads = sync(grad(loss_fn)(params, (x, y)), weight=len(x))
    return descend(params, fddp.tree_map(lambda g: g / group.size, grads))


def local_count(params, x, y):
    grads = fddp.psum(grad(sum_loss)(params, (x, y)))
    return descend(params, fddp.tree_map(lambda g: g / len(x), grads))


def local_token_count(params, x, labels):
    grads = fddp.psum(grad(token_loss)(params, (x, labels), "sum"))
    count = (labels != IGNORED).sum()
    return descend(params, fddp.tree_map(lambda g: g / count, grads))


def accumulation_not_divided(params, x, y):
    total = fddp.tree_map(torch.zeros_like, params)
    for part in zip(x.split(2), y.split(2), strict=True):
        total = fddp.tree_map(torch.add, total, grad(loss_fn)(params, part))
    return fddp.tree_map(lambda p, g: p - 0.01 * g, params, fddp.pmean(total))


def norm_counted_twice(params, x, y):
    grads = sum_gradients(params, x, y)
    squares = sum(g.square().sum() for layer in grads["layers"] for g in layer.values())
    norm = fddp.psum(squares).sqrt()
    factor = (0.3 / (norm + 1e-6)).clamp(max=1.0)
    return descend(params, fddp.tree_map(lambda g: g * factor, grads))


def with_batch_norm(module, optimizer, x, y):
    return wrapped_with_weighted_loss(module, optimizer, x, y, fddp.extend.resolve(None))


def with_dropout(params, x, y):
    return weighted_sync(params, torch.nn.functional.dropout(x, 0.3), y)


def never_averaged(params, x, y):
    return descend(params, grad(loss_fn)(params, (x, y)))


def logged_loss(params, x, y):
    loss = fddp.psum(loss_fn(params, (x, y)))
    return weighted_sync(params, x, y), loss


def momentum_of_this_rank(params, momentum, x, y):
    momentum = fddp.tree_map(lambda m, g: 0.9 * m + g, momentum, grad(loss_fn)(params, (x, y)))
    return descend(params, fddp.pmean(momentum)), momentum


def local_contrast(params, x, y):
    def loss(params):
        a = linear(x, params["w"])
        return -(a @ a.T).logsumexp(1).mean()

    with fddp.GradSync(params) as sync:
        return descend(params, sync(grad(loss)(params), weight=len(x)))


def virtual_weights_of_ranks(params, batches):
    with fddp.GradSync(params, virtual_ranks=4) as sync:
        trees = sync.virtual_batches([grad(loss_fn)(params, batch) for batch in batches])
        grads = sync(trees, weight=[1.0] * len(trees))
    return descend(params, fddp.tree_map(lambda g: g * len(trees), grads))


def batch_norm_module():
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-1.0, 1.0 + number, p.numel()).view(p.shape).sin())
    return module, torch.optim.SGD(module.parameters(), lr=0.01)


def faults() -> list[Case]:
    """Faults with new inputs, and their causes."""
    params, batch = init_params(0), rows()
    sum_text = "summed over ranks where the mean is meant: the factor is 2"
    zeros = fddp.tree_map(torch.zeros_like, params)
    return [
        Case(summed, (params,), batch, {}, sum_text),
        Case(summed, (params,), batch, EVEN, sum_text),
        Case(summed_with_adamw, module_with(torch.optim.AdamW), batch, {}, sum_text),
        Case(sum_that_is_averaged, (params,), batch, {}, "a sum over rows is averaged over ranks"),
        Case(mean_of_means, (params,), batch, {}, "mean of means"),
        Case(mean_of_token_means, (token_params(),), tokens(), {}, "labels that are not ignored"),
        Case(
            clipped_before_the_mean, (params,), batch, {}, "clipped or normalised before the mean"
        ),
        Case(
            clipped_module_before_the_mean,
            module_with(torch.optim.AdamW),
            batch,
            EVEN,
            "clipped or normalised before the mean",
        ),
        Case(divided_twice, (params,), batch, {}, "divided by the number of ranks twice"),
        Case(local_count, (params,), batch, {}, "a count of this rank"),
        Case(local_token_count, (token_params(),), tokens(), {}, "a count of this rank"),
        Case(accumulation_not_divided, (params,), batch, {}, "not divided by their number"),
        Case(norm_counted_twice, (params,), batch, {}, "a norm is summed over ranks"),
        Case(with_batch_norm, batch_norm_module(), batch, {}, "BatchNorm"),
        Case(with_dropout, (params,), batch, {}, "random numbers"),
        Case(never_averaged, (params,), batch, {}, "the ranks differ from each other"),
        Case(logged_loss, (params,), batch, {}, sum_text),
        Case(momentum_of_this_rank, (params, zeros), batch, {}, "the ranks differ from each other"),
        Case(local_contrast, ({"w": numbers(3, 4)},), batch, {}, "in another way than by a mean"),
        Case(
            virtual_weights_of_ranks,
            (params,),
            (micro_batches(batch),),
            {"virtual_ranks": 4},
            "same bits",
        ),
    ]
