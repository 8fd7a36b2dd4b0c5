"""Loops with several models, statistics in place of gradients, and losses over all ranks' rows."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
from torch.func import functional_call, grad, grad_and_value
from torch.nn.functional import cross_entropy, embedding, linear, mse_loss, normalize, relu

import fddp
from tests.testing.replication.loops.inputs import (
    GATHERED,
    MEANS,
    NOISE,
    OWN,
    Loop,
    descend,
    init_params,
    loss_fn,
    make_batch,
    make_tokens,
    token_params,
)


def rows_of(x):
    return fddp.psum(torch.tensor(float(len(x))))


def predict(params, x):
    first, last = params["layers"]
    return linear(torch.tanh(linear(x, **first)), **last)


# Several models


def adversarial(generator, critic, x, noise):
    with fddp.GradSync(generator) as own, fddp.GradSync(critic) as other:
        fakes = noise @ generator["w"]
        to_critic = lambda c: relu(1 - x @ c["w"]).mean() + relu(1 + fakes @ c["w"]).mean()  # noqa: E731
        critic = descend(critic, other(grad(to_critic)(critic)))
        to_generator = lambda g: -(noise @ g["w"] @ critic["w"]).mean()  # noqa: E731
        generator = descend(generator, own(grad(to_generator)(generator)))
    return generator, critic


def adversarial_with_own_noise(generator, critic, x):
    return adversarial(generator, critic, x, torch.randn(len(x), 2))


def distilled(params, teacher, x):
    target = predict(teacher, x)
    grads = grad(lambda p: mse_loss(predict(p, x), target))(params)
    return descend(params, fddp.pmean(grads))


def distilled_from_a_module(params, teacher, x):
    with torch.no_grad():
        target = teacher(x)
    grads = grad(lambda p: mse_loss(predict(p, x), target))(params)
    return descend(params, fddp.pmean(grads))


def target_network(params, target, x, y):
    value = y + 0.9 * predict(target, x).detach()
    params = descend(params, fddp.pmean(grad(lambda p: mse_loss(predict(p, x), value))(params)))
    return params, fddp.tree_map(lambda t, p: t.lerp(p, 0.05), target, params)


def actor_and_critic(params, x, y):
    rows = rows_of(x)

    def loss(p):
        gain = (y - predict(p["critic"], x)).detach()
        mean = fddp.psum(gain.sum()) / rows
        deviation = (fddp.psum((gain - mean).square().sum()) / rows).sqrt()
        actor = -((gain - mean) / (deviation + 1e-6) * torch.tanh(predict(p["actor"], x))).sum()
        return (actor + (predict(p["critic"], x) - y).square().sum()) / rows

    return descend(params, fddp.psum(grad(loss)(params)))


def frozen_part(params, x, y):
    with fddp.GradSync(params, select=lambda path: path.startswith("layers.1.")) as sync:
        grads = sync(grad(loss_fn)(params, (x, y)))
    first, last = params["layers"]
    return {"layers": [first, descend(last, grads["layers"][1])]}


def own_expert(params, expert, x, y):
    tree = {"shared": params, "expert": expert}
    with fddp.GradSync(tree, select=lambda path: not path.startswith("expert")) as sync:
        loss = lambda t: mse_loss(predict(t["shared"], x * t["expert"]), y)  # noqa: E731
        tree = descend(tree, sync(grad(loss)(tree)))
    return tree["shared"], tree["expert"]


def heads_by_rank(params, x, y, group):
    with fddp.GradSync(params) as sync:
        loss = lambda p: mse_loss(predict(p["ab"[group.rank % 2]], x), y)  # noqa: E731
        _, grads = sync.value_and_grad(loss)(params)
    return descend(params, grads)


def tied(params, x):
    def loss(p):
        return mse_loss(x @ p["w"] @ p["w"].T, x)

    return descend(params, fddp.pmean(grad(loss)(params)))


def sparse_rows(tables, words):
    def loss(p, words):
        return (embedding(words, p["embedding"], sparse=True) + p["bias"]).square().mean()

    with fddp.GradSync(tables, sparse=["embedding"]) as sync:
        _, grads = sync.value_and_grad(loss)(tables, words)
    return fddp.tree_map(lambda p, g: p - 0.1 * g, tables, grads)


def functionalized(weights, buffers, x, y):
    apply, _, _ = fddp.functionalize(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()))

    def loss(weights, buffers):
        output, buffers = apply(weights, buffers, x)
        return (output.mean(1, keepdim=True) - y).square().mean(), buffers

    with fddp.GradSync(weights) as sync:
        (_, buffers), grads = sync.value_and_grad(loss, has_aux=True)(weights, buffers)
    return descend(weights, grads), buffers


def stateless_module(params, x, y):
    module = torch.nn.Linear(4, 1)
    loss = lambda p: mse_loss(functional_call(module, p, (x,)), y)  # noqa: E731
    return descend(params, fddp.pmean(grad(loss)(params)))


# Losses over the rows of all ranks


def queue_of_keys(params, queue, x, y):
    keys = normalize(y @ params["w"]).detach()

    def loss(p):
        queries = normalize(x @ p["w"])
        others = queries @ queue.T / 0.1
        scores = torch.cat([(queries * keys).sum(1, keepdim=True) / 0.1, others], 1)
        return cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))

    params = descend(params, fddp.pmean(grad(loss)(params)))
    return params, torch.cat([queue, fddp.all_gather(keys, tiled=True)])[-len(queue) :]


def contrastive(params, x, y):
    def loss(p):
        one, two = fddp.all_gather((x @ p["w"], y @ p["w"]), tiled=True)
        return cross_entropy(normalize(one) @ normalize(two).T, torch.arange(len(one)))

    return descend(params, fddp.pmean(grad(loss)(params)))


def contrastive_of_own_rows(params, x, y, group):
    def loss(p):
        one, two = x @ p["w"], fddp.all_gather(y @ p["w"], tiled=True)
        labels = torch.arange(len(x)) + group.rank * len(x)
        return cross_entropy(normalize(one) @ normalize(two).T, labels)

    return descend(params, fddp.pmean(grad(loss)(params)))


def batch_norm_of_means(params, x, y):
    def normalized(x):
        mean = fddp.pmean(x.mean(0))
        return (x - mean) * (fddp.pmean((x - mean).square().mean(0)) + 1e-5).rsqrt()

    return descend(params, fddp.pmean(grad(loss_fn)(params, (normalized(x), y))))


def weights_of_classes(params, x, labels):
    weights = torch.tensor([1.0, 2.0, 3.0]).to(x.dtype)
    total = fddp.psum(weights[labels].sum())

    def loss(p):
        logits = linear(x, p["weight"].T, p["bias"])
        return cross_entropy(logits, labels, weights, reduction="sum") / total

    return descend(params, fddp.psum(grad(loss)(params)))


def tokens_as_weights(params, x, labels):
    def loss(p, labels):
        logits = linear(x, p["weight"].T, p["bias"]).flatten(0, 1)
        return cross_entropy(logits, labels.flatten(), ignore_index=-100)

    with fddp.GradSync(params) as sync:
        weight = lambda p, labels: (labels != -100).sum().item()  # noqa: E731
        _, grads = sync.value_and_grad(loss, weight_fn=weight)(params, labels)
    return descend(params, grads)


def padded_to_the_longest(params, x, labels):
    longest = int(fddp.pmax((labels != -100).sum(1).max()))
    x, labels = x[:, :longest], labels[:, :longest]
    total = fddp.psum((labels != -100).sum().float())

    def loss(p):
        logits = linear(x, p["weight"].T, p["bias"]).flatten(0, 1)
        losses = cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
        return losses / total

    return descend(params, fddp.psum(grad(loss)(params)))


def padded_rows(params, x):
    most = int(fddp.pmax(torch.tensor(len(x))))
    padded = torch.cat([x, x.new_zeros(most - len(x), 4)])
    rows = fddp.all_gather(padded, tiled=True)
    return descend(params, grad(lambda p: (rows @ p["w"]).square().sum() / 16)(params))


# Statistics in place of gradients


def k_means(centres, x):
    nearest = torch.cdist(x, centres).argmin(1)
    members = torch.nn.functional.one_hot(nearest, len(centres)).to(x.dtype)
    sums, counts = fddp.psum((members.T @ x, members.sum(0)))
    return torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centres)


def normal_equations(params, x, y):
    left, right = fddp.psum((x.T @ x, x.T @ y))
    return {"w": torch.linalg.solve(left + 0.1 * torch.eye(4, dtype=x.dtype), right)}


def power_iteration(vector, x):
    for _ in range(3):
        vector = fddp.psum(x.T @ (x @ vector))
        vector = vector / vector.norm()
    return vector


def running_moments(state, x):
    count, total, squares = fddp.psum((torch.tensor(float(len(x))), x.sum(0), (x * x).sum(0)))
    return {
        "count": state["count"] + count,
        "sum": state["sum"] + total,
        "squares": state["squares"] + squares,
    }


def histogram(counts, words):
    return counts + fddp.psum(torch.bincount(words.flatten(), minlength=len(counts)))


def samples_seen(params, seen, x, y):
    grads = fddp.pmean(grad(loss_fn)(params, (x, y)))
    return descend(params, grads), seen + fddp.psum(torch.tensor(len(x)))


def curvature_factors(params, factor, x, y):
    factor = 0.9 * factor + 0.1 * fddp.psum(x.T @ x) / rows_of(x)
    grads = fddp.pmean(grad(lambda p: mse_loss(x @ p["w"], y))(params))
    damped = factor + 0.1 * torch.eye(4, dtype=x.dtype)
    return {"w": params["w"] - 0.1 * torch.linalg.solve(damped, grads["w"])}, factor


def precision_and_recall(params, x, labels):
    found = (x @ params["weight"] + params["bias"]).argmax(1)
    hits, positives, relevant = fddp.psum(
        tuple(
            counted.sum().float()
            for counted in ((found == 1) & (labels == 1), found == 1, labels == 1)
        )
    )
    return {"precision": hits / (positives + 1e-6), "recall": hits / (relevant + 1e-6)}


def median_of_all(x):
    return fddp.all_gather(x[:, 0], tiled=True).median()


def mean_loss_of_an_epoch(params, total, x, y):
    grads, loss = grad_and_value(loss_fn)(params, (x, y))
    params = descend(params, fddp.pmean(grads))
    return params, total + fddp.psum(len(x) * loss) / rows_of(x)


def loops() -> list[Loop]:
    """All with new inputs."""
    params, (x, y) = init_params(0), make_batch(0, rows=8)
    words, labels = torch.arange(8).reshape(8, 1) % 5, torch.tensor([0, 1, 2, 1, 0, 2, 1, 1])
    matrix = {"w": token_params()["weight"]}
    pairs = x, x + 0.5 * y
    critic = {"w": torch.ones(4, 1)}
    vectors = {"w": torch.linspace(-1.0, 1.0, 8).reshape(2, 4)}
    moments = {"count": torch.tensor(0.0), "sum": torch.zeros(4), "squares": torch.zeros(4)}
    module, teacher = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    weights = {"0.weight": torch.randn(8, 4), "0.bias": torch.zeros(8)}
    noise = torch.linspace(-2.0, 2.0, 16).reshape(8, 2).sin()
    tables = {"embedding": torch.ones(5, 3), "bias": torch.zeros(3)}
    return [
        Loop(adversarial, (vectors, critic), (x, noise), MEANS),
        Loop(adversarial_with_own_noise, (vectors, critic), (x,), NOISE),
        Loop(distilled, (params, init_params(1)), (x,), MEANS),
        Loop(distilled_from_a_module, (params, teacher), (x,), MEANS),
        Loop(target_network, (params, params), (x, y), MEANS),
        Loop(actor_and_critic, ({"actor": params, "critic": init_params(1)},), (x, y)),
        Loop(frozen_part, (params,), (x, y), MEANS),
        Loop(own_expert, (params,), (torch.ones(4), x, y), OWN),
        Loop(heads_by_rank, ({"a": params, "b": params},), (x, y), "ranks train other heads"),
        Loop(tied, (matrix,), (x,), MEANS),
        Loop(sparse_rows, (tables,), (words,), MEANS),
        Loop(functionalized, (weights, {}), (x, y), MEANS),
        Loop(
            stateless_module,
            ({name: p.detach() for name, p in module.named_parameters()},),
            (x, y),
            MEANS,
        ),
        Loop(queue_of_keys, (matrix, normalize(torch.randn(16, 3))), pairs, GATHERED),
        Loop(contrastive, (matrix,), pairs, GATHERED),
        Loop(contrastive_of_own_rows, (matrix,), pairs, GATHERED),
        Loop(batch_norm_of_means, (params,), (x, y), MEANS),
        Loop(weights_of_classes, (token_params(),), (x, labels)),
        Loop(tokens_as_weights, (token_params(),), make_tokens(3)),
        Loop(padded_to_the_longest, (token_params(),), make_tokens(3)),
        Loop(
            padded_rows,
            ({"w": torch.ones(4)},),
            (lambda rank: make_batch(rank, rows=5 + rank)[0],),
            OWN,
        ),
        Loop(k_means, (x[:3].clone(),), (x,)),
        Loop(normal_equations, ({"w": torch.zeros(4, 1)},), (x, y)),
        Loop(power_iteration, (torch.ones(4),), (x,)),
        Loop(running_moments, (moments,), (x,)),
        Loop(histogram, (torch.zeros(5, dtype=torch.long),), (words,)),
        Loop(samples_seen, (params, torch.tensor(0)), (x, y), MEANS),
        Loop(curvature_factors, ({"w": torch.zeros(4, 1)}, torch.eye(4)), (x, y), MEANS),
        Loop(precision_and_recall, (token_params(),), (x, labels)),
        Loop(median_of_all, (), (x,), GATHERED),
        Loop(mean_loss_of_an_epoch, (params, torch.tensor(0.0)), (x, y), MEANS),
    ]
