"""Names of optimizer state in checkpoints, `optimizer.KIND.KEY OF THE PARAMETER`, and state as of a start."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from megatron.core.dist_checkpointing.mapping import ShardedTensor

# The kind of state that holds what is stepped of a 16-bit parameter.
MASTERS = "fp32_param"


def state_prefix(kind: str) -> str:
    """What goes before a parameter's key; kind: MASTERS, or torch's name of a state."""
    return f"optimizer.{kind}."


def is_state(key: str) -> bool:
    """Whether it is a key of optimizer state."""
    return key.startswith("optimizer.")


def parameter_key(key: str) -> str:
    """The key of the parameter that a key of optimizer state is for."""
    return key.split(".", 2)[2]


def fresh_state(weights: Sequence[ShardedTensor], state: Iterable[tuple[str, torch.dtype]]) -> list[ShardedTensor]:
    """State as of a start: of masters the weights, of all else zeros.

    weights: boxes of parameters, any shapes and dtypes. state: key and dtype of all there is, of any parameters. Gives
    as many boxes for each of `weights` as its parameter has kinds of state.
    """
    by_parameter: dict[str, list[tuple[str, torch.dtype]]] = {}
    for key, dtype in sorted(state, key=str):
        by_parameter.setdefault(parameter_key(key), []).append((key, dtype))
    return [
        replace(weight, key=key, data=_fresh(weight.data, dtype, is_master=key.startswith(state_prefix(MASTERS))))
        for weight in weights
        for key, dtype in by_parameter.get(weight.key, [])
    ]


def _fresh(weight: torch.Tensor, dtype: torch.dtype, *, is_master: bool) -> torch.Tensor:
    return weight.to(dtype) if is_master else torch.zeros_like(weight, dtype=dtype)
