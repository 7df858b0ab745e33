"""Gives parts of layers their CUDA graphs, by the names of --cuda-graph-modules; what graphs do is cuda_graphs.py's."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from megatron.core.graph_capture import GraphParticipant
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.layer_arrangement import use_parts
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
            if module in modules:
                participants: list[GraphParticipant] = []
                if wait_for_params is not None:
                    participants.append(_GatheredParams(wait_for_params, part.owner))
                if part.experts is not None:
                    participants.append(_ExpertsOfPart(part.experts))
                run = manager.graphed(
                    f"{module} of layer {layer.layer_number}",
                    part.owner,
                    inner=vars(layer.parts)[part.name],
                    participants=participants,
                )
                use_parts(layer, replace(layer.parts, **{part.name: run}))


def _parts_of(layer: TransformerLayer) -> dict[str, _Part]:
    """What may be captured of a layer, by the names of --cuda-graph-modules."""
    parts = {"attn": _Part("attn", layer.self_attention)}
    if not isinstance(layer.mlp, MoELayer):
        return {**parts, "mlp": _Part("mlp", layer.mlp)}
    return {
        **parts,
        "moe": _Part("mlp", layer.mlp, experts=layer.mlp),
        "moe_router": _Part("moe_router", layer.mlp.router),
        "experts": _Part("experts", layer.mlp.experts, experts=layer.mlp),
    }


class _Participant:
    """A GraphParticipant of a part, for those who have something to do at a few moments alone."""

    def fingerprint(self) -> Hashable:
        """See GraphParticipant: sizes are asked of those who own them."""
        return None

    def prepare(self) -> None:
        """See GraphParticipant."""

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See GraphParticipant."""
        yield

    def captured(self) -> Any:
        """See GraphParticipant."""

    def dropped(self) -> None:
        """See GraphParticipant."""

    def replayed(self, account: Any) -> None:
        """See GraphParticipant."""


class _GatheredParams(_Participant):
    """Waits for the parameters of a part."""

    def __init__(self, wait: WaitForParams, owner: nn.Module) -> None:
        self._wait, self._owner = wait, owner

    def prepare(self) -> None:
        """Collective where a gather is due."""
        self._wait(self._owner.parameters())


class _ExpertsOfPart(_Participant):
    """Counts the rows of an expert layer while a part with its experts runs from graphs."""

    def __init__(self, layer: MoELayer) -> None:
        self._layer = layer
        self._rows: list[tuple[int, Tensor]] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The rows are counted by `replayed`."""
        if self._layer.expert_step is None:
            yield
            return
        with self._layer.expert_step.capturing() as self._rows:
            yield

    def captured(self) -> list[tuple[int, Tensor]]:
        """Of the forward: its layer's number, and its rows, in memory of the graph."""
        return self._rows

    def replayed(self, account: list[tuple[int, Tensor]]) -> None:
        """The forward has run."""
        if self._layer.expert_step is not None:
            for layer_number, num_rows in account:
                self._layer.expert_step.count(layer_number, num_rows)
