"""Models of drawn flags go from a run to Hugging Face, back, and on in a run, with the same logits in transformers.

Each family has flags without which its architecture is another one. All other flags are drawn, and often left out.
"""

import argparse
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron.core.dist_checkpointing import load_items, model_sharded_tensors, save_stream
from megatron.core.models.gpt import GPTModel
from megatron.tools.hugging_face.verify import logits_of
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing.folder import write_tracker
from megatron.training.checkpointing.run_values import args_to_json, load_args_from_checkpoint
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.gpt_builder import build_gpt
from tests.unit_tests.tools.hugging_face.conversions import contents, convert, told

VOCABULARY, LENGTH, LAYERS = 61, 24, 3
RUN = f"""--num-layers {LAYERS} --hidden-size 48 --num-attention-heads 4 --seq-length {LENGTH} --micro-batch-size 1
    --vocab-size {VOCABULARY} --tokenizer-type NullTokenizer --mock-data --train-iters 1 --lr 1e-3"""
# Megatron's default is a model with biases, LayerNorm and learned positions, which is no architecture here.
LLAMA_LIKE = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
SHARED = "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --add-qkv-bias"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32"
LATENT = """--multi-latent-attention --qk-layernorm --kv-lora-rank 12 --qk-head-dim 10 --qk-pos-emb-head-dim 6
    --v-head-dim 9 --norm-epsilon 1e-6 --moe-router-dtype fp32"""
GPT_OSS = """--normalization RMSNorm --quick-geglu --activation-func-clamp-value 7.0 --glu-linear-offset 1.0
    --softmax-type learnable --position-embedding-type rope --num-experts 4"""

# Choices of one flag, or of several together; "" leaves it out.
HEADS = [
    ["", "--group-query-attention", *(f"--group-query-attention --num-query-groups {groups}" for groups in (1, 2))],
    ["", "--kv-channels 8", "--kv-channels 20"],
]
COMMON = [
    ["", "--untie-embeddings-and-output-weights"],
    ["", "--ffn-hidden-size 40"],
    ["", "--max-position-embeddings 64"],
    ["", "--rotary-base 5000"],
    ["", "--make-vocab-size-divisible-by 3"],
]
EPSILON = ["", "--norm-epsilon 1e-6", "--norm-epsilon 1e-4"]
ROTATION = ["", "", "--use-rope-scaling", "--rotary-seq-len-interpolation-factor 2"]
WINDOW = ["", "--window-size 5,0", "--window-size 5,0 --window-attn-skip-freq [1,0,1]"]
CENTERED = ["", "--apply-layernorm-1p"]
EXPERTS = [
    ["--num-experts 4", "--num-experts 6"],
    ["", "--moe-ffn-hidden-size 24"],
    ["", "--moe-router-topk 1 --moe-router-pre-softmax", "--moe-router-topk 3"],
    ["", "--moe-grouped-gemm"],
]
PRE_SOFTMAX = ["", "--moe-router-pre-softmax"]
FREQUENCY = ["", "--moe-layer-freq [0,1,1]", "--moe-layer-freq [1,0,1]", "--moe-layer-freq 2"]
FINE_GRAINED = [
    ["--num-experts 8"],
    ["", "--moe-ffn-hidden-size 24"],
    ["", "--moe-layer-freq [0,1,1]", "--moe-layer-freq [0,0,1]"],
    ["", "--moe-router-topk-scaling-factor 2.5"],
    ["", "--moe-grouped-gemm"],
]
Choices = list[list[str]]
FAMILIES: dict[str, tuple[str, Choices]] = {
    "LlamaForCausalLM": (LLAMA_LIKE, [*COMMON, *HEADS, EPSILON, ROTATION, ["", "--lora-rank 3"], CENTERED]),
    "Qwen2ForCausalLM": (f"{LLAMA_LIKE} --add-qkv-bias", [*COMMON, *HEADS, EPSILON, WINDOW]),
    "Qwen3ForCausalLM": (f"{LLAMA_LIKE} --qk-layernorm", [*COMMON, *HEADS, EPSILON, WINDOW]),
    "Qwen2MoeForCausalLM": (
        f"{LLAMA_LIKE} {SHARED}",
        [*COMMON, HEADS[0], EPSILON, WINDOW, *EXPERTS, FREQUENCY],
    ),
    "Qwen3MoeForCausalLM": (f"{LLAMA_LIKE} --qk-layernorm", [*COMMON, *HEADS, EPSILON, *EXPERTS, FREQUENCY, CENTERED]),
    "MixtralForCausalLM": (
        LLAMA_LIKE,
        [*COMMON, *HEADS, EPSILON, WINDOW[:2], EXPERTS[0], EXPERTS[1], ["", "--moe-router-topk 3"], EXPERTS[3]],
    ),
    "Glm4MoeForCausalLM": (
        f"{LLAMA_LIKE} {SIGMOID} --moe-router-topk 4",
        [
            *COMMON,
            *HEADS,
            EPSILON,
            *FINE_GRAINED,
            ["", "--rotary-percent 0.5"],
            ["", "--qk-layernorm"],
            ["", "--add-qkv-bias"],
            ["", "--mtp-num-layers 1"],
            ["", "--moe-router-num-groups 4 --moe-router-group-topk 2"],
            ["--moe-shared-expert-intermediate-size 24 --moe-ffn-hidden-size 24", ""],
        ],
    ),
    "DeepseekV2ForCausalLM": (
        f"{LLAMA_LIKE} {LATENT} --moe-router-pre-softmax --rope-type rope",
        [
            *COMMON,
            *FINE_GRAINED,
            ["", "--q-lora-rank 14"],
            ["", "--moe-router-topk 3"],
            ["", "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score max"],
            ["", "--moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 48"],
        ],
    ),
    "DeepseekV3ForCausalLM": (
        f"{LLAMA_LIKE} {LATENT} {SIGMOID} --moe-router-topk 4",
        [
            *COMMON,
            *FINE_GRAINED,
            ["", "--q-lora-rank 14"],
            ["", "--mtp-num-layers 1"],
            ["", "--rope-type rope", "--rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.7"],
            ["", "--moe-router-num-groups 4 --moe-router-group-topk 2"],
        ],
    ),
    "GptOssForCausalLM": (
        GPT_OSS,
        [
            *COMMON,
            *HEADS,
            EPSILON,
            ["", "--moe-ffn-hidden-size 24"],
            ["", "--moe-router-topk 3"],
            ["", "--window-size 5,0 --window-attn-skip-freq [1,0,1]", "--window-size 5,0"],
            ["", "--rope-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"],
            ["", "--moe-grouped-gemm"],
        ],
    ),
}
DRAWS = 3


