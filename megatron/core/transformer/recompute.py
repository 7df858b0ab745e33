"""Layers and parts that backward recomputes: the plan as data, and the runners that follow it.

The mechanism is tensor_parallel/random.py's; nothing here looks at tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, recompute
from megatron.core.transformer.recompute_config import RecomputeConfig

_OF_DENSE_LAYERS = {"mlp"}
_OF_EXPERT_LAYERS = {"moe", "moe_act", "shared_experts"}
_INSIDE_MOE = {"moe_act", "shared_experts"}
# Where the modules of a part are in a layer.
_PLACES = {"core_attn": "self_attention", "mlp": "mlp", "shared_experts": "mlp.shared_experts"}
# Python modules whose classes draw no random numbers, or are Drawing.
_KNOWN = (
    "megatron.core.",
    "torch.nn.modules.container",
    "torch.nn.modules.linear",
    "torch.nn.modules.normalization",
)


@dataclass(frozen=True)
class LayerRecompute:
    """The parts of one layer that are recomputed in backward.

    segment: layers of one number are recomputed together, from the input of their first; None: not as a whole. modules:
    parts that are recomputed one by one, by their names in --recompute-modules.
    """

    segment: int | None = None
    modules: frozenset[str] = frozenset()

    @property
    def has_router(self) -> bool:
        """Whether the router of the layer's experts runs again."""
        return self.segment is not None or "moe" in self.modules


def plan_recompute(config: RecomputeConfig, has_experts: Sequence[bool]) -> list[LayerRecompute]:
    """One entry a layer, in order; has_experts: for each layer, whether it is a mixture of experts."""
    count = config.recompute_num_layers
    if config.recompute_granularity == "full":
        assert count is not None, "checked by validate_recompute"
        if config.recompute_method == "uniform":
            return [LayerRecompute(segment=index // count) for index in range(len(has_experts))]
        return [LayerRecompute(segment=index if index < count else None) for index in range(len(has_experts))]
    if config.recompute_granularity is None:
        return [LayerRecompute() for _ in has_experts]
    chosen = frozenset(config.recompute_modules or ())
    # Whoever runs the whole layer of experts again has no use for parts of it.
    of_experts = chosen - _OF_DENSE_LAYERS - (_INSIDE_MOE if "moe" in chosen else set())
    return [LayerRecompute(modules=of_experts if experts else chosen - _OF_EXPERT_LAYERS) for experts in has_experts]


def recomputed_parts(layer: nn.Module, modules: frozenset[str]) -> dict[str, Any]:
    """Runners of LayerParts, by name, for the parts of a layer that run again."""
    whole = modules & {"core_attn", "shared_experts"} | ({"mlp"} if modules & {"mlp", "moe"} else set())
    runners: dict[str, Any] = {
        name: Recomputed((layer,), draws_numbers=may_draw([_module_at(layer, _PLACES[name])])) for name in whole
    }
    if "layernorm" in modules:
        runners |= {"attn_norm": run_and_recompute, "mlp_norm": run_and_recompute}
    if "mla_up_proj" in modules:
        runners["mla_up_proj"] = run_and_recompute
    if "moe_act" in modules:
        runners["moe_act"] = run_and_recompute
    return runners


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A Run that keeps the arguments alone. owners: modules whose recorders must not count the second run."""

    owners: tuple[nn.Module, ...]
    draws_numbers: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        around = partial(_counted_already, self.owners)
        return recompute(function, *args, around=around, draws_numbers=self.draws_numbers, **kwargs)


def run_and_recompute(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[Tensor], None]]:
    """A RunAndRelease whose output is freed when released and computed again for backward; any shape and dtype."""
    # Norms, activation functions and projections draw nothing.
    part = CheckpointWithoutOutput(draws_numbers=False)
    return part.checkpoint(function, *args), part.discard_output_and_register_recompute


# A base class: each second run asks this of all modules of a layer, and to ask a protocol takes 20 us a module.
class Recorder(ABC):
    """A module that counts something in forward."""

    @abstractmethod
    def recomputing(self) -> AbstractContextManager[None]:
        """Inside, nothing is counted."""


class Drawing(ABC):
    """A module that may draw random numbers in forward; those inside it answer for themselves."""

    @property
    @abstractmethod
    def draws_numbers(self) -> bool:
        """Whether it does, in training."""


def may_draw(modules: Iterable[nn.Module]) -> bool:
    """Whether a forward of these may draw random numbers. Modules from elsewhere are taken to: they cannot be asked."""
    inner = (one for module in modules for one in module.modules())
    return any(
        not type(one).__module__.startswith(_KNOWN) or (isinstance(one, Drawing) and one.draws_numbers) for one in inner
    )


def _module_at(module: nn.Module, place: str) -> nn.Module:
    """The module at that place, or the last one on the way there."""
    for name in place.split("."):
        children = dict(module.named_children())
        if name not in children:
            break
        module = children[name]
    return module


@contextmanager
def _counted_already(owners: tuple[nn.Module, ...]) -> Iterator[None]:
    # Looked up now: a model hands its recorder to routers after its layers were made.
    modules = {module for owner in owners for module in owner.modules()}
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, Recorder):
                stack.enter_context(module.recomputing())
        yield
