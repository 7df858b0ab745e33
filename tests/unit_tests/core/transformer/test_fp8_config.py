"""Settings of experts in 8 bits: which layers compute in them, the alignment of their rows, and what is refused."""

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.transformer.moe_config import GPU_ROW_ALIGNMENT, CapacityConfig
from megatron.core.transformer.transformer_config import TransformerConfig, precision_lines
from megatron.training.command_line.config_builder import with_flag_names
from megatron.training.command_line.flags import flag_table

BF16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}
FACTOR = "moe_expert_rank_capacity_factor"
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_grouped_gemm": True, FACTOR: 2.0}
IN_8_BITS: dict[str, Any] = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}


def config_of(**changed: Any) -> TransformerConfig:
    """A model of 6 layers with experts in 8 bits, changed."""
    sizes = {"num_layers": 6, "hidden_size": 32, "num_attention_heads": 2}
    return TransformerConfig(**{**sizes, **BF16, **EXPERTS, **IN_8_BITS, **changed})


@pytest.mark.parametrize(("recipe", "block"), [("mxfp8", 32), ("blockwise", 128)])
def test_the_recipe_determines_the_block(recipe: str, block: int) -> None:
    config = config_of(fp8_recipe=recipe)
    assert config.block_format == config.block_format_of(1) == config.block_format_of(None) == BlockFormat(block)
    assert config_of(fp8=None, fp8_recipe="delayed").block_format_of(1) is None


def test_first_and_last_layers_stay_in_bf16_and_multi_token_prediction_does_not() -> None:
    config = config_of(mtp_num_layers=1, first_last_layers_bf16=True)
    numbers = (*range(1, 8), None)
    assert [number for number in numbers if config.block_format_of(number) is None] == [1, 6]
    config = replace(config, num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=0)
    assert [number for number in numbers if config.block_format_of(number) is None] == [1, 2, 3]
    # Only multi-token prediction computes in 8 bits.
    config = replace(config, num_layers_at_start_in_bf16=6)
    assert [number for number in numbers if config.block_format_of(number) is not None] == [7, None]
    assert precision_lines(config)[0].startswith("experts of multi-token prediction compute in 8 bits")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {},
            "experts of layers 1 to 6 compute in 8 bits (fp8 e4m3, mxfp8: 32 elements per scale); everything else in "
            "bf16",
        ),
        (
            {"fp8_recipe": "blockwise", "first_last_layers_bf16": True, "mtp_num_layers": 2},
            "experts of layers 2 to 5 and multi-token prediction compute in 8 bits (fp8 e4m3, blockwise: 128 elements "
            "per scale); the experts of layers 1 and 6 and everything else in bf16",
        ),
        (
            {"moe_layer_freq": [0, 1, 0, 1, 1, 1], "params_dtype": torch.float32, "bf16": False},
            "experts of layers 2 and 4 to 6 compute in 8 bits (fp8 e4m3, mxfp8: 32 elements per scale); everything "
            "else in fp32",
        ),
        (
            {"moe_layer_freq": [0, 1, 0, 1, 0, 1], "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2},
            "experts of layers 2 and 4 compute in 8 bits (fp8 e4m3, mxfp8: 32 elements per scale); the experts of "
            "layer 6 and everything else in bf16",
        ),
    ],
)
def test_the_log_names_the_layers_of_either_precision(changed: dict[str, Any], line: str) -> None:
    assert precision_lines(config_of(**changed)) == (line,)
    assert precision_lines(config_of(fp8=None, fp8_recipe="delayed")) == ()


@pytest.mark.parametrize(
    ("recipe", "given", "on_gpu", "aligned"),
    [
        ("mxfp8", None, False, 32),
        ("mxfp8", None, True, 64),
        ("blockwise", None, False, 128),
        ("blockwise", None, True, 128),
        ("mxfp8", 48, False, 96),
        ("blockwise", 256, True, 256),
    ],
)
def test_rows_begin_at_whole_blocks(recipe: str, given: int | None, on_gpu: bool, aligned: int) -> None:
    with patch("torch.cuda.is_available", return_value=on_gpu):
        config = config_of(fp8_recipe=recipe, moe_expert_row_alignment=given, first_last_layers_bf16=True)
        assert config.row_alignment == aligned
        # Other settings are not affected.
        unset = replace(config, fp8=None, fp8_recipe="delayed", first_last_layers_bf16=False)
        assert unset.row_alignment == (given or (GPU_ROW_ALIGNMENT if on_gpu else 1))
    assert CapacityConfig(moe_expert_row_alignment=3).row_alignment == 3


