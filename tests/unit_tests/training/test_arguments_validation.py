"""Tests of checks across flags: contradictions are reported with a fix, and derived arguments are set."""

import argparse
import re
from dataclasses import fields

import pytest
import torch

from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.config_builder import with_flag_names
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import flag_table
from megatron.training.command_line.validation import check_layout
from megatron.training.config import areas_with_flags

LOCAL = "--cuda-graph-impl local --cuda-graph-modules "
MLA_NOTE = "--position-embedding-type is set to rope, because --multi-latent-attention uses rotary positions; learned"
OFFLOADED = (
    "--num-experts 2 --moe-grouped-gemm --disable-bias-linear --min-offloaded-tensor-size 1 "
    "--fine-grained-activation-offloading --offload-modules "
)
MINIMAL = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--mock-data": "",
    "--position-embedding-type": "rope",
}


def validated(words: str = "", drop: str = "") -> argparse.Namespace:
    kept = " ".join(f"{flag} {value}" for flag, value in MINIMAL.items() if flag not in drop.split())
    return validate_args(parse_args(argv=f"{kept} {words}".split()))


@pytest.mark.parametrize(
    ("words", "drop", "fragments"),
    [
        ("", "--num-layers --lr", ["missing --num-layers, --lr", "--use-checkpoint-args"]),
        ("", "--mock-data", ["--data-path", "--mock-data"]),
        ("--data-path books", "", ["--mock-data", "--data-path"]),
        ("--fp16 --bf16", "", ["--fp16", "--bf16"]),
        ("--hidden-size 66", "", ["--hidden-size is 66", "--num-attention-heads (4)", "--kv-channels"]),
        ("--num-layers 0", "", ["--num-layers is 0: must be at least 1"]),
        ("--num-attention-heads 0", "", ["--num-attention-heads is 0: must be at least 1"]),
        ("--micro-batch-size 0", "", ["--micro-batch-size is 0: must be at least 1"]),
        ("--hidden-size=-32", "", ["--hidden-size is -32: must be at least 1"]),
        ("--num-layers 2147483648", "", ["--num-layers is 2147483648: must be at most 100000"]),
        ("--vocab-size 99999999999999999999", "", ["--vocab-size is 99999999999999999999: must fit in 64 bits"]),
        (
            "--distributed-timeout-minutes 9223372036854775807",
            "",
            ["--distributed-timeout-minutes is", "at most 1000000"],
        ),
        ("--num-layers-per-virtual-pipeline-stage 0", "", ["--num-layers-per-virtual-pipeline-stage is 0: must be at"]),
        ("--global-batch-size=--", "", ["--global-batch-size: '--' is not a value"]),
        ("--num-experts 4 --moe-layer-freq " + "(" * 500, "", ["more than 50 nested parentheses"]),
        ("--train-iters 0", "", ["--train-iters is 0: must be at least 1", "--skip-train"]),
        ("--ffn-hidden-size 0", "", ["--ffn-hidden-size is 0: must be at least 1"]),
        ("--lr inf", "", ["--lr is inf: must be finite"]),
        ("--seed 4294967296", "", ["--seed is 4294967296: must be at most 4294967295"]),
        ("--save=", "", ["--save is empty"]),
        ("--group-query-attention --num-query-groups 3", "", ["--num-attention-heads is 4", "--num-query-groups (3)"]),
        ("--num-query-groups 2", "", ["--num-query-groups is 2", "--group-query-attention"]),
        (
            "--global-batch-size 3",
            "",
            [
                "--global-batch-size is 3",
                "--micro-batch-size (2)",
                "data-parallel size (1), such as 2 or 4; or set --decrease",
            ],
        ),
        ("--max-position-embeddings 16", "", ["--seq-length is 32", "--max-position-embeddings (16)"]),
        ("", "--position-embedding-type", ["learned_absolute", "--max-position-embeddings"]),
        ("--no-position-embedding", "--position-embedding-type", ["add --position-embedding-type none"]),
        ("--swiglu --squared-relu", "", ["--swiglu and --squared-relu"]),
        ("--quick-geglu --squared-relu", "", ["--quick-geglu and --squared-relu"]),
        ("--rope-scaling-factor 4", "", ["--rope-scaling-factor needs --use-rope-scaling"]),
        ("--rotary-percent 0", "", ["--rotary-percent is 0.0: must be more than 0"]),
        (
            "--rotary-interleaved --max-position-embeddings 32",
            "--position-embedding-type",
            ["--rotary-interleaved needs --position-embedding-type rope"],
        ),
        ("--rotary-scaling-factor 4", "", ["--rotary-scaling-factor is 4.0 but --rope-type is rope"]),
        (
            "--rope-type yarn --max-position-embeddings 32",
            "--position-embedding-type",
            ["--rope-type needs --position-embedding-type rope"],
        ),
        (
            "--position-embedding-type yarn --rope-type rope",
            "",
            ["--position-embedding-type is yarn and --rope-type is rope"],
        ),
        (
            "--position-embedding-type rope --rope-type yarn --use-rope-scaling",
            "",
            ["--use-rope-scaling and --rope-type yarn", "--rotary-scaling-factor"],
        ),
        (
            "--position-embedding-type yarn --yarn-beta-fast 1",
            "",
            ["--yarn-beta-fast is 1.0: must be more than --yarn-beta-slow (1.0)"],
        ),
        ("--apply-wd-to-qk-layernorm", "", ["--apply-wd-to-qk-layernorm needs --qk-layernorm"]),
        ("--q-lora-rank 8", "", ["--q-lora-rank is 8: requires --multi-latent-attention"]),
        (
            "--multi-latent-attention --position-embedding-type none",
            "",
            ["--multi-latent-attention uses rotary", "--position-embedding-type is none"],
        ),
        ("--multi-latent-attention --rotary-percent 0.5", "", ["--rotary-percent is 0.5", "--qk-pos-emb-head-dim"]),
        (
            "--multi-latent-attention --group-query-attention --num-query-groups 2",
            "",
            ["--num-query-groups is 2 and --multi-latent-attention is True"],
        ),
        ("--window-size 4", "", ["--window-size", "'4': must be two integers LEFT,RIGHT"]),
        ("--window-size 4,1", "", ["--window-size is (4, 1)"]),
        ("--moe-grouped-gemm", "", ["--moe-grouped-gemm needs --num-experts"]),
        ("--moe-layer-freq 2", "", ["--moe-layer-freq needs --num-experts"]),
        ("--num-experts 1", "", ["--moe-router-topk is 2", "--num-experts (1)"]),
        ("--num-experts 4 --moe-router-topk 1", "", ["--moe-router-topk is 1", "at least 2"]),
        (
            "--num-experts 4 --moe-grouped-gemm --disable-bias-linear --moe-ffn-hidden-size 33",
            "",
            ["--moe-ffn-hidden-size is 33: must be a multiple of 4"],
        ),
        (
            "--num-experts 4 --moe-grouped-gemm --disable-bias-linear --moe-ffn-hidden-size 100 --bf16",
            "",
            ["--moe-ffn-hidden-size is 100: must be a multiple of 8"],
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "",
            ["--moe-aux-loss-coeff is", "--moe-router-load-balancing-type is none"],
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.2",
            "",
            ["--moe-router-load-balancing-type is", "each type once"],
        ),
        ("--exit-signal 9", "", ["--exit-signal", "cannot be caught"]),
        ("--loss-scale-window 0.5", "", ["--loss-scale-window is 0.5: must be at least 1"]),
        ("--num-experts 4 --moe-layer-freq [1]", "", ["--moe-layer-freq has 1 entries", "--num-layers is 2"]),
        ("--min-lr 1", "", ["--min-lr is 1.0", "--lr,"]),
        ("--lr=-1", "", ["--lr is -1.0: must be more than 0"]),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "", ["--lr-warmup-fraction is 0.1", "--lr-warmup-iters is 2"]),
        ("--lr-warmup-iters 10", "", ["--lr-warmup-iters is 10", "--train-iters (10)"]),
        ("--lr-decay-style WSD", "", ["--lr-decay-style is WSD", "--lr-wsd-decay-iters"]),
        ("--lr-wsd-decay-iters 5", "", ["--lr-wsd-decay-iters", "--lr-decay-style"]),
        (
            "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
            "",
            ["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"],
        ),
        ("--train-samples 40", "", ["--train-iters is 10 and --train-samples is 40"]),
        ("--train-samples 40 --lr-decay-iters 9", "--train-iters", ["--lr-decay-iters is 9", "use --lr-decay-samples"]),
        ("--train-samples 1", "--train-iters", ["--train-samples is 1: must be at least one global batch"]),
        ("--lr-warmup-samples 8", "", ["--lr-warmup-samples is 8", "--train-iters: use --lr-warmup-iters"]),
        (
            "--global-batch-size 8 --rampup-batch-size 2 4 9",
            "",
            ["--rampup-batch-size is 2 4 9", "--global-batch-size"],
        ),
        (
            "--global-batch-size 8 --rampup-batch-size 2 1 9",
            "",
            ["becomes 3: must be a multiple of --micro-batch-size"],
        ),
        ("--step-batch-size-schedule 5:2", "", ["--step-batch-size-schedule is '5:2'", "must start at 0"]),
        ("--decoupled-min-lr 0.1", "", ["--decoupled-min-lr is 0.1: requires --decoupled-lr"]),
        ("--decoupled-lr 0.1 --decoupled-min-lr 1", "", ["--decoupled-lr is 0.1: must be at least its minimum, 1.0"]),
        (
            "--optimizer-cuda-graph",
            "",
            ["--cuda-graph-impl is none: the optimizer step is captured", "set --cuda-graph-impl full"],
        ),
        (
            "--optimizer-cuda-graph --cuda-graph-impl full_iteration --start-weight-decay 0.1 --end-weight-decay 0.2 "
            "--weight-decay-incr-style linear",
            "",
            ["--end-weight-decay is 0.2: --optimizer-cuda-graph captures", "use only --weight-decay"],
        ),
        (
            "--optimizer-cuda-graph --cuda-graph-impl full_iteration --optimizer muon",
            "",
            ["--optimizer is muon, which requires a host decision"],
        ),
        ("--cuda-graph-modules mlp", "", ["--cuda-graph-modules is mlp and --cuda-graph-impl is none"]),
        (
            LOCAL + "moe",
            "",
            [
                "--cuda-graph-modules is moe and --cuda-graph-impl is local",
                "moe needs MoE layers, and no layer has experts",
            ],
        ),
        (LOCAL + "mlp --num-experts 2", "", ["mlp needs dense layers, and no layer is dense; give moe"]),
        (LOCAL + "moe experts --num-experts 2", "", ["moe captures the whole layer, which includes experts"]),
        (LOCAL + "moe_preprocess --num-experts 2", "", ["in the same graph; add moe_router"]),
        (LOCAL + "attn mlp --reset-attention-mask", "", ["leave attention eager by --cuda-graph-modules mlp"]),
        (
            LOCAL + "mlp --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "",
            ["--recompute-granularity is full", "choose selective"],
        ),
        (
            LOCAL + "attn moe_router --num-experts 2 --recompute-granularity selective --recompute-modules moe",
            "",
            ["--recompute-modules is moe and --cuda-graph-impl is local", "capture moe instead of its parts"],
        ),
        ("--start-weight-decay 0.1", "", ["--start-weight-decay is 0.1", "--weight-decay-incr-style is constant"]),
        ("--tensor-model-parallel-size 2", "", ["world size is 1", "--tensor-model-parallel-size x", "(2)"]),
        (
            "--optimizer muon --tensor-model-parallel-size 2",
            "",
            ["--optimizer is muon with --tensor-model-parallel-size 2", "both must be 1"],
        ),
        ("--expert-model-parallel-size 3", "", ["world size is 1", "x --expert-model-parallel-size x", "(3)"]),
        ("--sequence-parallel --tensor-model-parallel-size 0", "", ["--tensor-model-parallel-size is 0: must be at"]),
        ("--num-virtual-stages-per-pipeline-rank 2", "", ["--pipeline-model-parallel-size is 1: 2 virtual stages"]),
        (
            "--num-layers-per-virtual-pipeline-stage 3",
            "",
            ["--num-layers is 2", "x --num-layers-per-virtual-pipeline-stage (3)"],
        ),
        (
            "--num-layers 6 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            "",
            ["--num-layers is 6: must be a multiple of", "x --num-layers-per-virtual-pipeline-stage (4)"],
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2",
            "",
            ["--num-layers-per-virtual-pipeline-stage is 1 and --num-virtual-stages-per-pipeline-rank is 2: give one"],
        ),
        ("--finetune", "", ["--finetune needs --load"]),
        ("--skip-train", "", ["--skip-train evaluates the checkpoint of --load"]),
        ("--ckpt-step 0", "", ["--ckpt-step needs --load"]),
        ("--ckpt-format torch --save x", "", ["--ckpt-format is torch with --save x", "use torch_dist"]),
        ("--use-checkpoint-args", "--num-layers", ["--use-checkpoint-args needs --load"]),
        ("--save-interval 5", "", ["--save-interval needs --save"]),
        ("--tokenizer-type NullTokenizer", "", ["--vocab-size"]),
        ("--adam-beta1 1", "", ["--adam-beta1 is 1.0: must be less than 1"]),
    ],
)
def test_contradictions_name_the_flags_and_the_fix(words: str, drop: str, fragments: list[str]) -> None:
    with pytest.raises(CommandLineError) as caught:
        validated(words, drop)
    message = str(caught.value)
    assert all(fragment in message for fragment in fragments), message
    assert all("--" in line for line in message.splitlines()), message
    assert not names_of_fields(message), message


