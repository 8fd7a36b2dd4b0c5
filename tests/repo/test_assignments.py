"""Objects own their state: no function assigns to attributes of another object."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from tests.support.rooms import MODULES, room_of

# By module and target, the reason for which it may be assigned; all others have a method.
ALLOWED = {
    "ddp.active_module: _TorchDDP._active_ddp_module": "torch has no other way to set it",
    "ddp.active_module: weakref.finalize(wrapper, _forget, id(wrapper)).atexit": "weakref's way",
    "ddp.active_module: _active.module": "a variable of the thread, of this module",
    "ddp.delayed_all_reduce: self._parameters[name].grad": "a tensor's",
    "ddp.failure_scope: error.__traceback__": "an exception's",
    "ddp.forward_passes: ddp.require_forward_param_sync": "torch's name, which others set, too",
    "ddp.join: self._ddp.require_forward_param_sync": "torch's name, which others set, too",
    "ddp.join: ddp._join_config": "torch's Join sets it on its joinables",
    "ddp.micro_batches: leaf.grad": "a tensor's",
    "ddp.mixed_precision: buffer.data": "a tensor's",
    "ddp.mixed_precision: ctx.dtype": "autograd's context of a function",
    "ddp.parameters: self.leaves[step.program.differentiated[number]].grad": "a tensor's",
    "ddp.steps: param.grad": "a tensor's",
    "ddp.wrapper: engine.hook_states": "a property",
    "runtime.agreement: failure.args": "an exception's",
    "runtime.backward: tensor.grad": "a tensor's",
    "runtime.failures: error.args": "an exception's",
    "runtime.failures: error.bucket": "an exception's",
    "runtime.failures: error.paths": "an exception's",
    "runtime.failures: error.step": "an exception's",
    "runtime.finish: step.failure.__cause__": "an exception's",
    "runtime.finite_check: error.step": "an exception's",
    "runtime.inputs: _differentiated.depth": "a variable of the thread, of this module",
    "runtime.step: error.args": "an exception's",
    "sync.dynamo: _function._dynamo_marked_constant": "an attribute of functions that dynamo reads",
    "sync.grad_sync: other._engine": "a copy of `self`",
}


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns or deletes."""
    found: list[ast.expr] = []
    match node:
        case ast.Assign() | ast.Delete():
            found += node.targets
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.NamedExpr():
            found.append(node.target)
        case ast.With():
            found += [item.optional_vars for item in node.items if item.optional_vars]
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
            found.append(ast.Attribute(owner, "?", ast.Store()))
    for target in found:
        yield from (inner for inner in ast.walk(target) if isinstance(inner, ast.Attribute))


def own_names(function: ast.AST) -> set[str]:
    """Names of a function for itself, and for objects that it makes by calling a class."""
    names = {"self", "cls"}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value.func
            name = getattr(made, "attr", getattr(made, "id", ""))
            if name[:1].isupper() or name.lstrip("_")[:1].isupper():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def assignments(source: str) -> Iterator[str]:
    """Attributes of other objects that a module assigns."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    own: dict[ast.AST, set[str]] = {}
    for function in functions:  # outer functions come first
        names = own_names(function)
        for node in ast.walk(function):
            own[node] = own.get(node, set()) | names
    for node in ast.walk(tree):
        for target in targets(node):
            owner = target.value
            is_own = isinstance(owner, ast.Name) and owner.id in own.get(node, set())
            if not (is_own or isinstance(target.ctx, ast.Load)):
                yield ast.unparse(target)


def found_in(room: str) -> Counter[str]:
    return Counter(
        f"{module}: {target}"
        for module, path in MODULES.items()
        if room_of(module) == room
        for target in assignments(path.read_text())
    )


def test_objects_own_their_state() -> None:
    found = found_in("ddp") | found_in("runtime") | found_in("sync")
    assert found.keys() == ALLOWED.keys()


def test_assignments_are_found() -> None:
    for source, found in {
        "def f(self, x):\n    self.a = x.b": [],
        "def f(x):\n    x.a = 1": ["x.a"],
        "def f(x):\n    x.a, x.b[0] = y.c = 1": ["x.a", "y.c"],
        "def f(x):\n    x.a += 1\n    del x.b": ["x.a", "x.b"],
        "def f(x):\n    x.a: int = 1": ["x.a"],
        "def f(x):\n    setattr(x, 'a', 1)": ["x.?"],
        "def f(self):\n    setattr(self, 'a', 1)\n    self.x.y = 1": ["self.x.y"],
        "def f():\n    x = Thing()\n    x.a = 1\n    y = thing()\n    y.a = 1": ["y.a"],
        "def f():\n    x = Thing()\n    def g():\n        x.a = 1": [],
        "def f(xs):\n    for xs[0].a in xs: pass": ["xs[0].a"],
        "def f(x):\n    with x as x.a: pass": ["x.a"],
    }.items():
        assert [*assignments(source)] == found, source