SENT, KIND = "moe_dispatch_fwd_dtype", "moe_token_dispatcher_type"
_NOTHING = "but nothing computes in 8 bits: set fp8 to 'e4m3' (--fp8-format), or keep the default"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fp8": "hybrid"}, "fp8 is 'hybrid': must be 'e4m3'. Gradients in e5m2, as in hybrid, keep 2 bits"),
        ({"fp8": "e5m2"}, "TransformerConfig.fp8 is 'e5m2': must be one of e4m3, hybrid"),
        ({"fp8_recipe": "delayed"}, "fp8_recipe is 'delayed': for experts in 8 bits, must be blockwise (128 elements"),
        ({"fp8_recipe": "tensorwise"}, "fp8_recipe is 'tensorwise': for experts in 8 bits, must be blockwise"),
        ({"fp8_recipe": "custom"}, "fp8_recipe is 'custom': for experts in 8 bits, must be blockwise"),
        ({"fp8_recipe": "mx"}, "TransformerConfig.fp8_recipe is 'mx': must be one of tensorwise, delayed, mxfp8"),
        ({"num_moe_experts": None, "moe_grouped_gemm": False, FACTOR: None}, "fp8 is 'e4m3' but no layer has experts"),
        ({"moe_layer_freq": [0] * 6}, "fp8 is 'e4m3' but no layer has experts: only experts compute in 8 bits, and"),
        ({"moe_grouped_gemm": False, FACTOR: None}, "fp8 is 'e4m3' but moe_grouped_gemm is not set"),
        ({FACTOR: None}, "fp8 is 'e4m3' but moe_expert_rank_capacity_factor is not set: in buffers that are sized to"),
        ({"bf16": False, "fp16": True, "params_dtype": torch.float16}, "params_dtype is torch.float16: parameters"),
        ({"bf16": False, "params_dtype": torch.float64}, "params_dtype is torch.float64: parameters must be bf16"),
        ({"lora_rank": 8}, "fp8 is 'e4m3' and lora_rank is 8: low-rank adapters are trained only with experts that"),
        ({"num_layers_at_start_in_bf16": 2}, "num_layers_at_start_in_bf16 is 2: requires first_last_layers_bf16"),
        ({"num_layers_at_end_in_bf16": 0}, "num_layers_at_end_in_bf16 is 0: requires first_last_layers_bf16"),
        ({"num_layers_at_end_in_bf16": -1}, "TransformerConfig.num_layers_at_end_in_bf16 is -1: must be at least 0"),
        (
            {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 4},
            "first_last_layers_bf16 is True, num_layers_at_start_in_bf16 is 2 and num_layers_at_end_in_bf16 is 4: no "
            "layer would compute in 8 bits, because these are all layers with experts (layers 1 to 6 of 6)",
        ),
        (
            {"first_last_layers_bf16": True, "moe_layer_freq": [1, 0, 0, 0, 0, 1]},
            "no layer would compute in 8 bits, because these are all layers with experts (layers 1 and 6 of 6)",
        ),
        ({"fp8": None}, f"fp8_recipe is 'mxfp8' {_NOTHING} 'delayed'"),
        (
            {"fp8": None, "fp8_recipe": "delayed", "first_last_layers_bf16": True},
            f"first_last_layers_bf16 is True {_NOTHING} False",
        ),
        (
            {"fp8": None, "fp8_recipe": "delayed", "num_layers_at_start_in_bf16": 3},
            f"num_layers_at_start_in_bf16 is 3 {_NOTHING} 1",
        ),
        (
            {"fp8": None, "fp8_recipe": "delayed", "moe_router_padding_for_quantization": True},
            f"moe_router_padding_for_quantization is True {_NOTHING} False",
        ),
        ({SENT: "mxfp8"}, f"{SENT} is 'mxfp8' and moe_token_dispatcher_type is allgather: only alltoall, and flex"),
        (
            {SENT: "mxfp8", KIND: "flex", "moe_flex_dispatcher_backend": "deepep"},
            f"{SENT} is 'mxfp8' and {KIND} is flex with deepep: only alltoall, and flex with symm_mem, send rows",
        ),
        (
            {SENT: "blockwise", KIND: "alltoall"},
            f"{SENT} is 'blockwise', but experts compute in 8 bits with fp8_recipe",
        ),
        (
            {SENT: "mxfp8", KIND: "alltoall", "fp8": None, "fp8_recipe": "delayed"},
            f"{SENT} is 'mxfp8', but experts compute in bf16: rows are sent in the 8 bits in which experts compute",
        ),
        ({"moe_router_padding_for_fp8": True}, "renamed: use moe_router_padding_for_quantization"),
        ({"fp8_param": True}, "parameters have at least 16 bits, and each rank quantizes"),
        ({"fp8_margin": 1}, "fp8_margin is 1: each block of elements has a scale that its own elements determine"),
        ({"fp8_wgrad": False}, "fp8_wgrad is False: only the experts' GEMMs compute in 8 bits, all three of them"),
        ({"fp4": "e2m1"}, "fp4 is 'e2m1': 4-bit training is not supported"),
    ],
)
def test_what_experts_in_8_bits_cannot_honour_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        config_of(**changed)


def test_all_problems_are_told_together_and_named_as_flags() -> None:
    with pytest.raises(ValueError) as caught:
        config_of(fp8="hybrid", fp8_recipe="custom", moe_expert_rank_capacity_factor=None)
    told = with_flag_names(str(caught.value), flag_table()).splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "--fp8-format is 'hybrid'",
        "--fp8-recipe is 'custom'",
        "--fp8-format is 'hybrid' but --moe-expert-rank-capacity-factor is not set",
    ]


def test_parameters_in_fp32_padding_and_a_stash_of_8_bits_are_accepted() -> None:
    config_of(bf16=False, params_dtype=torch.float32)
    config_of(moe_router_padding_for_quantization=True, moe_paged_stash=True, moe_paged_stash_dtype="mxfp8")
