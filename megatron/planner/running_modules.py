"""RunningModules: the name of the module whose forward runs, for what a plan notes of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class RunningModules:
    """Follows the forwards of models while `followed`; of nested modules the innermost counts."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._inside: list[str] = []

    @property
    def name(self) -> str:
        """Within its model, as named_modules says; "" in the model itself and outside of all."""
        return self._inside[-1] if self._inside else ""

    def __bool__(self) -> bool:
        return bool(self._inside)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, modules are followed, also those whose forward raises."""
        handles = []
        for model in self._models:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(self._enter(name)))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._inside.append(name)

        return enter

    def _leave(self, *_: Any) -> None:
        self._inside.pop()