def drawn(family: str, number: int) -> list[str]:
    """Returns a command line. Draw 0 leaves out every flag that may be left out."""
    fixed, choices = FAMILIES[family]
    generator = random.Random(zlib.crc32(f"{family} {number}".encode()))
    chosen = [("" if "" in some else some[0]) if number == 0 else generator.choice(some) for some in choices]
    return " ".join([RUN, fixed, *chosen]).split()


def arguments_of(argv: list[str]) -> argparse.Namespace:
    """Returns the arguments of a run with these flags, as pretrain() completes them."""
    args = parse_args(argv=argv)
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args)
    validate_args(args)
    args.unpadded_vocab_size = VOCABULARY
    multiple = args.make_vocab_size_divisible_by
    args.padded_vocab_size = -(-VOCABULARY // multiple) * multiple
    return args


def trained(args: argparse.Namespace) -> GPTModel:
    """Returns a model in which no tensor has the value that it is initialized with."""
    torch.manual_seed(5)
    model = build_gpt(args).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.2 * torch.randn_like(tensor))
    return model


def save(model: GPTModel, args: argparse.Namespace, folder: Path) -> Path:
    common = {
        "iteration": 1,
        "train_state": TrainState(iteration=1).state_dict(),
        "args": args_to_json(vars(args)),
        "contents": {"optimizer": False, "rng": False},
        "frozen": [],
    }
    save_stream(model_sharded_tensors(model), folder / "iter_0000001", common=common)
    write_tracker(str(folder), 1)
    return folder


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(8))


def logits_in_transformers(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens()).logits


def assert_close(found: Tensor, expected: Tensor, *, tolerance: float = 1e-5) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) <= tolerance


@pytest.mark.parametrize("number", range(DRAWS))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_to_hugging_face_and_back_and_on(family: str, number: int, tmp_path: Path) -> None:
    argv = drawn(family, number)
    args = arguments_of(argv)
    model = trained(args)
    with torch.no_grad():
        expected = logits_of(model, tokens())
    hub = convert(save(model, args, tmp_path / "run"), tmp_path / "hub", back=True)
    assert json.loads((hub / "config.json").read_text())["architectures"] == [family], " ".join(argv)
    # Merged adapters, and norm weights of which 1 is subtracted in a run, are rounded again.
    is_rounded = {"--lora-rank", "--apply-layernorm-1p"} & set(argv)
    tolerance = 1e-4 if is_rounded else 1e-5
    assert_close(logits_in_transformers(hub), expected, tolerance=tolerance)
    back = convert(hub, tmp_path / "back")
    # A run that continues from it, with the flags of the model from the checkpoint.
    further = [*RUN.split(), "--load", str(back), "--use-checkpoint-args", "--finetune"]
    further += [flag for flag in ("--moe-grouped-gemm",) if flag in argv]
    settings = arguments_of(further)
    on = build_gpt(settings).eval()
    load_items(model_sharded_tensors(on, allow_cast=True), back / "release")
    with torch.no_grad():
        assert_close(logits_of(on, tokens()), expected, tolerance=tolerance)
    again = convert(save(on, settings, tmp_path / "on"), tmp_path / "again", back=True)
    assert contents(again) == contents(hub)
    assert json.loads((again / "config.json").read_text()) == json.loads((hub / "config.json").read_text())


