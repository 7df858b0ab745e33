"""Selects the parts of layers that run as CUDA graphs, by the names of --cuda-graph-modules, and their participants.

How a part is captured and replayed is in cuda_graphs.py.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron.core.transformer.cuda_graphs import CudaGraphManager, PartParticipant
from megatron.core.transformer.layer_arrangement import use_parts
from megatron.core.transformer.moe.expert_step import CapturedForward, ExpertStep
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

# Waits until parameters of a data-parallel wrapper are gathered.
WaitForParams = Callable[[Iterable[nn.Parameter]], None]


@dataclass(frozen=True)
class _Part:
    """A part of a layer: its name in LayerParts, the owner of its parameters, and the MoE layer if it runs experts."""

    name: str
    owner: nn.Module
    experts: MoELayer | None = None


def graph_layers(
    model: nn.Module, manager: CudaGraphManager, *, modules: Sequence[str], wait_for_params: WaitForParams | None
) -> None:
    """Makes the named parts of all transformer layers of a chunk run from graphs.

    modules: names of --cuda-graph-modules. wait_for_params: is called with a part's parameters before each replay,
    since a replay runs no forward hooks of the modules inside; None if parameters are never gathered.
    """
    for layer in model.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        for module, part in _parts_of(layer).items():
            # The part moe_preprocess contains the router.
            is_inside = module == "moe_router" and "moe_preprocess" in modules
            if module in modules and not is_inside:
                participants: list[PartParticipant] = []
                if wait_for_params is not None:
                    participants.append(_GatheredParams(wait_for_params, part.owner))
                if part.experts is not None and part.experts.expert_step is not None:
                    participants.append(_Experts(part.experts))
                run = manager.graphed(
                    f"{module} of layer {layer.layer_number}",
                    part.owner,
                    inner=vars(layer.parts)[part.name],
                    participants=participants,
                )
                use_parts(layer, replace(layer.parts, **{part.name: run}))


def _parts_of(layer: TransformerLayer) -> dict[str, _Part]:
    """Returns the parts of a layer that can be captured, by the names of --cuda-graph-modules."""
    parts = {"attn": _Part("attn", layer.self_attention)}
    if not isinstance(layer.mlp, MoELayer):
        return {**parts, "mlp": _Part("mlp", layer.mlp)}
    return {
        **parts,
        "moe": _Part("mlp", layer.mlp, experts=layer.mlp),
        "moe_router": _Part("moe_router", layer.mlp.router),
        "moe_preprocess": _Part("moe_preprocess", layer.mlp.router),
        "experts": _Part("experts", layer.mlp.experts, experts=layer.mlp),
    }


class _GatheredParams(PartParticipant):
    """Waits for the parameter gathers of a part before each capture and replay."""

    def __init__(self, wait: WaitForParams, owner: nn.Module) -> None:
        self._wait, self._owner = wait, owner

    def prepare(self) -> None:
        """Waits until the part's parameters are gathered. Collective if a gather is due."""
        self._wait(self._owner.parameters())


class _Experts(PartParticipant):
    """Keeps the row counts and the stash of static experts correct while their part runs from graphs."""

    def __init__(self, layer: MoELayer) -> None:
        self._layer = layer

    def prepare(self) -> None:
        """Makes the stream wait for stash copies of groups that ran eagerly."""
        if self._step.stash is not None:
            self._step.stash.join()

    def new_account(self) -> CapturedForward:
        """Returns the record of the layer's captured forward."""
        return self._step.new_part()

    def capturing(self, account: CapturedForward) -> AbstractContextManager[None]:
        """Records rows and pages of the block in the account, instead of in the current step."""
        return self._step.capturing(account)

    def replaying(self, account: CapturedForward) -> Any:
        """Adds the captured forward to the stash's order of the step."""
        return self._step.replaying(account)

    def replayed(self, account: CapturedForward) -> None:
        """Adds the row counts of the replayed forward."""
        self._step.replayed(account)

    def replaying_backward(self, forward: Any) -> None:
        """Restores the rows of the forward from the stash."""
        if forward is not None:
            self._step.replaying_backward(forward)

    @property
    def _step(self) -> ExpertStep:
        # Read each time, since a trainer replaces the layer's own ExpertStep by one for all layers.
        assert self._layer.expert_step is not None, "graph_layers checked it"
        return self._layer.expert_step
