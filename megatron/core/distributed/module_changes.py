"""WrappedParams: what was done to a wrapped module that its buffers do not know of, in words. It changes nothing."""

from collections.abc import Collection

from torch import nn

from megatron.core.dist_checkpointing.logical import canonical_name


class WrappedParams:
    """The parameters of a module as they are now, of which `wrapped` are in buffers."""

    def __init__(self, module: nn.Module, wrapped: Collection[nn.Parameter]) -> None:
        self._module, self._wrapped = module, frozenset(wrapped)
        self._at_start = dict(module.named_parameters())
        self._addresses = {param: param.data_ptr() for param in wrapped}

    def find_problem(self) -> str | None:
        """The first change after which gradients or updates would miss a parameter; None: there is none."""
        now = dict(self._module.named_parameters())
        for name, param in now.items():
            if param.requires_grad == (param in self._wrapped):
                continue
            before = self._at_start.get(name)
            if before is param:
                what = "unfrozen" if param.requires_grad else "frozen"
            else:
                what = "added" if before is None else "replaced"
            return _changed(name, what)
        if len(now) < len(self._at_start):
            return _changed(next(name for name in self._at_start if name not in now), "removed")
        lost = next((n for n, p in self._at_start.items() if p in self._wrapped and now.get(n) is not p), None)
        return self._find_moved(now) if lost is None else _changed(lost, "replaced")

    def _find_moved(self, params: dict[str, nn.Parameter]) -> str | None:
        # No longer a view: forward would read what nobody updates.
        for name, param in params.items():
            if param.data_ptr() != self._addresses.get(param, param.data_ptr()):
                return _changed(name, "moved, converted or given other data")
        return None


def _changed(name: str, what: str) -> str:
    return (
        f"parameter {canonical_name(name)} was {what} after the module was wrapped in DistributedDataParallel: "
        "wrap the module, and build its optimizer, after such changes, between steps after release()"
    )
