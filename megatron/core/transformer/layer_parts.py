"""How each named part of a layer is run: as it is, recomputed in backward, with its saved tensors on the host, or from
CUDA graphs.

What a layer's parts are is written in the layer; which runner each gets is decided in layer_arrangement.py, and for
graphs in graphed_layers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Run(function, *args, **kwargs) returns function(*args, **kwargs).
Run = Callable[..., Any]
# RunAndRelease(function, *args) returns (function(*args), release). The caller hands release what it computed from
# the output, a tensor that all of the output's gradients come through; the output may not be read after that.
RunAndRelease = Callable[..., tuple[Any, Callable[[Tensor], None]]]


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs)."""
    return function(*args, **kwargs)


def run_and_keep(function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[Tensor], None]]:
    """function(*args), which stays in memory as long as anyone needs it: any shape and dtype; and nothing to do."""
    return function(*args), _release_nothing


@dataclass(frozen=True)
class LayerParts:
    """The runners of one layer's parts, by the names of --recompute-modules, --offload-modules, --cuda-graph-modules.

    attn: the whole attention layer. mla_up_proj: queries, keys and values of latent attention from what is projected
    down, inside qkv_linear, which there is all that makes them. mlp: the whole feed-forward layer, dense or with
    experts.
    moe_preprocess: the router, and what a dispatcher does before it sends. moe_router: inside it, the router alone.
    """

    attn_norm: RunAndRelease = run_and_keep
    attn: Run = run
    qkv_linear: Run = run
    mla_up_proj: RunAndRelease = run_and_keep
    core_attn: Run = run
    attn_proj: Run = run
    mlp_norm: RunAndRelease = run_and_keep
    mlp: Run = run
    moe_preprocess: Run = run
    moe_router: Run = run
    experts: Run = run
    expert_fc1: Run = run
    moe_act: RunAndRelease = run_and_keep
    shared_experts: Run = run


def _release_nothing(consumed: Tensor) -> None:
    pass