NO_WINDOW = {"sliding_window": 128, "layer_types": ["full_attention"] * LAYERS}


# Widths by Megatron's rules: 4 x 48 without a gate, and 8/3 x 48 = 128 with one, a multiple of 64.
@pytest.mark.parametrize(
    ("flags", "config"),
    [
        (f"{LLAMA_LIKE} --num-experts 4 --ffn-hidden-size 40", {"intermediate_size": 40, "num_local_experts": 4}),
        (f"{LLAMA_LIKE} --num-experts 4", {"intermediate_size": 128, "num_experts_per_tok": 2}),
        (LLAMA_LIKE, {"intermediate_size": 128, "head_dim": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
        (f"{LLAMA_LIKE} --group-query-attention", {"num_key_value_heads": 1}),
        (f"{LLAMA_LIKE} --add-qkv-bias --kv-channels 20", {"model_type": "qwen2", "head_dim": 20}),
        (
            f"{LLAMA_LIKE} --qk-layernorm --num-experts 6 --moe-layer-freq 2 --ffn-hidden-size 40",
            {"moe_intermediate_size": 40, "intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": True},
        ),
        (
            f"{LLAMA_LIKE} --qk-layernorm --window-size 5,0 --window-attn-skip-freq 3",
            {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        ),
        (GPT_OSS, {"intermediate_size": 192, "rope_scaling": {"rope_type": "default"}, **NO_WINDOW}),
        (
            f"{LLAMA_LIKE} {LATENT} {SIGMOID} --num-experts 8 --moe-router-topk 4",
            {"moe_intermediate_size": 128, "n_shared_experts": 0, "first_k_dense_replace": 0, "q_lora_rank": None},
        ),
        (
            f"{LLAMA_LIKE} {SIGMOID} --num-experts 8 --moe-shared-expert-intermediate-size 256",
            {"moe_intermediate_size": 128, "n_shared_experts": 2, "partial_rotary_factor": 1.0, "n_group": 1},
        ),
        (f"{LLAMA_LIKE} --max-position-embeddings 96", {"max_position_embeddings": 96, "tie_word_embeddings": True}),
    ],
)
def test_values_that_flags_leave_out_are_in_config_json(flags: str, config: dict[str, Any], tmp_path: Path) -> None:
    args = arguments_of([*RUN.split(), *flags.split()])
    hub = convert(save(trained(args), args, tmp_path / "run"), tmp_path / "hub", back=True)
    written = json.loads((hub / "config.json").read_text())
    assert {key: written.get(key) for key in config} == config


@pytest.mark.parametrize(
    "left_out", ["moe_ffn_hidden_size", "kv_channels", "max_position_embeddings", "ffn_hidden_size"]
)
@pytest.mark.parametrize("unset", [True, False], ids=["null", "absent"])
def test_checkpoints_without_an_argument_have_its_default(left_out: str, unset: bool, tmp_path: Path) -> None:
    """Arguments of older versions, and of Megatron's checkpoints, are incomplete."""
    args = arguments_of([*RUN.split(), *LLAMA_LIKE.split(), "--num-experts", "4"])
    model = trained(args)
    stored = args_to_json(vars(args))
    stored = {**stored, left_out: None} if unset else {k: v for k, v in stored.items() if k != left_out}
    hub = convert(save(model, argparse.Namespace(**stored), tmp_path / "run"), tmp_path / "hub", back=True)
    with torch.no_grad():
        assert_close(logits_in_transformers(hub), logits_of(model, tokens()))


@pytest.mark.parametrize(
    ("flags", "stored", "message"),
    [
        (
            "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
            {},
            "--moe-router-load-balancing-type is sinkhorn",
        ),
        ("", {"spec": ["my_layers", "spec"]}, "--spec is ['my_layers', 'spec']: cannot be converted"),
        ("--attention-output-gate", {}, "differs in --attention-output-gate (False, True here)"),
        ("--moe-layer-freq [0,1,0]", {}, "no architecture supports these settings"),
        ("--rotary-interleaved", {}, "differs in --rotary-interleaved (False, True here)"),
    ],
)
def test_settings_that_no_architecture_has_are_named(
    flags: str, stored: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments_of([*RUN.split(), *LLAMA_LIKE.split(), "--num-experts", "4", *flags.split()])
    model = trained(args)
    vars(args).update(stored)
    assert message in told(capsys, save(model, args, tmp_path / "run"), tmp_path / "hub", back=True)
    assert not (tmp_path / "hub").exists()
