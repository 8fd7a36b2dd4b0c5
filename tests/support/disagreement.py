"""Ranks that disagree, as values: a seeded generator of cases, and what each rank then sees.

In each case one rank does something else than the others. What must hold: every rank ends with an
error by name, or with the right mean where the difference is none; and ranks that then build anew
on the same group get right means. With `report="next"` one step may give another result than the
mean, if the next call of the same `GradSync` raises the error.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import fddp
from tests.support.groups import rank_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


class Case(NamedTuple):
    """One disagreement: `ranks` ranks, of which the one of number `odd` differs by `kind`; and when
    reports are read."""

    seed: int
    kind: str
    ranks: int
    odd: int
    report: Literal["now", "next"] = "now"


class Seen(NamedTuple):
    """Outcome of one rank.

    Attributes:
        error: the error's type; empty where there was none.
        bases: names of its bases.
        text: its message.
        wrong: what a call gave that was no mean; empty where all was right.
        after: the same of the calls that followed on the same group.
    """

    error: str
    bases: tuple[str, ...]
    text: str
    wrong: str
    after: str


def cases(seed: int, count: int) -> list[Case]:
    """The first `count` cases of a seed; every kind as often as any other."""
    rng = random.Random(seed)
    kinds = sorted(KINDS)
    found = []
    for number in range(count):
        if number % len(kinds) == 0:
            rng.shuffle(kinds)
        ranks = rng.choice((2, 2, 3))
        kind = kinds[number % len(kinds)]
        case = Case(rng.randrange(2**31), kind, ranks, rng.randrange(ranks))
        later = rng.random() < 0.5 and not KINDS[kind].decides
        found.append(case._replace(report="next") if later else case)
    return found


class WrongError(Exception):
    """A call gave what is no mean of all ranks."""


class Scene:
    """Data of one rank of a case; drawn alike on all ranks.

    Attributes:
        late_s: seconds that ranks wait for those that never come.
        is_odd: whether this is the rank that differs.
        rng: for what the case draws; the same on all ranks.
        tree: parameters.
        doubtful: by `GradSync`, a result that was no mean, and whose error is to come.
    """

    def __init__(self, group: Any, case: Case, late_s: float) -> None:
        self.group, self.late_s = group, late_s
        self.rank, self.ranks = rank_of(group), case.ranks
        self.is_odd = self.rank == case.odd
        self.rng = random.Random(case.seed)
        names = self.rng.sample(["a", "b", "kernel", "scale", "w.0", "w.1", "ä"], 5)
        self.tree = {name: self.leaf() for name in names[: self.rng.randint(2, 5)]}
        self.open: list[Any] = []
        self.report = case.report
        self.doubtful: dict[int, str] = {}
        self.step = 0

    def leaf(self) -> Tensor:
        shape = [self.rng.randint(1, 5) for _ in range(self.rng.randint(0, 3))]
        return torch.zeros(shape, dtype=self.rng.choice(DTYPES))

    def draw(self, *pair: Any) -> Any:
        """The odd rank's is the second of two that differ; the order is drawn."""
        one, two = self.rng.sample(pair, 2)
        return two if self.is_odd else one

    def sync(self, tree: Any = None, **options: Any) -> fddp.GradSync:
        given = {"group": self.group, "timeout_s": self.late_s, "report": self.report}
        options = {**given, **options}
        made = fddp.GradSync(self.tree if tree is None else tree, **options)
        self.open.append(made)
        return made

    def grads(self, step: int, tree: Any = None) -> Any:
        value = (self.rank + 1) * (step + 1)
        return fddp.tree_map(lambda p: torch.full_like(p, value), tree or self.tree)

    def mean(self, sync: Any, step: int | None = None, **options: Any) -> None:
        """One step, whose result must be the mean."""
        step = self.step if step is None else step
        self.check(sync(self.grads(step), **options), step, sync)
        self.step = step + 1

    def check(self, found: Any, step: int, sync: Any) -> None:
        """Compare a result with the mean."""
        wanted = (self.ranks + 1) / 2 * (step + 1)
        if id(sync) in self.doubtful:
            raise WrongError(f"no error followed: {self.doubtful[id(sync)]}")
        for path, leaf in found.items():
            # Rounded where a third is; other ranks' or steps' values are far away.
            if leaf is not None and not bool(((leaf - wanted).abs() <= wanted / 50).all()):
                text = f"{path} is {leaf.reshape(-1)[:3].tolist()} instead of {wanted}"
                if self.report == "now":
                    raise WrongError(text)
                self.doubtful[id(sync)] = text
                return

    def close(self) -> None:
        """Close all, and raise the error of a report."""
        with contextlib.ExitStack() as stack:
            for sync in self.open:
                stack.callback(sync.close)


