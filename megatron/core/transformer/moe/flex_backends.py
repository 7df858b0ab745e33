"""What --moe-token-dispatcher-type flex can be: libraries that send tokens in their own way, where a machine has them.

The registry is FLEX_BACKENDS; each back end's dispatcher is its own file. Buffers have a fixed size for all of them.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.device import default_device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.dispatch_deepep import MoEDeepEPTokenDispatcher
from megatron.core.transformer.moe.dispatch_static import MoEStaticAlltoAllTokenDispatcher, MoEStaticTokenDispatcher
from megatron.core.transformer.moe.symmetric_rows import build_symmetric_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

# The device of a run that is planned for another machine, see without_memory.
_PLANNED = "meta"


@dataclass(frozen=True)
class FlexBackend:
    """missing: what a run with these settings lacks for it here, in words; nothing if it can be used. dispatcher: None
    where something always is.
    """

    dispatcher: Callable[..., MoEStaticTokenDispatcher] | None
    missing: Callable[[TransformerConfig], list[str]]


def require_flex_backend(config: TransformerConfig) -> None:
    """Raises ValueError where the settings ask for a back end that this machine has not; the same on every rank."""
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "flex":
        return
    missing = FLEX_BACKENDS[config.moe_flex_dispatcher_backend].missing(config)
    if missing:
        raise ValueError(
            f"moe_token_dispatcher_type is flex with moe_flex_dispatcher_backend {config.moe_flex_dispatcher_backend}, "
            f"which needs {', '.join(missing)}: give --moe-token-dispatcher-type alltoall, which needs none of this"
        )


def build_flex_dispatcher(
    num_local_experts: int,
    local_expert_indices: Sequence[int],
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection | None = None,
) -> MoEStaticTokenDispatcher:
    """The dispatcher of the back end that the settings name, which is there: see require_flex_backend. Collective.

    On the device without memory, where no library runs, what fills the same buffers by torch's all-to-all.
    """
    build: Callable[..., MoEStaticTokenDispatcher] | None = FLEX_BACKENDS[config.moe_flex_dispatcher_backend].dispatcher
    assert build is not None, "required above"
    if default_device().type == _PLANNED:
        build = MoEStaticAlltoAllTokenDispatcher
    return build(num_local_experts, local_expert_indices, config=config, pg_collection=pg_collection)


def _missing_for_symm_mem(config: TransformerConfig) -> list[str]:
    device = default_device()
    return [] if device.type in ("cuda", _PLANNED) else [f"a CUDA device (here is {device.type})"]


def _missing_for_deepep(config: TransformerConfig) -> list[str]:
    missing = _missing_for_symm_mem(config)
    if default_device().type != _PLANNED and importlib.util.find_spec("deep_ep") is None:
        missing.append("the package deep_ep (not installed)")
    if config.params_dtype is not torch.bfloat16:
        missing.append("--bf16 (it sends no other tokens)")
    if config.moe_router_dtype == "fp64":
        missing.append("--moe-router-dtype fp32 (it sends weights in fp32)")
    return missing


def _missing_for_unsupported(config: TransformerConfig) -> list[str]:
    return ["support that this version has not"]


# By the value of --moe-flex-dispatcher-backend.
FLEX_BACKENDS = {
    "deepep": FlexBackend(MoEDeepEPTokenDispatcher, _missing_for_deepep),
    "hybridep": FlexBackend(None, _missing_for_unsupported),
    "ncclep": FlexBackend(None, _missing_for_unsupported),
    "symm_mem": FlexBackend(build_symmetric_dispatcher, _missing_for_symm_mem),
}
