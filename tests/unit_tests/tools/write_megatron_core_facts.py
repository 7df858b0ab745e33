"""Writes checkpoints with the package megatron-core, and describes each one's keys, shapes and boxes in a JSON file.

This is not a test. Run it on a CPU where the package is installed and this project is not on the path:
    torchrun --nproc-per-node TP write_megatron_core_facts.py CASE FOLDER
megatron_core_facts.json is assembled from its output. FOLDER.logits contains the model's logits for IDS.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import megatron.core.tensor_parallel.random as rng
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

IDS = torch.arange(16).view(2, 8) * 7 % 100
SHAPE = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
PLAIN = {
    "use_cpu_initialization": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "params_dtype": torch.float32,
}
GATED = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
EXPERTS = {
    **GATED,
    "num_query_groups": 2,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_token_dispatcher_type": "allgather",
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "gated": {**GATED, "num_query_groups": 2, "qk_layernorm": True, "add_qkv_bias": True},
    "experts": EXPERTS,
    "single": {**EXPERTS, "moe_layer_freq": [0, 1, 1]},
    "latent": {**GATED, **LATENT, "multi_latent_attention": True, "rope_type": "rope", "mtp_num_layers": 1},
}


def without_a_gpu() -> None:
    """Replaces functions of the package that require CUDA or Transformer Engine, for models that use neither."""

    @contextlib.contextmanager
    def fork(*unused: Any) -> Iterator[None]:
        yield

    plain_init = DotProductAttention.__init__

    def init(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        plain_init(self, *args, **options)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *unused: None
    rng.CudaRNGStatesTracker.fork = fork
    DotProductAttention.__init__ = init
    multi_latent_attention.TELinear = type("TELinear", (), {})
    moe_utils.te_general_gemm = None


def build(case: str) -> GPTModel:
    kind = MLATransformerConfig if case == "latent" else TransformerConfig
    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = kind(**SHAPE, **PLAIN, **CASES[case], tensor_model_parallel_size=tp)
    layers = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    further = specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if case == "latent" else None
    learned = case == "dense"
    torch.manual_seed(7)
    return GPTModel(
        config,
        layers,
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type="learned_absolute" if learned else "rope",
        share_embeddings_and_output_weights=learned,
        mtp_block_spec=further,
        parallel_output=False,
    ).eval()


def main(case: str, folder: Path) -> None:
    """Writes FOLDER, FOLDER.json and FOLDER.logits."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    without_a_gpu()
    model = build(case)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
    folder.mkdir(parents=True, exist_ok=True)
    if case != "latent":  # its multi-token prediction layers require labels
        with torch.no_grad():
            logits = model(IDS, torch.arange(8).expand(2, 8), mask)
        torch.save(logits, f"{folder}.logits")
    state = model.sharded_state_dict(metadata={"singleton_local_shards": case == "single"})
    common = {"iteration": 5, "checkpoint_version": 3.0, "args": argparse.Namespace(**SHAPE)}
    dist_checkpointing.save({**common, "model": state}, str(folder))
    if dist.get_rank() == 0:
        entries = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        tensors = {
            key: [list(entry.size), sorted([list(c.offsets), list(c.sizes)] for c in entry.chunks)]
            for key, entry in entries.items()
            if isinstance(entry, dcp.metadata.TensorStorageMetadata)
        }
        Path(f"{folder}.json").write_text(json.dumps(tensors))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
