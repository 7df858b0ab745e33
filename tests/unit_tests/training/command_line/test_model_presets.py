"""Tests of model presets: numbers of parameters, precedence of their flags, and features of tiny versions."""

from functools import cache
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import model_sharded_tensors
from megatron.tools.write_plan_checks import PARAMETERS
from megatron.training.arguments import parse_args
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.model_presets import PRESETS, KnownModel, known_models
from megatron.training.compute.devices import DEVICES_FILE
from megatron.training.gpt_builder import build_gpt

NAMES = [model.name for model in known_models()]


def arguments_of(words: str) -> Any:
    return parse_args(argv=words.split())


@cache
def model_of(words: str, *, on_meta: bool = True) -> torch.nn.Module:
    """Builds the model of a command line on the meta device, without memory, so that tests share it."""
    args = arguments_of(words)
    args.padded_vocab_size = args.unpadded_vocab_size = args.vocab_size
    args.params_dtype, args.init_model_with_meta_device = torch.float32, on_meta
    args.virtual_pipeline_model_parallel_size = None
    # The table of positions contains no parameters, and would be large.
    args.max_position_embeddings = 16
    return build_gpt(args)


@pytest.mark.slow
@pytest.mark.parametrize("known", known_models(), ids=lambda known: known.name)
def test_parameters_are_those_of_the_published_model(known: KnownModel) -> None:
    args = arguments_of(f"--model {known.name}")
    model = model_of(f"--model {known.name}")
    assert all(parameter.is_meta for parameter in model.parameters())
    # Counts the values stored in files: weights and router biases, which have no gradients. Published counts exclude
    # multi-token prediction layers.
    stored = [*model.named_parameters(), *(item for item in model.named_buffers() if item[0].endswith("expert_bias"))]
    parameters = {name: tensor for name, tensor in stored if not name.startswith("mtp.")}
    total = sum(parameter.numel() for parameter in parameters.values())
    assert total == known.parameters == PARAMETERS.get(known.name, total)
    routed = sum(tensor.numel() for name, tensor in parameters.items() if ".mlp.experts." in name)
    idle = routed - routed * args.moe_router_topk // args.num_experts if routed else 0
    assert total - idle == known.active_parameters


def test_every_file_is_in_the_index() -> None:
    files = {path.stem for path in PRESETS.glob("*.yaml")} - {"index", DEVICES_FILE.stem}
    assert sorted(NAMES) == sorted(files)


def test_explicit_flags_and_a_file_win_over_the_model(tmp_path: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: qwen3-8b\nnum_layers: 3\nrotary_base: 10000\n")
    args = arguments_of(f"--config {file} --num-layers 2")
    assert (args.num_layers, args.rotary_base, args.hidden_size, args.qk_layernorm) == (2, 10000, 4096, True)
    assert arguments_of(f"--config {file} --model llama3-8b").qk_layernorm is False


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--model qwen3-30b-a4b", "--model is qwen3-30b-a4b: unknown model; did you mean qwen3-30b-a3b"),
        ("--model qwen3-30b", "--model is qwen3-30b: unknown model; did you mean qwen3-30b-a3b"),
        ("--model-scale tiny", "--model-scale is tiny without --model"),
        ("--model llama3-8b --model-scale small", "--model-scale: 'small' is not one of full, tiny"),
    ],
)
def test_a_mistake_is_named(words: str, error: str) -> None:
    with pytest.raises(CommandLineError, match=error):
        arguments_of(words)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model_keeps_every_kind_of_tensor_and_setting(name: str) -> None:
    """Checks that the tiny model has each kind of tensor of the full model."""

    def kinds(words: str) -> set[str]:
        keys = (tensor.key for tensor in model_sharded_tensors(model_of(words)))
        return {".".join(part for part in key.split(".") if not part.isdecimal()) for key in keys}

    tiny = f"--model {name} --model-scale tiny"
    assert kinds(tiny) == kinds(f"--model {name}")
    full, small = arguments_of(f"--model {name}"), arguments_of(tiny)
    assert sum(parameter.numel() for parameter in model_of(tiny).parameters()) < 1_000_000
    ratios = [(a.num_attention_heads, a.num_query_groups or a.num_attention_heads) for a in (full, small)]
    assert ratios[0][0] * ratios[1][1] == ratios[1][0] * ratios[0][1]
    # Settings other than sizes are unchanged.
    for switch in ("rotary_percent", "use_rope_scaling", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"):
        assert vars(full)[switch] == vars(small)[switch]
    for either in ("window_size", "moe_router_num_groups", "moe_shared_expert_intermediate_size", "q_lora_rank"):
        assert (vars(full)[either] is None) == (vars(small)[either] is None)


@pytest.mark.parametrize("name", ["glm-4.5", "deepseek-v3", "gpt-oss-20b"])
def test_a_tiny_model_computes(name: str) -> None:
    model = model_of(f"--model {name} --model-scale tiny", on_meta=False).eval()
    tokens = torch.arange(16).view(1, 16)
    assert model(tokens, tokens, None).isfinite().all()


def test_the_list_names_each_model_with_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of("--list-models")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == NAMES
    assert "30,532,122,624" in next(line for line in lines if line.startswith("qwen3-30b-a3b"))