Act = Callable[[Scene], None]

# At construction


def built(**of: Callable[[Scene], Any]) -> Act:
    """A `GradSync` of which one argument differs."""

    def act(scene: Scene) -> None:
        options = {name: draw(scene) for name, draw in of.items()}
        sync = scene.sync(options.pop("tree", None), **options)
        scene.mean(sync)
        scene.mean(sync)

    return act


def another_tree(change: Callable[[Scene, dict[str, Tensor], str], None]) -> Act:
    def act(scene: Scene) -> None:
        name = scene.rng.choice(sorted(scene.tree))
        tree = dict(scene.tree)
        changed = dict(scene.tree)
        change(scene, changed, name)
        scene.tree = changed if scene.is_odd else tree
        scene.mean(scene.sync())

    return act


def reshape(scene: Scene, tree: dict[str, Tensor], name: str) -> None:
    tree[name] = torch.zeros([*tree[name].shape, 2], dtype=tree[name].dtype)


def retype(scene: Scene, tree: dict[str, Tensor], name: str) -> None:
    other = [dtype for dtype in DTYPES if dtype != tree[name].dtype]
    tree[name] = torch.zeros_like(tree[name], dtype=scene.rng.choice(other))


def drop(scene: Scene, tree: dict[str, Tensor], name: str) -> None:
    del tree[name]


def rename(scene: Scene, tree: dict[str, Tensor], name: str) -> None:
    tree[f"{name}_"] = tree.pop(name)


def add(scene: Scene, tree: dict[str, Tensor], name: str) -> None:
    tree["one more"] = torch.zeros(3)


def blank(scene: Scene, tree: dict[str, Any], name: str) -> None:
    tree[name] = None


def other_plan(scene: Scene) -> None:
    one = fddp.plan_buckets(scene.tree, bucket_cap_mb=1.0)
    two = fddp.plan_buckets(scene.tree, bucket_cap_mb=1e-5)
    scene.mean(scene.sync(scene.draw(one, two, scene.tree)))


def other_schedule(scene: Scene) -> None:
    plan = fddp.plan_buckets(scene.tree)
    topology = fddp.Topology(all=scene.ranks)
    one = fddp.make_schedule(plan, topology)
    two = fddp.make_schedule(plan, topology, deterministic=True)
    scene.mean(scene.sync(scene.draw(one, two, plan)))


# Steps


def step_number(scene: Scene) -> None:
    """One rank is one step ahead of the others."""
    sync = scene.sync()
    ahead = scene.rng.randint(0, 2)
    for step in range(3):
        if step == ahead and scene.is_odd:
            sync._engine.step += 1
        scene.mean(sync, step)


def step_skipped(scene: Scene) -> None:
    """One rank leaves out a turn of its loop, and has one call less."""
    sync = scene.sync()
    skipped = scene.rng.randint(0, 2)
    for turn in range(3):
        if not (turn == skipped and scene.is_odd):
            scene.mean(sync)


def step_more(scene: Scene) -> None:
    sync = scene.sync()
    for _ in range(scene.draw(1, 2)):
        scene.mean(sync)


def swapped(other: bool) -> Act:
    def act(scene: Scene) -> None:
        tree = {"x": torch.zeros(3)} if other else scene.tree
        first, second = scene.sync(), scene.sync(tree)
        calls = [
            lambda: scene.check(first(scene.grads(0)), 0, first),
            lambda: scene.check(second(scene.grads(1, tree)), 1, second),
        ]
        for call in reversed(calls) if scene.is_odd else calls:
            call()

    return act


def sharded_and_gathered(scene: Scene) -> None:
    sync = scene.sync(algorithm="reduce_scatter")
    shards = sync.shard(scene.grads(0))
    if scene.is_odd:
        sync.all_gather(shards)
    else:
        sync.reduce_scatter(scene.grads(0))


