"""Plan of the layers and parts that backward recomputes, and the runners that execute it.

The recompute mechanism is in tensor_parallel/random.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, recompute
from megatron.core.transformer.recompute_config import RecomputeConfig

_OF_DENSE_LAYERS = {"mlp"}
_OF_EXPERT_LAYERS = {"moe", "shared_experts"}
_INSIDE_MOE = {"shared_experts"}
# Paths of parts' modules within a layer.
_PLACES = {"core_attn": "self_attention", "mlp": "mlp", "shared_experts": "mlp.shared_experts"}
# Python modules whose classes draw no random numbers unless they subclass Drawing.
_KNOWN = (
    "megatron.core.",
    "torch.nn.modules.container",
    "torch.nn.modules.linear",
    "torch.nn.modules.normalization",
)


@dataclass(frozen=True)
class LayerRecompute:
    """Recompute plan of one layer.

    segment: layers with the same number are recomputed together, from the input of the first; None if the layer is not
    recomputed as a whole. modules: parts that are recomputed separately, named as in --recompute-modules.
    """

    segment: int | None = None
    modules: frozenset[str] = frozenset()


def plan_recompute(config: RecomputeConfig, has_experts: Sequence[bool]) -> list[LayerRecompute]:
    """Returns the plan of each layer. has_experts: for each layer, whether it is a mixture of experts."""
    count = config.recompute_num_layers
    if config.recompute_granularity == "full":
        assert count is not None, "checked by validate_recompute"
        if config.recompute_method == "uniform":
            return [LayerRecompute(segment=index // count) for index in range(len(has_experts))]
        return [LayerRecompute(segment=index if index < count else None) for index in range(len(has_experts))]
    if config.recompute_granularity is None:
        return [LayerRecompute() for _ in has_experts]
    # Backward computes moe_act, the result of the experts' activation, in any case.
    chosen = frozenset(config.recompute_modules or ()) - {"moe_act"}
    # Parts of an expert layer that is recomputed as a whole need no separate recompute.
    of_experts = chosen - _OF_DENSE_LAYERS - (_INSIDE_MOE if "moe" in chosen else set())
    return [LayerRecompute(modules=of_experts if experts else chosen - _OF_EXPERT_LAYERS) for experts in has_experts]


def recomputed_parts(layer: nn.Module, modules: frozenset[str]) -> dict[str, Any]:
    """Returns the recompute runners of a layer, by LayerParts name. modules: the parts to recompute."""
    whole = modules & {"core_attn", "shared_experts"} | ({"mlp"} if modules & {"mlp", "moe"} else set())
    runners: dict[str, Any] = {
        name: Recomputed(draws_numbers=may_draw([_module_at(layer, _PLACES[name])])) for name in whole
    }
    if "layernorm" in modules:
        runners |= {"attn_norm": run_and_recompute, "mlp_norm": run_and_recompute}
    if "mla_up_proj" in modules:
        runners["mla_up_proj"] = run_and_recompute
    return runners


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A Run that saves only the arguments and recomputes the function in backward.

    draws_numbers: whether the function draws random numbers.
    """

    draws_numbers: bool

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return recompute(function, *args, draws_numbers=self.draws_numbers, **kwargs)


def run_and_recompute(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[Tensor], None]]:
    """A RunAndRelease that frees the output, any shape and dtype, on release and recomputes it for backward."""
    # Norms, activation functions and projections draw no random numbers.
    part = CheckpointWithoutOutput(draws_numbers=False)
    return part.checkpoint(function, *args), part.discard_output_and_register_recompute


class Drawing(ABC):
    """Base class of modules that may draw random numbers in forward. Submodules are checked separately."""

    @property
    @abstractmethod
    def draws_numbers(self) -> bool:
        """Whether the module draws random numbers in training."""


def may_draw(modules: Iterable[nn.Module]) -> bool:
    """Returns whether the forward of any of these modules may draw random numbers. Unknown classes count as drawing."""
    inner = (one for module in modules for one in module.modules())
    return any(
        not type(one).__module__.startswith(_KNOWN) or (isinstance(one, Drawing) and one.draws_numbers) for one in inner
    )


def _module_at(module: nn.Module, place: str) -> nn.Module:
    """Returns the submodule at a dotted path, or the last module on the path that exists."""
    for name in place.split("."):
        children = dict(module.named_children())
        if name not in children:
            break
        module = children[name]
    return module
