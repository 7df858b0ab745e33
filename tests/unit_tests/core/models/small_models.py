"""Small GPT models, and conversion of Hugging Face weights to Megatron's names. Contains no tests."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

SEQ, BATCH, VOCAB = 16, 2, 96
LLAMA_LIKE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}


# All widths are different.
LATENT: dict[str, Any] = {
    **LLAMA_LIKE,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 7,
}


def small_config(**fields: Any) -> TransformerConfig:
    """Returns a configuration of 2 layers and hidden size 32, without dropout, updated with `fields`."""
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
    """Builds a GPTModel of the configuration for 96 tokens and 16 positions, rotary unless `arguments` override it."""
    defaults: dict[str, Any] = {"position_embedding_type": "rope", "vocab_size": VOCAB, "max_sequence_length": SEQ}
    layers = get_gpt_decoder_block_spec(config)
    defaults["mtp_block_spec"] = get_gpt_mtp_block_spec(config, layers)
    return GPTModel(config, layers, **{**defaults, **arguments})


def small_batch(vocab_size: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Returns input_ids, position_ids and labels, each [2, 16], int64."""
    tokens = torch.randint(0, vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], torch.arange(SEQ).expand(BATCH, SEQ), tokens[:, 1:]


def loss_of(model: GPTModel, **arguments: Any) -> Tensor:
    """Returns the mean loss of the small batch, a scalar with its autograd graph."""
    input_ids, position_ids, labels = small_batch(model.unpadded_vocab_size)
    return model(input_ids, position_ids, arguments.pop("attention_mask", None), labels=labels, **arguments).mean()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns every parameter's gradient by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def from_hugging_face(tensors: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Converts weights or gradients of a Hugging Face model to GPTModel's names with grouped experts, in fp32."""
    if "gpt_neox.embed_in.weight" in tensors:
        return {_neox_name(name): value for name, value in tensors.items()}
    renamed = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        **_named(tensors, {"decoder.final_layernorm": "model.norm", "output_layer": "lm_head"}),
    }
    for number in range(config.num_layers):
        theirs, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        layer = {name.removeprefix(theirs): value for name, value in tensors.items() if name.startswith(theirs)}
        renamed |= {ours + name: value for name, value in _layer(layer, config).items()}
    return renamed


def _neox_name(name: str) -> str:
    # Each head stores its query, key and value together, which is our layout too.
    for theirs, ours in (
        ("gpt_neox.layers", "decoder.layers"),
        ("attention.query_key_value", "self_attention.linear_qkv"),
        (".attention.dense", ".self_attention.linear_proj"),
        ("post_attention_layernorm", "pre_mlp_layernorm"),
        ("dense_h_to_4h", "linear_fc1"),
        ("dense_4h_to_h", "linear_fc2"),
        ("gpt_neox.embed_in", "embedding.word_embeddings"),
        ("gpt_neox.final_layer_norm", "decoder.final_layernorm"),
        ("lm_head", "output_layer"),
    ):
        name = name.replace(theirs, ours)
    return name


def _named(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Returns the existing weights and biases of modules under our names. names: our name to the name in `tensors`."""
    return {
        f"{ours}.{kind}": tensors[f"{theirs}.{kind}"]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in tensors
    }


# Names, ours and theirs, of parameters that only one of the two kinds of attention has.
_GROUPED = {
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
_LATENT = {
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
}


def _gpt_oss_experts(layer: dict[str, Tensor], *, hidden_size: int) -> dict[str, Tensor]:
    """Converts gate_up_proj [E, H, 2F], with interleaved gate columns, and down_proj [E, F, H], with their biases."""
    gate_up, bias = (
        torch.cat((values[..., ::2], values[..., 1::2]), dim=-1)
        for values in (layer["mlp.experts.gate_up_proj"], layer["mlp.experts.gate_up_proj_bias"])
    )
    return {
        "mlp.experts.weight1": gate_up.reshape(hidden_size, -1),
        "mlp.experts.weight2": layer["mlp.experts.down_proj"].reshape(-1, hidden_size),
        "mlp.experts.bias1": bias,
        "mlp.experts.bias2": layer["mlp.experts.down_proj_bias"],
    }


def _layer(layer: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    assert config.num_query_groups is not None
    renamed = _named(
        layer,
        {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attention.linear_proj": "self_attn.o_proj",
            **(_LATENT if config.multi_latent_attention else _GROUPED),
            "mlp.linear_fc1": "mlp.gate_up_proj",
            "mlp.linear_fc2": "mlp.down_proj",
            # gpt-oss uses our name.
            "mlp.router": "mlp.router" if "mlp.router.weight" in layer else "mlp.gate",
        },
    )
    if "self_attn.sinks" in layer:
        renamed["self_attention.core_attention.softmax_offset"] = layer["self_attn.sinks"]
    for kind in () if config.multi_latent_attention else ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in layer:
            qkv = (layer[f"self_attn.{name}_proj.{kind}"].unflatten(0, (config.num_query_groups, -1)) for name in "qkv")
            renamed[f"self_attention.linear_qkv.{kind}"] = torch.cat(tuple(qkv), dim=1).flatten(0, 1)
    fc1 = [layer[name] for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight") if name in layer]
    if fc1:
        renamed["mlp.linear_fc1.weight"] = torch.cat(fc1)
    if "mlp.experts.gate_up_proj_bias" in layer:
        renamed |= _gpt_oss_experts(layer, hidden_size=config.hidden_size)
    elif "mlp.gate.weight" in layer:
        gate_up, down = layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"]  # [E, 2F, H], [E, H, F]
        renamed["mlp.experts.weight1"] = gate_up.transpose(1, 2).reshape(config.hidden_size, -1)
        renamed["mlp.experts.weight2"] = down.transpose(1, 2).reshape(-1, config.hidden_size)
    return renamed