def bad_weight(scene: Scene) -> None:
    weight = scene.rng.choice([-1.0, float("nan"), float("inf"), "2", None])
    scene.mean(scene.sync(), weight=weight if scene.is_odd else 1.0)


def no_weight(scene: Scene) -> None:
    scene.mean(scene.sync(), weight=0.0)


def another_gradient(change: Callable[[Scene, dict[str, Tensor], str], None]) -> Act:
    def act(scene: Scene) -> None:
        sync = scene.sync()
        name = scene.rng.choice(sorted(scene.tree))
        scene.mean(sync)
        grads = scene.grads(1)
        if scene.is_odd:
            change(scene, grads, name)
        scene.check(sync(grads), 1, sync)

    return act


def swapped_methods(scene: Scene) -> None:
    """Two calls of one `GradSync`, each of which averages gradients of the same leaves."""
    sync = scene.sync()
    backward = sync.value_and_grad(
        lambda params: sum((p * (scene.rank + 1)).sum().real for p in params.values())
    )
    ways: dict[str, Callable[[int], Any]] = {
        "call": lambda step: sync(scene.grads(step)),
        "update": lambda step: sync.update(scene.grads(step), sync.init_state())[0],
        "reduce_": lambda step: sync.reduce_(scene.grads(step)),
        "value_and_grad": lambda step: fddp.tree_map(
            lambda grad: grad * (step + 1), backward(fddp.tree_map(torch.ones_like, scene.tree))[1]
        ),
    }
    calls = [*enumerate(scene.rng.sample(sorted(ways), 2))]
    for step, way in reversed(calls) if scene.is_odd else calls:
        scene.check(ways[way](step), step, sync)


def other_timeout(scene: Scene) -> None:
    """No difference between ranks."""
    scene.mean(scene.sync(timeout_s=scene.draw(20.0, 30.0)))


def other_set_hook(scene: Scene) -> None:
    sync = scene.sync()
    scene.mean(sync)
    sync._engine.set_hook(scene.draw(None, fddp.hooks.fp16_compress, fddp.hooks.bf16_compress))
    scene.mean(sync)


def twice_in_a_round(scene: Scene) -> None:
    sync = scene.sync()
    for _ in fddp.uneven(range(2), sync):
        scene.mean(sync, 0)
        if scene.is_odd:
            scene.mean(sync, 0)


def not_in_a_round(scene: Scene) -> None:
    sync = scene.sync()
    for batch in fddp.uneven(range(3), sync):
        if not (scene.is_odd and batch == 1):
            scene.mean(sync, 0)


def failing_loss(operators: bool) -> Act:
    def act(scene: Scene) -> None:
        sync = scene.sync(timeout_s=20.0)

        def loss(params: Any) -> Tensor:
            if scene.is_odd:
                raise ArithmeticError("what one rank meets alone")
            total = sum(leaf.abs().double().sum() for leaf in params.values())
            return fddp.pmean(total, scene.group) if operators else total  # type: ignore[arg-type, return-value]

        sync.value_and_grad(loss)(scene.tree)

    return act


# Operators

ONE = torch.ones(4, dtype=torch.float64)
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "psum": lambda group: fddp.psum(ONE, group),
    "pmean": lambda group: fddp.pmean(ONE, group),
    "pmax": lambda group: fddp.pmax(ONE, group),
    "another shape": lambda group: fddp.psum(ONE[:2], group),
    "another dtype": lambda group: fddp.psum(ONE.float(), group),
    "another tree": lambda group: fddp.psum({"x": ONE}, group),
    "all_gather": lambda group: fddp.all_gather(ONE, group),
    "tiled": lambda group: fddp.all_gather(ONE, group, tiled=True),
    "broadcast_from 0": lambda group: fddp.broadcast_from(ONE, 0, group),
    "broadcast_from 1": lambda group: fddp.broadcast_from(ONE, 1, group),
    "reduce_scatter": lambda group: fddp.reduce_scatter(torch.ones(12), group, tiled=True),
    "all_to_all": lambda group: fddp.all_to_all(torch.ones(12), group, tiled=True),
    "check_replicas": lambda group: fddp.check_replicas(ONE, group),
    "backward": lambda group: torch.func.grad(lambda x: fddp.psum(x, group).sum())(ONE),
}


