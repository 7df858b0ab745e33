"""Which parts of which layers are offloaded, as data; nothing is moved here."""

import math
from collections.abc import Sequence

from megatron.core.transformer.offload_config import EXPERT_MODULES, OFFLOAD_MODULES, OffloadConfig

WHOLE_LAYER = "layer"


def plan_offload(config: OffloadConfig, has_experts: Sequence[bool]) -> list[frozenset[str]]:
    """The parts of each layer, in order, whose tensors go to the host; WHOLE_LAYER stands for all of them.

    The last layer keeps its tensors: its backward comes next, so that there would be no time to move them. Of the
    other layers' parts the first are chosen, whose tensors wait longest.
    """
    num_layers = len(has_experts)
    if config.cpu_offloading_num_layers:
        whole = config.cpu_offloading_num_layers
        return [frozenset({WHOLE_LAYER} if index < whole else ()) for index in range(num_layers)]
    parts = [
        (index, name)
        for index in range(num_layers - 1)
        for name in OFFLOAD_MODULES
        if name in config.offload_modules and (has_experts[index] or name not in EXPERT_MODULES)
    ]
    chosen = parts[: math.ceil(config.activation_offload_fraction * len(parts))]
    return [frozenset(name for layer, name in chosen if layer == index) for index in range(num_layers)]
