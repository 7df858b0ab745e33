"""Names, arguments and pickled objects in checkpoints that Megatron-LM and Megatron-Core write, in either format.

megatron_core_files.py and legacy_files.py read such files with these allow-lists.
"""

import argparse
import collections
import signal
import types
from collections.abc import Mapping
from typing import Any

import numpy

from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend
from megatron.training.checkpointing.train_state import TrainState

# Entries of modules that are no weights: kernel states, counts of a step, recomputed values.
NOT_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq", "local_tokens_per_expert")
# Linear layers that a norm precedes, and that may contain it.
FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}


class Inert:
    """Placeholder for one of Megatron's objects that holds no weights."""

    def __init__(self, *unused: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Megatron's names of classes that are replaced by Inert.
_INERT = (
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.CudaGraphScope",
)
# Other objects allowed in a file: arguments, counters and generator states.
ALLOWED: list[Any] = [
    argparse.Namespace,
    types.SimpleNamespace,
    collections.deque,
    signal.Signals,
    ModelType,
    AttnBackend,
    numpy.ndarray,
    numpy.dtype,
    type(numpy.dtype(numpy.uint32)),
    *((numpy.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((Inert, name) for name in _INERT),
]


# The `origin` of values that Megatron wrote, in its files or converted ones. Its generators cannot be continued, so a
# load seeds them from scratch and does not ask for --no-load-rng. Checkpoints of our runs have no origin.
MEGATRON = "megatron"
# Arguments in a checkpoint that count samples.
SAMPLE_COUNTS = ("consumed_train_samples", "consumed_valid_samples")
# With these flags the same weights are a model that does not exist here.
_OTHER_MODELS = (
    "qk_l2_norm",
    "apply_residual_connection_post_layernorm",
    "no_rope_freq",
)


# Arguments that give equal weights another meaning, and their values where a checkpoint lacks them. Programs of users
# often store few arguments, and a model with one of these would otherwise load such weights without a word.
_SILENT_ARGUMENTS = {
    "layernorm_zero_centered_gamma": False,
    "use_mup": False,
    "rotary_interleaved": False,
    "softmax_type": "vanilla",
}


def _with_silent_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the arguments that no weight shows. apply_layernorm_1p is an old name of layernorm_zero_centered_gamma."""
    renamed = {"layernorm_zero_centered_gamma": args["apply_layernorm_1p"]} if "apply_layernorm_1p" in args else {}
    return {**_SILENT_ARGUMENTS, **renamed, **args}


def json_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are numbers, strings, or lists and dicts of them."""
    return {name: value for name, value in args.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def values_without_state(args: Mapping[str, Any], *, iteration: int) -> dict[str, Any]:
    """Returns the common values of a checkpoint of ours that has weights, data position and arguments.

    args: the arguments of the program that wrote the files. Raises ValueError naming the argument of a model that does
    not exist here.
    """
    for name in _OTHER_MODELS:
        if args.get(name):
            raise ValueError(f"{name} is {args[name]!r:.60}: such models are not known here, must be unset")
    args = _with_silent_arguments(args)
    state = TrainState(iteration=iteration)
    state.load_state_dict({name: args.get(name) or 0 for name in SAMPLE_COUNTS})
    return {
        "iteration": iteration,
        "train_state": state.state_dict(),
        "args": json_values(args),
        "contents": {"optimizer": False, "rng": False},
        "origin": MEGATRON,
        "frozen": [],
    }
