"""Defines the named models of --model, whose flags are files in configs/, and their tiny versions for --model-scale.

arguments.py defines the precedence of other flags.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.core.transformer.moe_config import layers_with_experts
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.parser import did_you_mean

PRESETS = Path(__file__).resolve().parents[2] / "configs"
INDEX_FILE = "index.yaml"

# Sizes of a tiny model: wide enough for every kernel, and with at least two layers of each kind.
_TINY_LAYERS = 4
_TINY_WIDTH = 64
_TINY_FFN = 96
_TINY_EXPERT_FFN = 32
_TINY_HEAD = 16
_TINY_GROUPS = 2
_TINY_LATENT = {
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_head_dim": _TINY_HEAD,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": _TINY_HEAD,
}
_TINY_EXPERTS = 8
_TINY_VOCABULARY = 512
_TINY_POSITIONS = 512
_TINY_WINDOW = 8


@dataclass(frozen=True)
class KnownModel:
    """An entry of configs/index.yaml: source of the settings, number of parameters, and number active per token."""

    name: str
    source: str
    parameters: int
    active_parameters: int


def known_models() -> list[KnownModel]:
    """Returns all presets, in the order of configs/index.yaml."""
    lines = yaml.safe_load((PRESETS / INDEX_FILE).read_text(encoding="utf-8"))
    return [KnownModel(name, **values) for name, values in lines.items()]


def preset_file(name: str) -> str:
    """Returns the path of a preset's file. Raises CommandLineError with the nearest name if it is unknown."""
    names = [model.name for model in known_models()]
    if name not in names:
        raise CommandLineError(
            f"--model is {name}: unknown model{did_you_mean(name, names)}; --list-models prints all names"
        )
    return str(PRESETS / f"{name}.yaml")


def table_of_models() -> str:
    """Formats the table that --list-models prints."""
    rows = [("name", "parameters", "active", "source")]
    for model in known_models():
        rows.append((model.name, f"{model.parameters:,}", f"{model.active_parameters:,}", model.source))
    name, total, active = (max(len(row[column]) for row in rows) for column in range(3))
    return "".join(f"{row[0]:<{name}}  {row[1]:>{total}}  {row[2]:>{active}}  {row[3]}\n" for row in rows)


def tiny(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of a model with a few hundred thousand parameters that has every feature of a preset.

    The model has the same ratio of query heads to key heads, rotated share of a head, dense layers before expert
    layers, expert groups, number of shared experts, and order of layers with sliding windows.
    """
    values = dict(preset)
    values |= {"num_layers": _TINY_LAYERS, "hidden_size": _TINY_WIDTH, "ffn_hidden_size": _TINY_FFN}
    values |= {"vocab_size": _TINY_VOCABULARY, "max_position_embeddings": _TINY_POSITIONS}
    values |= _tiny_heads(preset)
    if preset.get("window_size") is not None:
        values["window_size"] = (_TINY_WINDOW, 0)
    if isinstance(skip := preset.get("window_attn_skip_freq"), list):
        values["window_attn_skip_freq"] = skip[:_TINY_LAYERS]
    if preset.get("num_experts") is not None:
        values |= _tiny_experts(preset)
    return values


def _tiny_heads(preset: Mapping[str, Any]) -> dict[str, Any]:
    if preset.get("multi_latent_attention"):
        whole_queries = preset.get("q_lora_rank") is None
        return {name: size for name, size in _TINY_LATENT.items() if not (whole_queries and name == "q_lora_rank")}
    heads = preset["num_attention_heads"]
    groups = preset.get("num_query_groups") or heads
    # Without groups, no ratio must be preserved.
    few = min(groups, _TINY_GROUPS if groups < heads else 2 * _TINY_GROUPS)
    return {
        "num_attention_heads": few * (heads // groups),
        "num_query_groups": few,
        "group_query_attention": True,
        "kv_channels": _TINY_HEAD,
    }


def _tiny_experts(preset: Mapping[str, Any]) -> dict[str, Any]:
    groups, shared = preset.get("moe_router_num_groups"), preset.get("moe_shared_expert_intermediate_size")
    experts = _TINY_EXPERTS if groups is None else 2 * _TINY_EXPERTS
    values: dict[str, Any] = {
        "num_experts": experts,
        "moe_ffn_hidden_size": _TINY_EXPERT_FFN,
        "moe_router_topk": min(preset.get("moe_router_topk", 2), experts // 2),
    }
    if groups is not None:
        # Four experts per group, of which a token uses as many as in the preset, since their scores are the group's.
        chosen = experts // 8
        per_group = min(preset["moe_router_topk"] // preset["moe_router_group_topk"], 4)
        values |= {"moe_router_num_groups": experts // 4, "moe_router_group_topk": chosen}
        values["moe_router_topk"] = chosen * per_group
    if shared is not None:
        width = preset.get("moe_ffn_hidden_size") or preset["ffn_hidden_size"]
        values["moe_shared_expert_intermediate_size"] = _TINY_EXPERT_FFN * max(1, shared // width)
    frequency = preset.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        pattern = layers_with_experts(experts, frequency, num_layers=preset["num_layers"])
        dense_first = not pattern[0]
        values["moe_layer_freq"] = [0] + [1] * (_TINY_LAYERS - 1) if dense_first else pattern[:_TINY_LAYERS]
    return values
