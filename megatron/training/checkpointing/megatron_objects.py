"""Defines the names, arguments and pickled objects that checkpoints of Megatron-LM and Megatron-Core may contain.

megatron_core_files.py and legacy_files.py use these allow-lists to read such files.
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

# Values of checkpoint_version. Earlier versions store the rows of query, key and value in a different order.
VERSIONS = (2.0, 3.0)
# Values in addition to the model that are read, or whose absence docs/checkpoints.md states, or that only describe the
# save itself.
KNOWN_VALUES = {
    *("args", "iteration", "checkpoint_version", "optimizer", "opt_param_scheduler", "content_metadata"),
    *("num_floating_point_operations_so_far", "rng_state", "rerun_state_machine"),
}
# Module entries that are not weights: kernel states, step counts, and values that are recomputed.
NOT_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq", "local_tokens_per_expert")
# Linear layers that follow a norm and may contain it.
FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}


class Inert:
    """Placeholder for an object that holds no weights."""

    def __init__(self, *unused: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Names of classes, most of them Megatron's, that are replaced by Inert.
_INERT = (
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
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


# The `origin` of values that Megatron wrote, in its files or converted from them. The states of its random-number
# generators cannot be restored, so a load reseeds them without requiring --no-load-rng. Native checkpoints have no
# origin.
MEGATRON = "megatron"
# Arguments in a checkpoint that count samples.
SAMPLE_COUNTS = ("consumed_train_samples", "consumed_valid_samples")
# With these flags, the same weights describe an unsupported model.
_OTHER_MODELS = (
    "qk_l2_norm",
    "apply_residual_connection_post_layernorm",
    "no_rope_freq",
)


# Arguments that change the meaning of the same weights, and the values that are assumed if a checkpoint lacks them.
# Users' programs often store few arguments. A model with one of these would then load the weights without an error.
_SILENT_ARGUMENTS = {
    "layernorm_zero_centered_gamma": False,
    "use_mup": False,
    "rotary_interleaved": False,
    "softmax_type": "vanilla",
}


def _with_silent_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Adds missing values of the arguments that leave no trace in the weights.

    apply_layernorm_1p is the old name of layernorm_zero_centered_gamma.
    """
    renamed = {"layernorm_zero_centered_gamma": args["apply_layernorm_1p"]} if "apply_layernorm_1p" in args else {}
    return {**_SILENT_ARGUMENTS, **renamed, **args}


def json_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that JSON can represent: numbers, strings, and lists and dicts of these."""
    return {name: value for name, value in args.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def values_without_state(args: Mapping[str, Any], *, iteration: int) -> dict[str, Any]:
    """Returns the common values of a native checkpoint that contains weights, data position and arguments only.

    args: the arguments of the program that wrote the files. Raises ValueError naming an argument of an unsupported
    model.
    """
    for name in _OTHER_MODELS:
        if args.get(name):
            raise ValueError(f"{name} is {args[name]!r:.60}: must be unset, because such models are not supported")
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
