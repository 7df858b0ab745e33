"""Gives parts of layers their CUDA graphs, by the names of --cuda-graph-modules; what graphs do is cuda_graphs.py's."""

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

# Waits until a data-parallel wrapper's parameters may be read.
WaitForParams = Callable[[Iterable[nn.Parameter]], None]


@dataclass(frozen=True)
class _Part:
    """A part of a layer: its name in LayerParts, the module with its parameters, the experts that it runs, if any."""

    name: str
    owner: nn.Module
    experts: MoELayer | None = None


def graph_layers(
    model: nn.Module, manager: CudaGraphManager, *, modules: Sequence[str], wait_for_params: WaitForParams | None
) -> None:
    """Lets the named parts of all transformer layers of a chunk run from graphs.

    modules: names of --cuda-graph-modules. wait_for_params: called with a part's parameters
    before each replay, as the forward hooks of modules inside it are not; None: nobody gathers them.
    """
    for layer in model.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        for module, part in _parts_of(layer).items():
            # One graph for both.
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
    """Waits for the parameters of a part."""

    def __init__(self, wait: WaitForParams, owner: nn.Module) -> None:
        self._wait, self._owner = wait, owner

    def prepare(self) -> None:
        """Collective where a gather is due."""
        self._wait(self._owner.parameters())


class _Experts(PartParticipant):
    """Keeps the row counts and the stash of static experts correct while a part with them runs from graphs."""

    def __init__(self, layer: MoELayer) -> None:
        self._layer = layer

    def prepare(self) -> None:
        """Waits for stash copies of groups that ran eagerly, before those of a graph begin."""
        if self._step.stash is not None:
            self._step.stash.join()

    def new_account(self) -> CapturedForward:
        """Returns the account of the layer's captured forward."""
        return self._step.new_part()

    def capturing(self, account: CapturedForward) -> AbstractContextManager[None]:
        """Records the part's rows and pages for replays in place of this step, inside the block."""
        return self._step.capturing(account)

    def replaying(self, account: CapturedForward) -> Any:
        """Gives the stash its place in the step."""
        return self._step.replaying(account)

    def replayed(self, account: CapturedForward) -> None:
        """Counts the forward's rows."""
        self._step.replayed(account)

    def replaying_backward(self, forward: Any) -> None:
        """Restores the forward's rows from the stash."""
        if forward is not None:
            self._step.replaying_backward(forward)

    @property
    def _step(self) -> ExpertStep:
        # Looked up each time: a trainer gives all layers one of its own.
        assert self._layer.expert_step is not None, "of static experts"
        return self._layer.expert_step
