"""Models of transformers with small random weights, derived from configs of published models. Contains no tests."""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.tools.safetensors_files import TensorFiles
from tests.unit_tests.tools.hugging_face.known_configs import KNOWN_CONFIGS

VOCABULARY, POSITIONS, LAYERS = 300, 64, 4
_WIDTHS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    # Large, so that every part of the model matters.
    "initializer_range": 0.1,
}
_FEW_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "moe_intermediate_size": 32,
}

# Fields that make each preset's model smaller. Features that a preset disables but its family supports are enabled.
SMALL: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {},
    "llama3.2-1b": {"head_dim": 24},
    "qwen2-7b": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "qwen3-8b": {"head_dim": 24},
    "mixtral-8x7b": {"sliding_window": 9},
    "qwen2-57b-a14b": {
        **_FEW_EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "qwen3-30b-a3b": {
        **_FEW_EXPERTS,
        "num_experts": 8,
        "head_dim": 24,
        "mlp_only_layers": [2],
        "use_sliding_window": True,
        "sliding_window": 7,
        # Ignored in this model, unlike in the dense one.
        "max_window_layers": 2,
    },
    "glm-4.5": {
        **_FEW_EXPERTS,
        "head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek-v2-lite": {**_LATENT, "num_experts_per_tok": 3, "n_routed_experts": 8},
    "deepseek-v2": {
        **_LATENT,
        "q_lora_rank": 40,
        "num_experts_per_tok": 3,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek-v3": {
        **_LATENT,
        "q_lora_rank": 40,
        "num_experts_per_tok": 4,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "gpt-oss-20b": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 24,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
}
HAS_EXPERTS = {name for name, changes in SMALL.items() if "num_experts_per_tok" in changes} | {"mixtral-8x7b"}


def small_settings(name: str) -> dict[str, Any]:
    """Returns the config.json fields of a preset's small model."""
    return {**KNOWN_CONFIGS[name], **_WIDTHS, **SMALL[name]}


def model_on(device: str, config: dict[str, Any]) -> Any:
    """Builds the transformers model of a config.json, with its default initialization."""
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "dtype")}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings)).eval()


def small_model(name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a new copy of a preset's small model, with random values in every tensor."""
    return copy.deepcopy(_small_model(name)).to(dtype)


@functools.cache
def _small_model(name: str) -> Any:
    torch.manual_seed(0)
    model = model_on("cpu", small_settings(name))
    with torch.no_grad():
        # Initial biases of 0 and norm weights of 1 would hide mistakes.
        for tensor_name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.dim() == 1 and "inv_freq" not in tensor_name:
                value.add_(0.1 * torch.randn_like(value))
    return model


def saved(model: Any, folder: Path, *, max_shard_size: str = "100KB") -> Path:
    """Saves the model with transformers, in several files, and returns the folder."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def hub_gradients(model: Any) -> dict[str, Tensor]:
    """Returns a model's gradients under the names in its files, by saving them as if they were weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, own in zip(twin.parameters(), model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(own) if own.grad is None else own.grad)
    with tempfile.TemporaryDirectory() as folder:
        files = TensorFiles(saved(twin, Path(folder)))
        return {name: files.read(name) for name in files.kinds}


def tokens_of(seed: int, *, batch: int = 2, length: int = 32) -> Tensor:
    """Draws token ids: [batch, length], int64."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
