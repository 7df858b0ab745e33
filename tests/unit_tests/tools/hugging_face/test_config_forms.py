"""Each form of config.json of transformers 4 and 5 means the same here as there, and unread keys are named."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from megatron.core.dist_checkpointing import load_common
from megatron.tools.checkpoint import main
from megatron.tools.hugging_face.settings import (
    comparable_settings,
    config_of_settings,
    settings_of_config,
    unread_keys,
)
from megatron.tools.hugging_face.verify import logits_of, stored_model
from megatron.tools.safetensors_files import INDEX_FILE
from tests.unit_tests.tools.hugging_face.conversions import contents, convert, told
from tests.unit_tests.tools.hugging_face.known_configs import KNOWN_CONFIGS
from tests.unit_tests.tools.hugging_face.small_hub import (
    HAS_EXPERTS,
    SMALL,
    saved,
    small_model,
    small_settings,
    tokens_of,
)

Config = dict[str, Any]
ROTATION = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def theirs(config: Config) -> Config:
    """Returns all fields of the configuration that transformers makes of a config.json."""
    found = AutoConfig.for_model(**without(config, "architectures")).to_dict()
    return {**found, "architectures": config["architectures"]}


def outcome(config: Config) -> Config | str:
    """Returns the settings of a config.json, or the error that names what cannot be converted."""
    try:
        return comparable_settings(settings_of_config(config))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", SMALL)
def test_an_absent_key_has_the_default_of_transformers_or_is_named(name: str) -> None:
    config = small_settings(name)
    for key in without(config, "architectures", "model_type"):
        part = without(config, key, *(("layer_types",) if key == "num_hidden_layers" else ()))
        found = outcome(part)
        assert found == outcome(theirs(part)) or f"config.json has no {key}" in found, key


@pytest.mark.parametrize("name", SMALL)
def test_every_key_that_transformers_knows_is_read(name: str) -> None:
    config = theirs(small_settings(name))
    own = config.keys() - PreTrainedConfig().to_dict().keys()
    assert len(own) > 15 and unread_keys(config) == []
    other = {**config, "attn_logit_softcapping": 30.0, "rope_parameters": {**config["rope_parameters"], "short": 1}}
    assert unread_keys(other) == ["attn_logit_softcapping", "rope_parameters.short"]
    # null means that a model does not use the feature.
    assert unread_keys({**config, "attn_logit_softcapping": None}) == []


def drawn_rotation(generator: random.Random) -> Config:
    """Draws the keys of a config.json that describe rotations, in either form or in both."""
    blocks: list[Any] = [None, {}, {"rope_type": "default"}, {"type": "linear", "factor": 2.0}, YARN]
    blocks += [{**YARN, "type": "linear", "beta_fast": 16, "truncate": False}, {"rope_type": "yarn", "factor": 2.0}]
    config: Config = {}
    for name in ("rope_scaling", "rope_parameters"):
        if generator.random() < 0.7:
            block = generator.choice(blocks)
            more = {"rope_theta": 700.0} if block is not None and generator.random() < 0.4 else {}
            config[name] = None if block is None else {**block, **more}
    if generator.random() < 0.6:
        config["rope_theta"] = 3000.0
    if generator.random() < 0.2:
        config["original_max_position_embeddings"] = 32
    return config


@pytest.mark.parametrize("number", range(40))
@pytest.mark.parametrize("name", ["qwen3-8b", "mixtral-8x7b", "gpt-oss-20b"])
def test_both_forms_of_rotations_are_read_with_the_precedence_of_transformers(name: str, number: int) -> None:
    written = drawn_rotation(random.Random(f"{name} {number}"))
    config = {**without(small_settings(name), *ROTATION), **written}
    reading = AutoConfig.for_model(**without(json.loads(json.dumps(config)), "architectures"))
    reading.standardize_rope_params()
    expected, found = reading.rope_parameters, settings_of_config(config)
    assert found["rotary_base"] == expected["rope_theta"], written
    kind = expected["rope_type"]
    assert (found["rope_type"] or "rope") == ("yarn" if kind == "yarn" else "rope"), written
    assert found["rotary_seq_len_interpolation_factor"] == (expected["factor"] if kind == "linear" else None), written
    if kind == "yarn":
        assert found["rotary_scaling_factor"] == expected["factor"]
        assert found["yarn_original_max_position_embeddings"] == expected["original_max_position_embeddings"], written
        assert found["yarn_beta_fast"] == expected.get("beta_fast", 32)
        assert found["yarn_correction_range_round_to_int"] == expected.get("truncate", True)


def to_version_4(config: Config) -> Config:
    block = dict(config["rope_parameters"])
    top = {key: block.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in block}
    block["type"] = block.pop("rope_type")
    dtype = config["dtype"]
    return {**without(config, "rope_parameters", "dtype"), **top, "rope_scaling": block, "torch_dtype": dtype}


def with_both(config: Config) -> Config:
    return {**config, "rope_scaling": {**YARN, "rope_theta": 300.0}, "rope_theta": 4000.0}


def with_base_on_top(config: Config) -> Config:
    return {**config, "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 300.0}


def with_share_inside(config: Config) -> Config:
    return {**config, "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.25}} | {
        "partial_rotary_factor": 0.75
    }


def without_rotation(config: Config) -> Config:
    return without(config, *ROTATION)


def with_positions_on_top(config: Config) -> Config:
    return {**config, "rope_parameters": {**YARN, "rope_theta": 500.0}, "original_max_position_embeddings": 32}


def without_positions(config: Config) -> Config:
    block = {**YARN, "rope_theta": 500.0, "beta_fast": None, "truncate": False}
    return {**config, "rope_parameters": without(block, "original_max_position_embeddings")}


def with_mixtrals_name(config: Config) -> Config:
    return {**without(config, "num_experts", "num_local_experts"), "num_local_experts": 8}


def with_mixtrals_number(config: Config) -> Config:
    return {**without(config, "num_local_experts"), "num_experts": 8}


def without_defaults(config: Config) -> Config:
    config["rope_parameters"].pop("mscale", None)
    config["rope_parameters"].pop("mscale_all_dim", None)
    return without(config, "routed_scaling_factor", "num_mtp_layers", "num_nextn_predict_layers", "hidden_act")


def with_both_dtypes(config: Config) -> Config:
    return {**config, "torch_dtype": "float16"}


INPUTS = [
    ("llama3.1-8b", to_version_4),
    ("deepseek-v2", to_version_4),
    ("glm-4.5", to_version_4),
    ("gpt-oss-20b", to_version_4),
    ("qwen3-8b", with_both),
    ("mixtral-8x7b", with_base_on_top),
    ("glm-4.5", with_share_inside),
    ("gpt-oss-20b", without_rotation),
    ("mixtral-8x7b", without_rotation),
    ("qwen3-30b-a3b", with_positions_on_top),
    ("llama3.2-1b", without_positions),
    ("qwen3-30b-a3b", with_mixtrals_name),
    ("gpt-oss-20b", with_mixtrals_number),
    ("deepseek-v3", without_defaults),
    ("qwen2-57b-a14b", with_both_dtypes),
]


@pytest.mark.parametrize(("name", "change"), INPUTS, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_a_form_of_config_json_gives_the_logits_of_transformers(name: str, change: Any, tmp_path: Path) -> None:
    hub = saved(small_model(name), tmp_path / "hub")
    config = change(json.loads((hub / "config.json").read_text()))
    (hub / "config.json").write_text(json.dumps(config))
    tokens = tokens_of(3)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32).eval()(tokens).logits
        run = convert(hub, tmp_path / "run")
        found = logits_of(stored_model(run), tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    # The same config.json comes back.
    back = convert(run, tmp_path / "back", back=True)
    same = {**config, "torch_dtype": "float32"} if change is with_both_dtypes else config
    assert json.loads((back / "config.json").read_text()) == same and contents(back) == contents(hub)


NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 300.0}}
TWO = {**NESTED, "sliding_attention": {"rope_type": "default", "rope_theta": 900.0}}


def test_rotations_of_each_kind_of_layers_are_read_if_they_are_the_same() -> None:
    config = without(small_settings("qwen3-8b"), *ROTATION)
    same = {"full_attention": NESTED["full_attention"], "sliding_attention": dict(NESTED["full_attention"])}
    for nested in (NESTED, same):
        settings = settings_of_config({**config, "rope_parameters": nested})
        assert settings == settings_of_config({**config, "rope_theta": 300.0}) and settings["rotary_base"] == 300


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        (
            "qwen3-8b",
            {"rope_parameters": TWO},
            "values for full_attention, sliding_attention: .* only if all",
        ),
        ("qwen3-8b", {"rope_parameters": {"full_attention": None}}, "different values for full_attention"),
        (
            "qwen3-8b",
            {"rope_parameters": {**NESTED, "rope_theta": 3.0}},
            "values for full_attention, rope_theta",
        ),
        ("qwen3-8b", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ("qwen3-8b", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor is 1.5"),
        ("qwen3-8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: only 1.0 can be converted"),
        ("qwen3-30b-a3b", {"num_local_experts": 4}, "num_experts is 8, but num_local_experts is 4: must be equal"),
        ("deepseek-v3", {"num_mtp_layers": 3}, "num_nextn_predict_layers is 1, but num_mtp_layers is 3: must be equal"),
        ("gpt-oss-20b", {"num_experts": 9}, "num_local_experts is 8, but num_experts is 9: must be equal"),
    ],
)
def test_values_without_a_setting_are_named(name: str, changes: Config, error: str) -> None:
    config = small_settings(name)
    left_out = ROTATION if changes.keys() & set(ROTATION) else ()
    with pytest.raises(ValueError, match=error):
        settings_of_config({**without(config, *left_out), **changes})


def test_unread_keys_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model("llama3.2-1b"), tmp_path / "hub")
    config = json.loads((hub / "config.json").read_text())
    more = {"residual_multiplier": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [2]}}
    (hub / "config.json").write_text(json.dumps({**config, **more}))
    convert(hub, tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not read from config.json: ")]
    named = ["residual_multiplier", "rope_parameters", "rope_scaling.mrope_section"]
    assert lines == [f"not read from config.json: {name}" for name in named]


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_both_names_of_the_dtype_are_kept_up(keys: tuple[str, ...]) -> None:
    carried = {**KNOWN_CONFIGS["qwen3-8b"], **dict.fromkeys(keys, "float16")}
    written = config_of_settings(settings_of_config(carried), dtype="bfloat16", carried=carried)
    assert {key: written[key] for key in ("dtype", "torch_dtype") if key in written} == dict.fromkeys(
        keys or ("dtype",), "bfloat16"
    )
    again = config_of_settings(settings_of_config(written), dtype="bfloat16", carried=written)
    assert again == written


def test_a_changed_setting_replaces_every_name_of_its_key() -> None:
    carried = {**without(KNOWN_CONFIGS["qwen3-30b-a3b"], *ROTATION, "num_experts"), "num_local_experts": 128}
    carried |= {"rope_parameters": {**YARN, "rope_theta": 500.0}, "original_max_position_embeddings": 32}
    settings = settings_of_config(carried)
    written = config_of_settings({**settings, "rotary_base": 900}, dtype="bfloat16", carried=carried)
    assert written["rope_theta"] == 900 and "rope_parameters" not in written and "num_local_experts" not in written
    assert settings_of_config(written) == {**settings, "rotary_base": 900}


@pytest.mark.parametrize("name", sorted(HAS_EXPERTS))
def test_experts_in_one_tensor_are_those_in_several(name: str, tmp_path: Path) -> None:
    """Files of save_pretrained(save_original_format=False) have the tensors of the modules of transformers 5."""
    model = small_model(name)
    runs = []
    for original in (True, False):
        hub = tmp_path / f"hub {original}"
        model.save_pretrained(hub, save_original_format=original)
        assert any(key.endswith("experts.gate_up_proj") for key in load_file(hub / "model.safetensors")) == (
            not original or name == "gpt-oss-20b"
        )
        runs.append(convert(hub, tmp_path / f"run {original}") / "release")
    assert main(["diff", *map(str, runs)]) == 0
    assert load_common(runs[0])["args"]["num_experts"] == load_common(runs[1])["args"]["num_experts"]


def test_the_index_decides_which_file_has_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model("llama3.2-1b"), tmp_path / "hub")
    first, second, *_ = sorted(hub.glob("*.safetensors"))
    expected = contents(hub)
    name = sorted(load_file(first))[0]
    # A second copy with other values.
    save_file({**load_file(second), name: torch.zeros_like(load_file(first)[name])}, second, metadata={"format": "pt"})
    back = convert(convert(hub, tmp_path / "run"), tmp_path / "back", back=True)
    assert contents(back) == expected
    index = json.loads((hub / INDEX_FILE).read_text())
    index["weight_map"][name] = sorted(hub.glob("*.safetensors"))[2].name
    (hub / INDEX_FILE).write_text(json.dumps(index))
    assert f"does not contain {name}, which {INDEX_FILE} lists for this file" in told(capsys, hub, tmp_path / "other")


def test_a_tied_output_layer_with_other_values_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = saved(small_model("llama3.2-1b"), tmp_path / "hub", max_shard_size="5GB")
    file = hub / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    error = told(capsys, hub, tmp_path / "run")
    assert "unused lm_head.weight; it differs from model.embed_tokens.weight, although tie_word_embeddings" in error
