"""The least memory of a run, and the wording of whether it fits.

What a run has and keeps is measured in held_memory.py, what it will hold is planned in dry_run/.
"""

import torch

from megatron.core.device import default_device, total_memory_bytes
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.transformer_config import TransformerConfig

# How torch words it, of the CPU and of sizes beyond any; a GPU's allocator has a class of its own for it.
_NO_MEMORY_WORDS = ("can't allocate memory", "Storage size calculation overflowed", "Cannot allocate memory")

# The share of a device's memory that plans leave to the CUDA context and to gaps in the allocator's blocks.
_KEPT_FREE = 0.1


def fit_in_words(device: str, num_bytes: int, memory: int) -> str:
    """Returns whether a rank that takes num_bytes fits a device with that memory."""
    verdict = "fits" if num_bytes <= memory else "does NOT fit"
    return f"{verdict} {device}: {gib(num_bytes)} of {gib(memory)} GiB per rank"


def room_in_words(num_bytes: int, memory: int) -> str:
    """Returns a warning for what fits with little room; empty for what has room or does not fit at all."""
    if num_bytes > memory or not is_tight(num_bytes, memory):
        return ""
    return f"less than {_KEPT_FREE:.0%} left for the CUDA context and the allocator"


def is_tight(num_bytes: int, memory: int) -> bool:
    """Whether less than a tenth of the memory would be left."""
    return num_bytes > (1 - _KEPT_FREE) * memory


def gib(num_bytes: float) -> str:
    """Formats bytes as GiB: one decimal, four below 1 GiB."""
    size = num_bytes / 2**30
    return f"{size:.1f}" if size >= 1 else f"{size:.4f}"


def check_weights_fit(config: TransformerConfig, vocab_size: int) -> None:
    """Raises ValueError where the matrices of an average rank are larger than the memory of this machine.

    The operating system would end such a run without a word, after minutes of building layers. Weights on a GPU are
    left to its allocator, which says at once that there is no room; those on the meta device take none.
    """
    on_host = config.use_cpu_initialization or default_device().type == "cpu"
    if not on_host or config.init_model_with_meta_device or torch.get_default_device().type == "meta":
        return
    needed = _weights_of_a_rank(config, vocab_size) * config.params_dtype.itemsize
    available = total_memory_bytes(torch.device("cpu"))
    if needed > available:
        raise ValueError(
            f"the weights of a rank take {needed / 2**30:.1f} GiB or more, this machine has {available / 2**30:.1f}: "
            f"num_layers ({config.num_layers}), hidden_size ({config.hidden_size}), ffn_hidden_size "
            f"({config.ffn_hidden_size}) or the vocabulary ({vocab_size}) must be smaller, or tensor, pipeline and "
            "expert parallel sizes larger"
        )


def _weights_of_a_rank(config: TransformerConfig, vocab_size: int) -> int:
    """Elements of the large matrices, without the second one of gated layers, keys, values and output layer."""
    hidden, tp = config.hidden_size, config.tensor_model_parallel_size
    num_experts = config.num_moe_experts or 0
    moe_layers = sum(layers_with_experts(num_experts or None, config.moe_layer_freq, num_layers=config.num_layers))
    attention = 2 * hidden * (config.kv_channels or 0) * config.num_attention_heads // tp
    dense = 2 * hidden * (config.ffn_hidden_size or 0) // tp
    ffn, etp = config.moe_ffn_hidden_size or config.ffn_hidden_size or 0, config.expert_tensor_parallel_size or tp
    experts = num_experts // config.expert_model_parallel_size * 2 * hidden * ffn // etp
    layers = config.num_layers * attention + (config.num_layers - moe_layers) * dense + moe_layers * experts
    return (layers + vocab_size * hidden // tp) // config.pipeline_model_parallel_size


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether the error says that there was too little memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY_WORDS)