def names_of_fields(message: str) -> set[str]:
    """Returns the words of a message that are configuration fields, and not values of a flag."""
    words = set(re.findall(r"(?<![-\w/])[A-Za-z]\w*_\w+", message.replace("Config.", "")))
    values = {value for flag in flag_table().flags for value in flag.choices or ()}
    return (
        words & {field.name for config_class in areas_with_flags().values() for field in fields(config_class)} - values
    )


def test_all_contradictions_are_told_at_once() -> None:
    words = """
        --hidden-size 66 --hidden-dropout 2 --adam-beta1 3 --clip-grad -1 --min-lr 1 --fp16 --bf16 --lr-warmup-iters 50
        --finetune --ckpt-step 3 --save-interval 2 --num-query-groups 3 --rotary-percent 0.5 --num-experts 4
        --moe-router-topk 7 --moe-shared-expert-overlap --moe-token-dispatcher-type flex --tensor-model-parallel-size 3
        --position-embedding-type none --overlap-param-gather --profile-ranks 9 --profile --optimizer-cuda-graph
        --non-finite-policy rewind --log-progress
    """
    with pytest.raises(CommandLineError) as caught:
        validated(words)
    lines = str(caught.value).splitlines()
    expected = [
        "--hidden-size is 66: must be divisible by --num-attention-heads",
        "--hidden-dropout is 2.0: must be less than 1",
        "--adam-beta1 is 3.0: must be less than 1",
        "--clip-grad is -1.0: must be at least 0",
        "--min-lr is 1.0: must be at most --lr",
        "--fp16 and --bf16 are both given",
        "--lr-warmup-iters is 50: must be less than --train-iters (10)",
        "--finetune needs --load",
        "--ckpt-step needs --load",
        "--save-interval needs --save",
        "--num-query-groups is 3 without --group-query-attention",
        "--rotary-percent needs --position-embedding-type rope",
        "--moe-router-topk is 7: must be at most --num-experts (4)",
        "--moe-token-dispatcher-type is flex but --moe-expert-rank-capacity-factor is not set",
        "world size is 1: must be a multiple of --tensor-model-parallel-size",
        "--num-attention-heads is 4: must be a multiple of --tensor-model-parallel-size (3)",
        "--overlap-param-gather is set: requires --use-distributed-optimizer",
        "--profile-ranks has 9: must be below the number of processes (1)",
        "--optimizer-cuda-graph is given and --cuda-graph-impl is none",
        "--non-finite-policy is rewind: needs --save and --save-interval",
        "--log-progress needs --save",
    ]
    assert [line for line in expected if not any(one.startswith(line) for one in lines)] == []
    assert all("--" in line for line in lines) and not names_of_fields(str(caught.value))


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            "--num-experts 2 --moe-layer-freq 0 --cuda-graph-impl local --ckpt-step 1",
            ["--moe-layer-freq is 0: must be at least 1", "--ckpt-step needs --load"],
        ),
        ("--recompute-granularity full --ckpt-step 1", ["--recompute-granularity is full", "--ckpt-step needs --load"]),
        ("--train-iters=-1", ["--train-iters is -1: must be at least 1"]),
        ("--split 0,0,0", ["--split is '0,0,0': must be up to three numbers for train,valid,test, not all 0"]),
    ],
)
def test_checks_after_one_that_fails_still_tell_what_they_find(words: str, lines: list[str]) -> None:
    with pytest.raises(CommandLineError) as caught:
        validated(words)
    told = str(caught.value).splitlines()
    assert len(told) == len(lines) and all(line.startswith(start) for line, start in zip(told, lines)), told


