"""Loss functions with synchronised gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fddp.core.entrance import entrance
from fddp.core.protocol.calls import Method
from fddp.errors import LossError
from fddp.native import extension
from fddp.native.untraced import traced_inline, untraced_beneath
from fddp.runtime.backward import backward
from fddp.runtime.contributions import Accumulated, BackwardContributions
from fddp.runtime.inputs import (
    check_no_derivatives,
    check_no_transform,
    checked_weight,
    differentiated,
    matched_leaves,
    outside_inference_mode,
)
from fddp.runtime.program import Program
from fddp.runtime.step import Step
from fddp.runtime.step_info import make_info
from fddp.runtime.virtual_sums import VirtualSums
from fddp.sync import dynamo
from fddp.sync.engine import Engine
from fddp.sync.rounds import EXHAUSTED
from fddp.tree.pytree import TreeDef, flatten, map_leaves

if TYPE_CHECKING:
    from fddp._C import LeafSet


class Computed(NamedTuple):
    """Result of the loss function, and the times at which its backward pass began and ended."""

    treedef: TreeDef
    loss: Any
    aux: Any
    backward_s: tuple[float, float]


@dataclass(frozen=True, eq=False, repr=False)
class ValueAndGrad:
    """A loss function that returns its value and synchronised gradients; a collective call.

    Made by `GradSync.value_and_grad`. `torch.compile` makes a call a part of the graph, with a
    `GraphInfo` as the info, and a gradient of zeros for a leaf that no rank uses. If `EXHAUSTED` is
    among the arguments, the rank contributes nothing, and its loss and aux are None.

    Args of a call:
        *args, **kwargs: arguments of the loss function, with the parameters at `argnums`. Not
            written.
        accumulated: `(weighted_sum, weight)`: the sum of earlier micro-batches' gradients, each
            times its weight, and the total of these weights. The result is the weighted mean over
            all micro-batches of all ranks.
        hook_state: state of a communication hook that keeps state; see `GradSync.init_state`.

    Returns of a call:
        `(loss, grads)`, or `((loss, aux), grads)` with `has_aux`; followed by the new state if
        `hook_state` was passed, and by a `SyncInfo` with `with_info`. The loss is this rank's own.
        A gradient is None only if no rank used the leaf, for integer leaves, and in a step skipped
        under `nonfinite="skip"`. All are detached. A gradient keeps the memory of its whole bucket:
        `clone` one that is kept. See `SyncInfo.held_bytes`.

    Raises of a call:
        LossError: the loss is not a real scalar tensor.
        TreeMismatchError: parameters or accumulated gradients differ from the plan.
        TypeError: parameters are passed by name, or `accumulated` is no pair.
        WeightError: a weight is negative or not finite, or all weights are 0.
        NonFiniteError: a gradient or a sum is not finite, under `nonfinite="raise"`.
        TransformError: a `torch.func` transform or a tracer is active around the call, or a
            parameter has a tangent of forward mode.
        Exception: an error of `fn` or `weight_fn`, on its rank.
        PeerError: another rank raised one of these.

    Example:
        >>> import fddp, torch
        >>> def train(group):
        ...     params = {"w": torch.ones(2)}
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         step = sync.value_and_grad(lambda p, x: (p["w"] * x).sum())
        ...         loss, grads = step(params, torch.tensor([1.0, 2.0]) + group.rank)
        ...         return loss.item(), grads["w"].tolist()
        >>> fddp.loopback(2, train)
        [(3.0, [1.5, 2.5]), (5.0, [1.5, 2.5])]
    """

    _engine: Engine
    _fn: Callable[..., Any]
    _argnums: int | tuple[int, ...]
    _has_aux: bool
    _with_info: bool
    _weight_fn: Callable[..., float] | None

    @entrance
    @untraced_beneath
    def __call__(
        self,
        *args: Any,
        accumulated: tuple[Any, float] | None = None,
        hook_state: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Take a step; see the class."""
        if is_dynamo_compiling():
            is_plain = accumulated is None and hook_state is None
            fits = dynamo.fits(self._engine, self._engine.graph_label)
            if fits and is_plain and not _has_exhausted(args, kwargs):
                return self._in_graph(args, kwargs)
            given = {"accumulated": accumulated, "hook_state": hook_state}
            return dynamo.break_graph(self, *args, **given, **kwargs)

        def begin(step: Step) -> Computed:
            # Operators of the loss function raise once another rank has failed the step.
            outer = step.transport.enter_step(step.number)
            try:
                check_no_transform("value_and_grad")
                if hook_state is not None or step.code.hook is not None:
                    step.take_states(self._engine.checked_states(hook_state, "hook_state="))
                # As torch.func.grad, this differentiates whatever mode the caller is in.
                with outside_inference_mode():
                    return self._compute(step, args, kwargs, accumulated)
            finally:
                step.transport.enter_step(outer)

        outcome = self._engine.run(Method.VALUE_AND_GRAD, begin, with_stats=self._with_info)
        computed: Computed = outcome.begin_result
        grads = computed.treedef.unflatten(outcome.leaves)
        value = (computed.loss, computed.aux) if self._has_aux else computed.loss
        states = () if hook_state is None else (outcome.step.hook_states,)
        infos = (make_info(outcome, computed.backward_s),) if self._with_info else ()
        return value, grads, *states, *infos

    @traced_inline
    def _in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step in the graph of dynamo."""
        if not is_dynamo_compiling():  # the loss function broke the graph, and may raise
            return self(*args, **kwargs)
        given = self._params(args, kwargs)
        leaves, treedef = flatten(given)
        positions = [k for k, leaf in enumerate(leaves) if dynamo.is_differentiable(leaf)]

        def loss_fn(own: list[Tensor]) -> Any:
            whole = _replaced_leaves(leaves, positions, own)
            return self._fn(*self._replaced(args, treedef.unflatten(whole)), **kwargs)

        own = [leaves[position].detach() for position in positions]
        weight = 1.0 if self._weight_fn is None else self._weight_fn(*args)
        grads, value = torch.func.grad_and_value(loss_fn, has_aux=self._has_aux)(own)
        whole = _replaced_leaves([None] * len(leaves), positions, grads)
        tree, *info = dynamo.sync_leaves(
            self._engine, Method.VALUE_AND_GRAD, whole, treedef, weight, with_info=self._with_info
        )
        return value, tree, *info

    def _compute(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        accumulated: tuple[Any, float] | None,
        sums: VirtualSums | None = None,
    ) -> Computed:
        """Run the loss function and its backward pass.

        Args:
            sums: sums over the virtual ranks so far, if there are virtual ranks. The gradients of
                all but the last are added to them.
        """
        program = step.program
        given = self._params(args, kwargs)
        params, treedef = matched_leaves(given, program, "parameters", differentiable=True)
        check_no_derivatives(params, program, "parameters", graphs=False)
        earlier = None if accumulated is None else _earlier(accumulated, program)
        if _has_exhausted(args, kwargs):
            contributions = BackwardContributions(weight=0.0, accumulated=earlier)
            if sums is None:
                step.begin(contributions, params)
            else:
                _begin_virtual(step, contributions, params, sums)
                _add(sums, contributions)
            now_s = time.perf_counter()
            return Computed(treedef, None, None, (now_s, now_s))

        weight = 1.0 if self._weight_fn is None else checked_weight(self._weight_fn(*args))
        leaves = extension.compiled.LeafSet(_differentiated(params, program.differentiated))
        contributions = BackwardContributions(weight=weight, accumulated=earlier)
        if sums is None:
            step.begin(contributions, params)
        else:
            _begin_virtual(step, contributions, params, sums)
        own = _replaced_leaves(params, program.differentiated, leaves.leaves)
        with differentiated():
            result = self._fn(*self._replaced(args, treedef.unflatten(own)), **kwargs)
        loss, aux = self._split(result)
        start_s = time.perf_counter()
        if weight > 0.0 and loss.requires_grad:
            self._backward(step, contributions, leaves, loss)
        if sums is not None:
            _add(sums, contributions)
        end_s = time.perf_counter()
        if self._has_aux:
            aux = map_leaves(_detached, aux)
        return Computed(treedef, loss.detach(), aux, (start_s, end_s))

    def _backward(
        self, step: Step, contributions: BackwardContributions, leaves: LeafSet, loss: Tensor
    ) -> None:
        engine = self._engine
        if step.code.hook is not None:
            # Hooks may call operators, also on ranks that have failed.
            step.transport.enter_step(None)
        view = leaves.inspect(loss)
        if step.contributions is contributions:
            step.arm(leaves, view, engine.arrivals)
        else:  # of a virtual rank before the last, whose buckets are packed after backward
            contributions.collect(leaves)
            contributions.arm(step.program, view, engine.arrivals, step.memory, step.scale, _ignore)
        engine.note_backward(runs=True)
        try:
            if view.foreign or view.opaque:
                backward(loss, view, leaves.leaves)
            else:
                torch.autograd.backward(loss)
        finally:
            engine.note_backward(runs=False)
            leaves.disarm()
        engine.note_arrivals(contributions)

    def _params(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if isinstance(self._argnums, int):
                return args[self._argnums]
            return tuple(args[i] for i in self._argnums)
        except IndexError:
            raise TypeError(
                f"parameters must be passed by position, as in step(params, ...), at argnums="
                f"{self._argnums}; got {len(args)} arguments by position, and by name: "
                f"{', '.join(kwargs) or 'none'}"
            ) from None

    def _replaced(self, args: tuple[Any, ...], params: Any) -> list[Any]:
        replaced = list(args)
        if isinstance(self._argnums, int):
            replaced[self._argnums] = params
        else:
            for position, part in zip(self._argnums, params, strict=True):
                replaced[position] = part
        return replaced

    def _split(self, result: Any) -> tuple[Tensor, Any]:
        loss, aux = result, None
        if self._has_aux:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise LossError(
                    f"with has_aux=True the loss function must return (loss, aux), "
                    f"got {type(result).__name__}"
                )
            loss, aux = result
        if not isinstance(loss, Tensor):
            is_pair = not self._has_aux and isinstance(loss, tuple) and len(loss) == 2
            hint = "; pass has_aux=True for a loss function that returns (loss, aux)"
            raise LossError(
                f"the loss must be a tensor, got {type(loss).__name__}{hint if is_pair else ''}"
            )
        if loss.ndim != 0 or not loss.is_floating_point():
            raise LossError(
                f"the loss must be a real scalar, got {loss.dtype} of shape {tuple(loss.shape)}; "
                f"reduce it first, for instance with .mean()"
            )
        return loss, aux


def _begin_virtual(
    step: Step,
    contributions: BackwardContributions,
    params: Sequence[Tensor | None],
    sums: VirtualSums,
) -> None:
    """Begin a step with the last virtual rank, or note the devices of an earlier one."""
    if sums.missing:
        step.note_devices(params)
    else:
        step.begin(contributions, params, earlier=sums)


def _add(sums: VirtualSums, contributions: BackwardContributions) -> None:
    if sums.missing:
        sums.add(contributions)


def _ignore(bucket: int) -> None:
    """Ignore that a bucket is complete."""


def _has_exhausted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if `EXHAUSTED` is among the arguments. By identity: arrays have no truth."""
    for value in (*args, *kwargs.values()):  # noqa: SIM110  # faster than any()
        if value is EXHAUSTED:
            return True
    return False


def _earlier(accumulated: tuple[Any, float], program: Program) -> Accumulated | None:
    if not isinstance(accumulated, tuple) or len(accumulated) != 2:
        raise TypeError(
            f"accumulated must be the pair (weighted_sum, weight), got a "
            f"{type(accumulated).__name__}; write accumulated=(tree, weight), where weight is the "
            f"total weight of the summed micro-batches"
        )
    tree, weight = accumulated
    sums, _ = matched_leaves(tree, program, "accumulated gradients")
    checked = checked_weight(weight)
    return Accumulated(sums, checked) if checked > 0.0 else None


def _differentiated(params: list[Any], positions: Sequence[int]) -> list[Any]:
    return params if len(positions) == len(params) else [params[i] for i in positions]


def _replaced_leaves(
    params: Sequence[Tensor | None], positions: Sequence[int], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    if len(leaves) == len(params):
        return leaves
    own = list(params)
    for position, leaf in zip(positions, leaves, strict=True):
        own[position] = leaf
    return own


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
