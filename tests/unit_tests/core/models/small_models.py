"""Small GPT models for tests, and the weights of Hugging Face models under Megatron's names; no tests here."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

SEQ, BATCH, VOCAB = 16, 2, 96
LLAMA_LIKE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}


def small_config(**fields: Any) -> TransformerConfig:
    """A configuration of 2 layers, hidden 32, without dropout, with `fields` on top."""
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_seed": 7,
        "init_method_std": 0.2,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**defaults, **fields})


def small_model(config: TransformerConfig, **arguments: Any) -> GPTModel:
    """A GPTModel of that configuration for 96 tokens and 16 positions, rotary unless `arguments` say otherwise."""
    defaults: dict[str, Any] = {"position_embedding_type": "rope", "vocab_size": VOCAB, "max_sequence_length": SEQ}
    return GPTModel(config, get_gpt_decoder_block_spec(config), **{**defaults, **arguments})


def small_batch(vocab_size: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, position_ids and labels: each [2, 16], int64."""
    tokens = torch.randint(0, vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], torch.arange(SEQ).expand(BATCH, SEQ), tokens[:, 1:]


def loss_of(model: GPTModel, **arguments: Any) -> Tensor:
    """Mean loss of the small batch, with its graph: scalar."""
    input_ids, position_ids, labels = small_batch(model.unpadded_vocab_size)
    return model(input_ids, position_ids, arguments.pop("attention_mask", None), labels=labels, **arguments).mean()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def from_hugging_face(tensors: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Weights (or gradients) of a Llama or Mixtral model as those of GPTModel with grouped experts, in fp32."""
    renamed = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        renamed["output_layer.weight"] = tensors["lm_head.weight"]
    for number in range(config.num_layers):
        theirs, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        layer = {name.removeprefix(theirs): value for name, value in tensors.items() if name.startswith(theirs)}
        renamed |= {ours + name: value for name, value in _layer(layer, config).items()}
    return renamed


def _layer(layer: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    assert config.num_query_groups is not None
    q, k, v = (
        layer[f"self_attn.{name}_proj.weight"].unflatten(0, (config.num_query_groups, -1)) for name in ("q", "k", "v")
    )
    renamed = {
        "input_layernorm.weight": layer["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": torch.cat((q, k, v), dim=1).flatten(0, 1),
        "self_attention.linear_proj.weight": layer["self_attn.o_proj.weight"],
    }
    if "mlp.gate.weight" not in layer:
        fc1 = (layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"])
        return renamed | {
            "mlp.linear_fc1.weight": torch.cat(fc1),
            "mlp.linear_fc2.weight": layer["mlp.down_proj.weight"],
        }
    gate_up, down = layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"]  # [E, 2F, H], [E, H, F]
    return renamed | {
        "mlp.router.weight": layer["mlp.gate.weight"],
        "mlp.experts.weight1": gate_up.transpose(1, 2).reshape(config.hidden_size, -1),
        "mlp.experts.weight2": down.transpose(1, 2).reshape(-1, config.hidden_size),
    }
