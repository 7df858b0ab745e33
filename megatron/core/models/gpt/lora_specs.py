"""Which linear layers of a model's spec have low-rank adapters; what these compute is lora.py's."""

import dataclasses
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.lora import LoRAColumnParallelLinear, LoRAReplicatedLinear, LoRARowParallelLinear
from megatron.core.transformer.moe.experts import ExpertAdapter, GroupedMLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

_ADAPTED = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    ReplicatedLinear: LoRAReplicatedLinear,
    RowParallelLinear: LoRARowParallelLinear,
}


def with_adapters(spec: Any, targets: list[str]) -> Any:
    """A spec, or a dataclass of specs, in which the linear layers of these names have adapters; others stay."""
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(spec, submodules=with_adapters(spec.submodules, targets))
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    names = [part.name for part in dataclasses.fields(spec)]
    if isinstance(spec, GroupedMLPSubmodules):
        # Their weights are no linear layers of their own: adapters stand beside them.
        return dataclasses.replace(spec, **{name: ExpertAdapter for name in names if name in targets})
    changed = {}
    for name in names:
        value = vars(spec)[name]
        is_target = name in targets and isinstance(value, type)
        changed[name] = _ADAPTED.get(value, value) if is_target else with_adapters(value, targets)
    return dataclasses.replace(spec, **changed)