def operators(scene: Scene) -> None:
    name = scene.draw(*OPERATORS)
    with fddp.Communicator(scene.group, timeout_s=scene.late_s) as ranks:
        OPERATORS[name](ranks)
        OPERATORS["psum"](ranks)


def order_of_operators(scene: Scene) -> None:
    one, two = scene.rng.sample(sorted(set(OPERATORS) - {"backward"}), 2)
    with fddp.Communicator(scene.group, timeout_s=scene.late_s) as ranks:
        for name in (two, one) if scene.is_odd else (one, two):
            OPERATORS[name](ranks)


def operator_and_sync(scene: Scene) -> None:
    sync = scene.sync()
    with fddp.Communicator(scene.group, timeout_s=scene.late_s) as ranks:
        scene.open.append(ranks)
        if scene.is_odd:
            fddp.psum(ONE, ranks)
        else:
            scene.mean(sync)


def other_communicator(scene: Scene) -> None:
    fddp.Communicator(
        scene.group, bucket_cap_mb=scene.draw(1.0, 2.0), timeout_s=scene.late_s
    ).close()


def other_source(scene: Scene) -> None:
    fddp.broadcast(scene.tree, scene.draw(0, 1), group=scene.group, timeout_s=scene.late_s)


def other_broadcast(scene: Scene) -> None:
    tree = {**scene.tree, "x": ONE} if scene.is_odd else scene.tree
    fddp.broadcast(tree, group=scene.group, timeout_s=scene.late_s)


def built_and_broadcast(scene: Scene) -> None:
    if scene.is_odd:
        fddp.broadcast(scene.tree, group=scene.group, timeout_s=scene.late_s)
    else:
        scene.mean(scene.sync())


def replicas_apart(scene: Scene) -> None:
    tree = scene.grads(0) if scene.is_odd else scene.tree
    with fddp.Communicator(scene.group, timeout_s=scene.late_s) as ranks:
        fddp.check_replicas(tree, ranks)


_LONG_S = 20.0  # longer than a busy machine takes


class Kind(NamedTuple):
    """A way in which one rank deviates.

    Attributes:
        act: what all ranks do.
        agrees: whether that is no disagreement, so that all must go well.
        kinds: errors of the rank that differs, beside those of all.
        may_end: whether some ranks have no more calls where others wait for them.
        waits: whether ranks wait for calls that never come, up to a time limit.
        decides: whether it needs reports before results are used.
    """

    act: Act
    agrees: bool = False
    kinds: tuple[str, ...] = ()
    may_end: bool = False
    waits: bool = False
    decides: bool = False


KINDS: dict[str, Kind] = {
    "shape": Kind(another_tree(reshape)),
    "dtype": Kind(another_tree(retype)),
    "missing leaf": Kind(another_tree(drop)),
    "renamed leaf": Kind(another_tree(rename)),
    "leaf more": Kind(another_tree(add)),
    "leaf None": Kind(another_tree(blank)),
    "cap": Kind(built(bucket_cap_mb=lambda s: s.draw(1.0, 25.0, [0.1, 1.0]))),
    "first cap": Kind(built(first_bucket_mb=lambda s: s.draw(1.0, 0.5))),
    "hook": Kind(
        built(
            hook=lambda s: s.draw(
                None, fddp.hooks.fp16_compress, fddp.hooks.int8(), fddp.hooks.top_k(0.5)
            )
        ),
        decides=True,
    ),
    "algorithm": Kind(built(algorithm=lambda s: s.draw("all_reduce", "reduce_scatter"))),
    "deterministic": Kind(built(deterministic=lambda s: s.draw(False, True))),
    "reduce_dtype": Kind(built(reduce_dtype=lambda s: s.draw(None, torch.float32))),
    "nonfinite": Kind(
        built(nonfinite=lambda s: s.draw("propagate", "skip", "raise")), decides=True
    ),
    "report": Kind(built(report=lambda s: s.draw("now", "next"))),
    "select": Kind(built(select=lambda s: s.draw(None, lambda path: path != min(s.tree)))),
    "mesh": Kind(
        built(mesh=lambda s: s.draw(fddp.Topology(a=s.ranks), fddp.Topology(b=s.ranks), None))
    ),
    "argument": Kind(
        built(bucket_cap_mb=lambda s: -1.0 if s.is_odd else 1.0), kinds=("ValueError",)
    ),
    "plan": Kind(other_plan),
    "schedule": Kind(other_schedule),
    "timeout": Kind(other_timeout, agrees=True),
    "methods of one sync": Kind(swapped_methods),
    "step number": Kind(step_number),
    "step skipped": Kind(step_skipped, may_end=True),
    "step more": Kind(step_more, may_end=True),
    "swapped": Kind(swapped(other=False), waits=True),
    "swapped, other trees": Kind(swapped(other=True), waits=True),
    "shards": Kind(sharded_and_gathered),
    "weight": Kind(bad_weight, kinds=("TypeError", "ValueError")),
    "no weight": Kind(no_weight),
    "gradient's shape": Kind(another_gradient(reshape)),
    "gradient's dtype": Kind(another_gradient(retype)),
    "gradient missing": Kind(another_gradient(drop)),
    "gradient renamed": Kind(another_gradient(rename)),
    "gradient more": Kind(another_gradient(add)),
    "set_hook": Kind(other_set_hook, decides=True),
    "twice in a round": Kind(twice_in_a_round, decides=True),
    "not in a round": Kind(not_in_a_round, decides=True),
    "loss": Kind(failing_loss(operators=False), kinds=("ArithmeticError",)),
    "loss with operators": Kind(failing_loss(operators=True), kinds=("ArithmeticError",)),
    "operator": Kind(operators),
    "order of operators": Kind(order_of_operators),
    "operator and sync": Kind(operator_and_sync, waits=True),
    "communicator": Kind(other_communicator),
    "source": Kind(other_source),
    "broadcast": Kind(other_broadcast),
    "built and broadcast": Kind(built_and_broadcast),
    "replicas": Kind(replicas_apart),
}


