"""Names and pickled objects in checkpoints that Megatron-LM and Megatron-Core write, in either of their formats.

megatron_core_files.py and tools/legacy_checkpoint.py read such files with these allow-lists.
"""

import argparse
import collections
import signal
import types
from typing import Any

import numpy

from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend

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
