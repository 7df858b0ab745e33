"""Layers and parts that backward recomputes: the plan as data, and the runners that execute it.

The mechanism is in tensor_parallel/random.py; this file does not handle tensors.
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
# Locations of a part's modules in a layer.
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

    segment: layers with the same number are recomputed together, from the input of the first; None means not as a
    whole. modules: parts that are recomputed one by one, by their names in --recompute-modules.
    """

    segment: int | None = None
    modules: frozenset[str] = frozenset()

    @property
    def has_router(self) -> bool:
        """Whether the router of the layer's experts is recomputed."""
        return self.segment is not None or "moe" in self.modules


def plan_recompute(config: RecomputeConfig, has_experts: Sequence[bool]) -> list[LayerRecompute]:
    """Returns one entry per layer, in order; has_experts: for each layer, whether it is a mixture of experts."""
    count = config.recompute_num_layers
    if config.recompute_granularity == "full":
        assert count is not None, "checked by validate_recompute"
        if config.recompute_method == "uniform":
            return [LayerRecompute(segment=index // count) for index in range(len(has_experts))]
        return [LayerRecompute(segment=index if index < count else None) for index in range(len(has_experts))]
    if config.recompute_granularity is None:
        return [LayerRecompute() for _ in has_experts]
    chosen = frozenset(config.recompute_modules or ())
    # If the whole expert layer is recomputed, recomputing parts of it is pointless.
    of_experts = chosen - _OF_DENSE_LAYERS - (_INSIDE_MOE if "moe" in chosen else set())
    return [LayerRecompute(modules=of_experts if experts else chosen - _OF_EXPERT_LAYERS) for experts in has_experts]


def recomputed_parts(layer: nn.Module, modules: frozenset[str]) -> dict[str, Any]:
    """Returns runners of LayerParts, by name, for the recomputed parts of a layer."""
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
    """A Run that saves only the arguments. owners: modules whose recorders must ignore the second run."""

    owners: tuple[nn.Module, ...]
    draws_numbers: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        around = partial(_counted_already, self.owners)
        return recompute(function, *args, around=around, draws_numbers=self.draws_numbers, **kwargs)


def run_and_recompute(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[Tensor], None]]:
    """A RunAndRelease whose output is freed when released and recomputed for backward; any shape and dtype."""
    # Norms, activation functions and projections draw no random numbers.
    part = CheckpointWithoutOutput(draws_numbers=False)
    return part.checkpoint(function, *args), part.discard_output_and_register_recompute


# A base class, because each second run checks all modules of a layer, and checking a protocol takes 20 us per module.
class Recorder(ABC):
    """A module that records statistics in forward."""

    @abstractmethod
    def recomputing(self) -> AbstractContextManager[None]:
        """Stops recording inside the block."""


class Drawing(ABC):
    """A module that may draw random numbers in forward; modules inside it are checked separately."""

    @property
    @abstractmethod
    def draws_numbers(self) -> bool:
        """Whether the module draws random numbers in training."""


def may_draw(modules: Iterable[nn.Module]) -> bool:
    """Returns whether a forward of these modules may draw random numbers. External modules are assumed to do so."""
    inner = (one for module in modules for one in module.modules())
    return any(
        not type(one).__module__.startswith(_KNOWN) or (isinstance(one, Drawing) and one.draws_numbers) for one in inner
    )


def _module_at(module: nn.Module, place: str) -> nn.Module:
    """Returns the module at that path, or the last one on the path."""
    for name in place.split("."):
        children = dict(module.named_children())
        if name not in children:
            break
        module = children[name]
    return module


@contextmanager
def _counted_already(owners: tuple[nn.Module, ...]) -> Iterator[None]:
    # Looked up now, because a model assigns its recorder to routers after its layers were built.
    modules = {module for owner in owners for module in owner.modules()}
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, Recorder):
                stack.enter_context(module.recomputing())
        yield
