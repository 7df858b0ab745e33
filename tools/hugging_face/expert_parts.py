"""Maps the parts of a config.json that describe experts: MoE layers, routing and expert sizes.

config_parts.py contains the parts for attention and positions.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.moe_config import layers_with_experts
from megatron.tools.hugging_face.config_parts import Values


class SparseLayers:
    """The MoE layers, as expressed by the keys of Qwen's models."""

    def read(self, config: Mapping[str, Any]) -> Values:
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        layers = range(config["num_hidden_layers"])
        return {"moe_layer_freq": short_pattern([int(i not in dense and (i + 1) % step == 0) for i in layers])}

    def write(self, settings: Mapping[str, Any]) -> Values:
        pattern = expert_layers(settings)
        return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, has in enumerate(pattern) if not has]}


class LeadingDenseLayers:
    """The number of dense layers before the MoE layers."""

    def read(self, config: Mapping[str, Any]) -> Values:
        dense, layers = config.get("first_k_dense_replace", 0), config["num_hidden_layers"]
        return {"moe_layer_freq": short_pattern([0] * dense + [1] * (layers - dense))}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"first_k_dense_replace": [*expert_layers(settings), 1].index(1)}


class ExpertWidth:
    """The width of an expert, for families with no other feed-forward width."""

    def read(self, config: Mapping[str, Any]) -> Values:
        width = config["intermediate_size"]
        return {"ffn_hidden_size": width, "moe_ffn_hidden_size": width}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"intermediate_size": settings["moe_ffn_hidden_size"]}


class TopKNormalization:
    """Whether softmax is computed over the chosen experts (normalized scores) or over all experts."""

    def read(self, config: Mapping[str, Any]) -> Values:
        return {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"norm_topk_prob": not settings["moe_router_pre_softmax"]}


class SharedExperts:
    """The number of shared experts, stored here as their total width."""

    def read(self, config: Mapping[str, Any]) -> Values:
        count = config.get("n_shared_experts") or 0
        return {"moe_shared_expert_intermediate_size": count * config["moe_intermediate_size"] or None}

    def write(self, settings: Mapping[str, Any]) -> Values:
        width = settings["moe_shared_expert_intermediate_size"] or 0
        return {"n_shared_experts": width // settings["moe_ffn_hidden_size"]}


class ExpertGroups:
    """Groups of experts, of which each token uses some. One group means no grouping."""

    def read(self, config: Mapping[str, Any]) -> Values:
        groups, chosen = config.get("n_group") or 1, config.get("topk_group")
        chosen = chosen if groups > 1 else None
        experts = config["num_experts_per_tok"]
        # transformers scores a group by the sum of its two best experts. Here the experts that a token uses per group
        # are summed.
        if chosen is not None and experts // chosen != 2:
            raise ValueError(
                f"config.json: topk_group is {chosen} and num_experts_per_tok is {experts}: can be converted only "
                "if a token uses two experts of each of its groups"
            )
        return {"moe_router_num_groups": groups if groups > 1 else None, "moe_router_group_topk": chosen}

    def write(self, settings: Mapping[str, Any]) -> Values:
        groups = settings["moe_router_num_groups"] or 1
        return {"n_group": groups, "topk_group": settings["moe_router_group_topk"] or 1}


class GroupLimitedGreedy:
    """DeepSeek-V2's expert groups, each scored by its best expert. topk_method enables them."""

    def read(self, config: Mapping[str, Any]) -> Values:
        method = config.get("topk_method") or "greedy"
        groups, chosen = config.get("n_group"), config.get("topk_group")
        none: Values = {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_group_score": "sum"}
        if method == "greedy":
            return none
        if method != "group_limited_greedy":
            raise ValueError(
                f"config.json: topk_method is {method!r}: only greedy and group_limited_greedy are supported"
            )
        for name, value in (("n_group", groups), ("topk_group", chosen)):
            if value is None:
                raise KeyError(name)
        return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen, "moe_router_group_score": "max"}

    def write(self, settings: Mapping[str, Any]) -> Values:
        groups = settings["moe_router_num_groups"]
        method = "greedy" if groups is None else "group_limited_greedy"
        return {"topk_method": method, "n_group": groups or 1, "topk_group": settings["moe_router_group_topk"] or 1}


class MTPLayers:
    """The number of multi-token prediction layers."""

    def read(self, config: Mapping[str, Any]) -> Values:
        return {"mtp_num_layers": config.get("num_nextn_predict_layers") or None}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"num_nextn_predict_layers": settings["mtp_num_layers"] or 0}


class RoutedScaling:
    """A factor applied to all routing weights. 1 means no scaling."""

    def read(self, config: Mapping[str, Any]) -> Values:
        factor = config.get("routed_scaling_factor") or 1.0
        return {"moe_router_topk_scaling_factor": None if factor == 1 else float(factor)}

    def write(self, settings: Mapping[str, Any]) -> Values:
        return {"routed_scaling_factor": settings["moe_router_topk_scaling_factor"] or 1.0}


def expert_layers(settings: Mapping[str, Any]) -> list[int]:
    """Returns 1 for each MoE layer and 0 for each dense layer."""
    return layers_with_experts(settings["num_experts"], settings["moe_layer_freq"], num_layers=settings["num_layers"])


def short_pattern(pattern: list[int]) -> int | list[int]:
    """Returns a pattern in the form of moe_layer_freq: 1 if all layers have experts."""
    return 1 if all(pattern) else pattern
