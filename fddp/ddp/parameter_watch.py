"""Detection of replaced and unfrozen parameters.

Every forward compares the entries of the modules' dictionaries by identity, at some 30 ns an entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Literal

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter

from fddp.ddp.arguments import managed
from fddp.native.torch_private import is_gradtrackingtensor

Change = Literal["none", "swapped", "changed"]


class ParameterWatch:
    """Watches the parameters of one module, except for ignored ones.

    Attributes:
        params: trainable parameters by name, as of the last `find_replaced`.
        latest: the same in one dictionary, which every `find_replaced` updates.
    """

    def __init__(self, module: Module, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.latest: dict[str, Parameter] = {}
        self.find_replaced()

    def find_replaced(self) -> Mapping[str, Parameter]:
        """Record the current parameters, and return the trainable ones."""
        every = managed(self._module, self._ignored)
        self.params = {name: param for name, param in every.items() if param.requires_grad}
        self.latest.clear()
        self.latest.update(self.params)
        self._observe(every)
        return self.params

    def _observe(self, every: Mapping[str, Parameter]) -> None:
        # Those of TorchScript have no dictionaries; their parameters cannot be replaced.
        modules = [m for m in self._module.modules() if not isinstance(m, ScriptModule)]
        self._tables = [m._parameters for m in modules]
        self._buffers = [m._buffers for m in modules]
        children = [m._modules for m in modules]
        self._watched: list[Mapping[str, object]] = [*self._tables, *children]
        self._seen = self._entries()
        self._frozen = [param for name, param in every.items() if name not in self.params]

    def change(self) -> Change:
        """Return the change since `find_replaced`.

        "swapped" means that `functional_call` has put other tensors in the parameters' places.
        Newly frozen parameters are no change, and neither are other modules with the same
        parameters, such as those of `convert_sync_batchnorm`.
        """
        entries = self._entries()
        if len(entries) != len(self._seen) or not all(map(is_, entries, self._seen)):
            there = (entry for table in self._tables for entry in table.values())
            if any(not isinstance(e, Parameter) for e in there if isinstance(e, Tensor)):
                return "swapped"
            every = managed(self._module, self._ignored)
            if not self._has_same_params(every):
                return "changed"
            self._observe(every)
        is_thawed = self._frozen and any(param.requires_grad for param in self._frozen)
        return "changed" if is_thawed else "none"

    def _entries(self) -> list[object]:
        return list(chain.from_iterable(table.values() for table in self._watched))

    def _has_same_params(self, every: Mapping[str, Parameter]) -> bool:
        # Parameters that were frozen since are still in the plan.
        now = [(name, id(p)) for name, p in every.items() if p.requires_grad or name in self.params]
        return now == [(name, id(param)) for name, param in self.params.items()]

    @property
    def are_others_tracked(self) -> bool:
        """True if tensors are differentiated that `functional_call` has put in place."""
        there: list[Tensor | None] = [e for table in self._tables for e in table.values()]
        return any(
            entry.requires_grad or is_gradtrackingtensor(entry)
            for entry in there
            if entry is not None and not isinstance(entry, Parameter)
        )

    @property
    def all_frozen(self) -> bool:
        """True if no parameter requires a gradient at present."""
        for param in self.params.values():  # noqa: SIM110  # usually the first decides
            if param.requires_grad:
                return False
        return True

    @property
    def has_buffers(self) -> bool:
        """True if any module has a buffer, including ignored ones."""
        return any(self._buffers)
