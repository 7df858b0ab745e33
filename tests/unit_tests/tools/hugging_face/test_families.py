"""Conversion between config.json and settings: presets, parameter counts of transformers, rejected configurations."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.tools.hugging_face.names import hub_tensors
from megatron.tools.hugging_face.settings import (
    comparable_settings,
    config_of_settings,
    family_of_config,
    settings_of_config,
)
from megatron.training.arguments import parse_args
from megatron.training.command_line.model_presets import known_models
from megatron.training.gpt_builder import build_gpt
from tests.unit_tests.tools.hugging_face.known_configs import KNOWN_CONFIGS
from tests.unit_tests.tools.hugging_face.small_hub import LAYERS, SMALL, model_on, small_settings


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_presets_are_what_config_json_says(name: str) -> None:
    preset, settings = vars(parse_args(argv=["--model", name])), settings_of_config(KNOWN_CONFIGS[name])
    assert comparable_settings(preset) == comparable_settings(settings)
    # Including settings that are not compared between checkpoints.
    assert {key: preset[key] for key in settings if key not in ("window_size", "moe_layer_freq")} == {
        key: value for key, value in settings.items() if key not in ("window_size", "moe_layer_freq")
    }


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
def test_tiny_models_have_the_architecture_of_the_full_model(name: str) -> None:
    tiny = vars(parse_args(argv=["--model", name, "--model-scale", "tiny"]))
    written = config_of_settings(tiny, dtype="float32")
    assert written["architectures"] == KNOWN_CONFIGS[name]["architectures"]
    assert comparable_settings(settings_of_config(written)) == comparable_settings(tiny)


def test_errors_name_the_reason_of_an_architecture_that_cannot_express_the_settings() -> None:
    flags = ["--model", "deepseek-v3", "--model-scale", "tiny", "--moe-router-topk", "8"]
    reason = "DeepseekV3ForCausalLM: config.json: topk_group is 2 and num_experts_per_tok is 8: can be converted only"
    with pytest.raises(ValueError, match=reason):
        config_of_settings(vars(parse_args(argv=flags)), dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("known", known_models(), ids=lambda known: known.name)
def test_transformers_counts_the_same_parameters(known: Any) -> None:
    model = model_on("meta", KNOWN_CONFIGS[known.name])
    stored = [*model.parameters(), *(value for name, value in model.named_buffers() if "e_score" in name)]
    assert sum(tensor.numel() for tensor in stored) == known.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KNOWN_CONFIGS, *(f"small {name}" for name in SMALL)])
def test_a_new_config_json_says_the_same(name: str) -> None:
    config = small_settings(name.removeprefix("small ")) if name.startswith("small ") else KNOWN_CONFIGS[name]
    written = config_of_settings(settings_of_config(config), dtype="bfloat16")
    assert written["architectures"] == config["architectures"] and written["dtype"] == "bfloat16"
    assert comparable_settings(settings_of_config(written)) == comparable_settings(settings_of_config(config))
    # Transformers accepts every key, and builds the same model.
    assert {key: tuple(tensor.shape) for key, tensor in model_on("meta", written).state_dict().items()} == {
        key: tuple(tensor.shape) for key, tensor in model_on("meta", config).state_dict().items()
    }


@pytest.mark.parametrize("name", SMALL)
def test_tensors_of_the_hub_fill_exactly_what_a_model_stores(name: str) -> None:
    config = small_settings(name)
    settings = settings_of_config(config)
    args = parse_args(argv=[])
    vars(args).update(settings, params_dtype=torch.float32, virtual_pipeline_model_parallel_size=None)
    args.padded_vocab_size = args.unpadded_vocab_size = args.vocab_size
    stored = {tensor.key: tensor.global_shape for tensor in model_sharded_tensors(build_gpt(args))}
    tensors = [one for one in hub_tensors(family_of_config(config), settings) if one.copy_of is None]
    assert {piece.key: piece.global_shape for tensor in tensors for piece in tensor.pieces} == stored
    filled = sum(torch.Size(piece.shape).numel() for tensor in tensors for piece in tensor.pieces)
    assert filled == sum(torch.Size(shape).numel() for shape in stored.values())


def test_both_forms_of_positions_are_understood() -> None:
    old = KNOWN_CONFIGS["llama3.1-8b"]
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": old["rope_theta"], **old["rope_scaling"]}
    assert settings_of_config(new) == settings_of_config(old)
    assert settings_of_config({**old, "rope_scaling": {"type": "linear", "factor": 4.0}}) == {
        **settings_of_config(old),
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": 4,
    }


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "the architecture is GPT2LMHeadModel: must be one of LlamaFor"),
        ({"architectures": ["Qwen3MoeForCausalLm"]}, "the nearest is Qwen3MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True: only False"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "only .*'original_max_position_embeddings': 8192"),
        ({"rope_theta": 1e4 + 0.5}, "rope_theta is 10000.5: only whole numbers"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is awq: weights must be plain"),
    ],
)
def test_what_cannot_be_converted_is_named(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        settings_of_config({**KNOWN_CONFIGS["llama3-8b"], **changes})


@pytest.mark.parametrize("border", [None, 1, 3])
@pytest.mark.parametrize("name", ["qwen2-7b", "qwen3-8b", "qwen2-57b-a14b", "gpt-oss-20b"])
def test_layers_without_a_kind_have_windows_as_in_transformers(name: str, border: int | None) -> None:
    config = {**small_settings(name), "use_sliding_window": True, "sliding_window": 7, "max_window_layers": border}
    said = {key: value for key, value in config.items() if value is not None and key != "layer_types"}
    theirs = AutoConfig.for_model(**{key: value for key, value in said.items() if key != "architectures"})
    values = comparable_settings(settings_of_config(said))
    assert [bool(has) for has in values["window_attn_skip_freq"] or [0] * LAYERS] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]


def test_a_config_json_is_kept_where_it_says_the_same_and_put_right_where_not() -> None:
    carried = {**KNOWN_CONFIGS["qwen3-30b-a3b"], "torch_dtype": "bfloat16", "bos_token_id": 151643, "use_cache": True}
    settings = settings_of_config(carried)
    assert config_of_settings(settings, dtype="bfloat16", carried=carried) == carried
    assert config_of_settings(settings, dtype="float32", carried=carried) == {**carried, "torch_dtype": "float32"}
    longer = config_of_settings({**settings, "rotary_base": 5000000}, dtype="bfloat16", carried=carried)
    assert longer["rope_theta"] == 5000000 and longer["bos_token_id"] == 151643
    with pytest.raises(ValueError, match="next to the checkpoint differs in --swiglu"):
        config_of_settings({**settings, "swiglu": False}, dtype="bfloat16", carried=carried)


def test_settings_without_an_architecture_are_named() -> None:
    settings = {**settings_of_config(KNOWN_CONFIGS["llama3-8b"]), "normalization": "LayerNorm"}
    with pytest.raises(
        ValueError, match=r"no architecture supports these settings: .* differs in --normalization \(RMSNorm, LayerN"
    ):
        config_of_settings(settings, dtype="float32")


@pytest.mark.parametrize(("name", "given"), [("qwen3-8b", {"use_sliding_window": True}), ("gpt-oss-20b", {})])
def test_a_width_of_windows_that_is_not_given_is_transformers_own(name: str, given: dict[str, Any]) -> None:
    config = {key: value for key, value in KNOWN_CONFIGS[name].items() if key != "sliding_window"} | given
    config["max_window_layers"] = 1
    expected = AutoConfig.for_model(**config).sliding_window
    assert expected > 1 and settings_of_config(config)["window_size"] == (expected - 1, 0)
