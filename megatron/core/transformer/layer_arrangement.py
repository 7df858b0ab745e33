"""Assigns to the layers of a block the runners that recompute or offload them or their parts.

The runners are chosen once, following the plans of recompute.py and activation_offload.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from megatron.core.device import default_device
from megatron.core.transformer.activation_offload import WHOLE_LAYER, ActivationOffloader, Offloaded, plan_offload
from megatron.core.transformer.module import LayerParts, MegatronModule, Run, run
from megatron.core.transformer.recompute import LayerRecompute, Recomputed, may_draw, plan_recompute, recomputed_parts
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that run together: their indices and their runner."""

    layers: range
    run: Run = run


@dataclass(frozen=True)
class Arrangement:
    """Steps of a block's forward: call `begin`, then run the segments in order.

    offloader: None if nothing is offloaded.
    """

    segments: tuple[Segment, ...]
    begin: Callable[[], None]
    offloader: ActivationOffloader | None = None


def arrange_layers(layers: nn.ModuleList, config: TransformerConfig, *, has_experts: Sequence[bool]) -> Arrangement:
    """Sets the part runners of each layer that is a MegatronModule, and returns how to run the layers.

    has_experts: for each layer, whether it is a mixture of experts.
    """
    recompute = plan_recompute(config, has_experts)
    for layer, its in zip(layers, recompute):
        use_parts(layer, replace(LayerParts(), **recomputed_parts(layer, its.modules)))
    offload = plan_offload(config, has_experts)
    # A model chunk may have nothing to offload even if other chunks do.
    if any(offload):
        return _with_offloading(layers, config, plan=offload)
    return Arrangement(_segments(layers, recompute), _nothing_to_begin)


def arrange_layer(layer: nn.Module, plan: LayerRecompute, *, inside: nn.Module) -> Run:
    """Sets the part runners of a layer that is not in a block, and returns the runner of the enclosing module `inside`.

    Such layers are never offloaded.
    """
    use_parts(layer, replace(LayerParts(), **recomputed_parts(layer, plan.modules)))
    return run if plan.segment is None else Recomputed(draws_numbers=may_draw((inside,)))


def use_parts(layer: nn.Module, parts: LayerParts) -> None:
    """Sets the part runners of every MegatronModule in the layer."""
    for module in layer.modules():
        if isinstance(module, MegatronModule):
            module.parts = parts


def _segments(layers: nn.ModuleList, plan: Sequence[LayerRecompute]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for number, indices in groupby(range(len(plan)), key=lambda index: plan[index].segment):
        members = list(indices)
        again: Run = run
        if number is not None:
            owners = tuple(layers[index] for index in members)
            again = Recomputed(draws_numbers=may_draw(owners))
        segments.append(Segment(range(members[0], members[-1] + 1), again))
    return tuple(segments)


def _with_offloading(
    layers: nn.ModuleList, config: TransformerConfig, *, plan: Sequence[frozenset[str]]
) -> Arrangement:
    offloader = ActivationOffloader(layers, default_device(), min_elements=config.min_offloaded_tensor_size)
    # Layers and parts that are not offloaded are wrapped as well, because their backward triggers the prefetch of
    # offloaded ones.
    runs: list[Run] = [run] * len(layers)
    if config.cpu_offloading_num_layers:
        for index in range(config.cpu_offloading_num_layers + 1):
            runs[index] = Offloaded(offloader, run, layer=index, moves=WHOLE_LAYER in plan[index])
    for index, layer in enumerate(layers):
        if config.offload_modules and isinstance(layer, MegatronModule):
            inner = vars(layer.parts)
            around = {
                name: Offloaded(offloader, inner[name], layer=index, moves=name in plan[index])
                for name in config.offload_modules
            }
            use_parts(layer, replace(layer.parts, **around))
    segments = tuple(Segment(range(index, index + 1), one) for index, one in enumerate(runs))
    return Arrangement(segments, offloader.begin_pass, offloader)


def _nothing_to_begin() -> None:
    pass