def play(group: Any, case: Case, late_s: float) -> Seen:
    """One rank's part in a case.

    Args:
        group: of the case's size.
        case: what to play.
        late_s: seconds that ranks wait for those that never come.
    """
    scene = Scene(group, case, late_s if KINDS[case.kind].waits else _LONG_S)
    error: BaseException | None = None
    wrong = after = ""
    try:
        KINDS[case.kind].act(scene)
    except WrongError as found:
        wrong = str(found)
    except Exception as found:
        error = found
    try:
        scene.close()
    except Exception as found:
        error = error or found
    if scene.doubtful and error is None:
        wrong = f"no error followed: {scene.doubtful}"
    try:
        with fddp.GradSync(scene.tree and {"x": ONE}, group=group, timeout_s=_LONG_S) as sync:
            scene.check(sync({"x": ONE * (scene.rank + 1)}), 0, sync)
        if fddp.psum(ONE, group)[0] != scene.ranks:
            after = "an operator gave another sum"
    except Exception as found:
        after = f"{type(found).__name__}: {found}"
    bases = tuple(base.__name__ for base in type(error).__mro__) if error else ()
    return Seen(type(error).__name__ if error else "", bases, str(error or ""), wrong, after)


def names_sides(case: Case, own: Seen) -> bool:
    """Return True if a rank's error names the odd rank; if all weights are 0 there is none."""
    return case.kind == "no weight" or f"rank {case.odd}" in own.text


def problems(case: Case, seen: list[Seen]) -> list[str]:
    """Return the expectations that do not hold."""
    kind, found = KINDS[case.kind], []
    for rank, own in enumerate(seen):
        named = "FddpError" in own.bases or (rank == case.odd and own.error in kind.kinds)
        if own.wrong:
            found.append(f"rank {rank}: {own.wrong}")
        if own.after:
            found.append(f"rank {rank}, afterwards: {own.after}")
        if kind.agrees and own.error:
            found.append(f"rank {rank}: {own.error}: {own.text}")
        if not kind.agrees and own.error and not named:
            found.append(f"rank {rank}: {own.error}: {own.text} is no error by name")
        if "FddpError" in own.bases and rank != case.odd and not names_sides(case, own):
            found.append(f"rank {rank}: {own.error}: {own.text} does not name rank {case.odd}")
    ended = [rank for rank, own in enumerate(seen) if own.error]
    if not kind.agrees and (not ended or (len(ended) < case.ranks and not kind.may_end)):
        found.append(f"ranks without an error: {sorted(set(range(case.ranks)) - set(ended))}")
    return found