def test_a_wrong_value_is_told_once_and_not_as_a_contradiction() -> None:
    with pytest.raises(CommandLineError) as caught:
        validated("--num-experts 0 --moe-router-topk 3 --moe-grouped-gemm --num-layers 0 --recompute-num-layers 9")
    assert str(caught.value).splitlines() == [
        "--num-layers is 0: must be at least 1",
        "--num-experts is 0: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("words", "dest", "value", "note"),
    [
        ("--recompute-num-layers 1", "recompute_num_layers", None, "--recompute-num-layers 1 has no effect without"),
        ("--multi-latent-attention --max-position-embeddings 32", "position_embedding_type", "rope", MLA_NOTE),
        ("--loss-scale 128 --bf16", "loss_scale", 128, "--loss-scale has no effect without --fp16"),
        ("--lora-alpha 16", "lora_rank", None, "--lora-alpha has no effect without --lora-rank: there are no adapters"),
        ("--skip-train --load /nowhere", "exit_on_missing_checkpoint", True, None),
        (
            OFFLOADED + "expert_fc1 qkv_linear --recompute-granularity selective --recompute-modules moe",
            "offload_modules",
            ["qkv_linear"],
            "--offload-modules drops expert_fc1 (recomputed with moe)",
        ),
        (
            "--context-parallel-size 2 --attention-dropout 0.1",
            "cp_comm_type",
            "a2a",
            "--cp-comm-type is set to a2a, because p2p",
        ),
        ("--context-parallel-size 2 --attention-dropout 0", "cp_comm_type", "p2p", None),
        (
            "--hysteresis 4 --loss-scale 8 --bf16",
            "hysteresis",
            4,
            "--loss-scale, --hysteresis has no effect without",
        ),
        ("--hysteresis 4 --fp16", "hysteresis", 4, None),
        ("--sgd-momentum 0.5", "sgd_momentum", 0.5, "--sgd-momentum has no effect with --optimizer adam"),
        ("--sgd-momentum 0.5 --optimizer sgd", "sgd_momentum", 0.5, None),
        ("--adam-beta1 0.5 --optimizer sgd", "adam_beta1", 0.5, "--adam-beta1 has no effect with --optimizer sgd"),
        ("--min-lr 1e-5 --lr-decay-style constant", "min_lr", 1e-5, "--min-lr has no effect with --lr-decay-style"),
        ("--lr-wsd-decay-style linear", "lr_wsd_decay_style", "linear", "without --lr-decay-style WSD"),
        (
            "--init-method-xavier-uniform --init-method-std 0.3",
            "init_method_std",
            0.3,
            "--init-method-std has no effect",
        ),
        (
            "--weight-decay 0.3 --weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2",
            "weight_decay",
            0.3,
            "--weight-decay has no effect with --start-weight-decay and --end-weight-decay",
        ),
        ("--lr-warmup-init 1e-5", "lr_warmup_init", 1e-5, "--lr-warmup-init has no effect without warm-up"),
    ],
)
def test_flags_that_leave_one_meaning_get_it_and_a_note(
    words: str,
    dest: str,
    value: object,
    note: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    drop = "--position-embedding-type" if "--multi-latent" in words else ""
    assert vars(validated(words, drop))[dest] == value
    said = capsys.readouterr().err
    assert note in said if note is not None else "note:" not in said


def test_a2a_is_not_chosen_where_query_groups_of_a_tensor_rank_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    assert validated(words).cp_comm_type == "a2a"
    with pytest.raises(CommandLineError, match="^--attention-dropout is 0.1, .* and --cp-comm-type is p2p"):
        validated(f"{words} --group-query-attention --num-query-groups 2")


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (
            "--context-parallel-size 2 --attention-dropout 0 --reset-attention-mask",
            ["--context-parallel-size is 2", "add --no-create-attention-mask-in-dataloader"],
        ),
        ("--context-parallel-size 3", ["--seq-length is 32", "2 x --context-parallel-size (6)"]),
        (
            "--context-parallel-size 4 --attention-dropout 0 --hierarchical-context-parallel-sizes 2 3",
            ["--hierarchical-context-parallel-sizes is [2, 3]", "whose product is --context-parallel-size (4)"],
        ),
        (
            "--context-parallel-size 4 --attention-dropout 0 --cp-comm-type a2a+p2p",
            ["--cp-comm-type is a2a+p2p", "--hierarchical-context-parallel-sizes is None", "must be two sizes"],
        ),
        (
            "--context-parallel-size 4 --attention-dropout 0 --hierarchical-context-parallel-sizes 2 2",
            ["--hierarchical-context-parallel-sizes is [2, 2]", "--cp-comm-type is p2p: only a2a+p2p has levels"],
        ),
        (
            "--tensor-model-parallel-size 3 --context-parallel-size 4 --sequence-parallel",
            ["--seq-length is 32", "--context-parallel-size x --tensor-model-parallel-size (12)"],
        ),
        (
            "--tensor-model-parallel-size 4 --padded-vocab-size 66",
            ["--padded-vocab-size is 66", "--tensor-model-parallel-size (4)"],
        ),
    ],
)
def test_tokens_must_divide_among_ranks(words: str, fragments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    test_contradictions_name_the_flags_and_the_fix(words, "", fragments)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", (3, False, None)),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1 --sequence-parallel",
            (6, False, None),
        ),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4", (6, False, 4)),
        (
            "--num-layers 12 --pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 2"
            " --tensor-model-parallel-size 2 --sequence-parallel",
            (2, True, 2),
        ),
    ],
)
def test_copies_and_virtual_stages_follow_from_the_layout(
    words: str, expected: tuple[int, bool, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    args = parse_args(argv=f"--seq-length 32 --num-layers 8 {words}".split())
    assert [*check_layout(args)] == []
    assert (args.data_parallel_size, args.sequence_parallel, args.virtual_pipeline_model_parallel_size) == expected


def test_absent_values_follow_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    args = vars(validated("--fp16"))
    expected = {
        "world_size": 3,
        "rank": 2,
        "data_parallel_size": 3,
        "global_batch_size": 6,
        "ffn_hidden_size": 256,
        "kv_channels": 16,
        "max_position_embeddings": 32,
        "params_dtype": torch.float16,
        "consumed_train_samples": 0,
        "padded_vocab_size": None,
    }
    assert expected.items() <= args.items()


def test_validation_is_idempotent_and_a_missing_checkpoint_is_no_error() -> None:
    args = validated("--load /nowhere --swiglu --num-experts 4")
    before = dict(vars(args))
    assert vars(validate_args(args)) == before


def test_evaluation_alone_needs_neither_steps_nor_learning_rate() -> None:
    assert vars(validated("--skip-train --load x", drop="--train-iters --lr"))["lr"] is None


def test_defaults_of_a_script_fill_what_nobody_gave() -> None:
    args = parse_args(
        argv="--num-layers 2 --seed 3 --mock-data --skip-train --load x --position-embedding-type none".split()
    )
    defaults = {"num_layers": 9, "seed": 9, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    validate_args(args, {**defaults, "micro_batch_size": 1})
    assert (args.num_layers, args.seed, args.hidden_size) == (2, 3, 8)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("OptimizerConfig.lr is 0: must be more than 0", "--lr is 0: must be more than 0"),
        ("moe_router_topk is 3: at most num_moe_experts (2)", "--moe-router-topk is 3: at most --num-experts (2)"),
        ("set add_bias_linear=False (--disable-bias-linear)", "set add_bias_linear=False (--disable-bias-linear)"),
        ("some_word in /my/data_path.txt", "some_word in /my/data_path.txt"),
    ],
)
def test_errors_name_flags_where_fields_have_one(message: str, expected: str) -> None:
    assert with_flag_names(message, flag_table()) == expected


def test_an_old_script_may_leave_out_the_tokenizer_type_and_give_no_position_embedding_beside_rope() -> None:
    args = validated("--vocab-file v.json --merge-file m.txt --no-position-embedding", "--tokenizer-type --vocab-size")
    assert (args.tokenizer_type, args.position_embedding_type) == ("GPT2BPETokenizer", "rope")
