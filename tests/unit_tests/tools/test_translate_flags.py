"""Translation of a launch script: the resulting words, the reason for each change, and the exit status."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.tools.bash_reader import Launch, ScriptError
from megatron.tools.translate_flags import (
    VERDICTS,
    Effect,
    Setting,
    change_of,
    group_words,
    load_rules,
    main,
    problems_of,
    translate,
)
from megatron.training.command_line.flags import FlagState, flag_table
from tests.functional_tests.launch import run_program

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16".split()
RUN = "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 0.001".split()
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 64".split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --swiglu".split()
DROPLESS = "--num-experts 4 --moe-grouped-gemm"
STATIC_WITHOUT_GEMM = "--num-experts 4 --moe-expert-rank-capacity-factor 1.5"
STATIC = f"{STATIC_WITHOUT_GEMM} --moe-grouped-gemm"
# Megatron-LM's recipe for the paged stash, with the HybridEP dispatcher, fused layers and FP8 GEMMs.
STASH = """
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 32
    --use-transformer-engine-op-fuser --transformer-impl transformer_engine --te-rng-tracker
    --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --bf16
    --moe-router-padding-for-quantization --moe-mlp-glu-interleave-size 32
    --moe-paged-stash --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash-buffer-size-factor-cuda 1.2
    --moe-paged-stash-buffer-size-factor-cpu 1.0 --moe-router-force-load-balancing
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --expert-model-parallel-size 2
""".split()


def _translate(
    *words: str, launcher: Sequence[str] = ("torchrun", "--nproc-per-node", "2")
) -> tuple[list[str], Effect]:
    translation = translate(Launch(tuple(launcher), "pretrain_gpt.py", words))
    return list(translation.launch.words), translation.effect


def _write(folder: Path, *words: str, program: str = "pretrain_gpt.py") -> Path:
    script = folder / "train.sh"
    script.write_text(f"torchrun --nproc-per-node 2 {program} {shlex.join(words)}\n", encoding="utf-8")
    return script


def test_a_command_that_works_as_it_is_stays_as_it_is() -> None:
    data = ["--mock-data", "--tokenizer-type", "ByteLevelTokenizer"]
    assert _translate(*MODEL, *RUN, *data, "--bf16") == ([*MODEL, *RUN, *data, "--bf16"], Effect.SAME)


@pytest.mark.parametrize(
    ("given", "result", "effect"),
    [
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2", Effect.SAME),
        ("--transformer-impl transformer_engine", "", Effect.SPEED),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "--cuda-graph-impl full_iteration", Effect.SAME),
        ("--enable-cuda-graph --cuda-graph-scope mlp", "--cuda-graph-impl local --cuda-graph-modules mlp", Effect.SAME),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "--moe-token-dispatcher-type alltoall", Effect.SPEED),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep --moe-expert-rank-capacity-factor 2",
         "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --moe-expert-rank-capacity-factor 2",
         Effect.SAME),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
         "--moe-token-dispatcher-type alltoall", Effect.SPEED),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
         "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", Effect.SAME),
        ("--fp8-format hybrid --bf16", "--bf16", Effect.DIFFERENT),
        ("--fp8-format hybrid", "--bf16", Effect.DIFFERENT),
        (f"{DROPLESS} --fp8-format e4m3", f"{DROPLESS} --bf16", Effect.DIFFERENT),
        (f"{DROPLESS} --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16", f"{DROPLESS} --bf16",
         Effect.DIFFERENT),
        (f"{STATIC} --fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
         f"{STATIC} --fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
         Effect.DIFFERENT),
        (f"{STATIC} --fp8-format hybrid --fp8-recipe mxfp8 --moe-router-padding-for-fp8",
         f"{STATIC_WITHOUT_GEMM} --fp8-format e4m3 --moe-grouped-gemm --fp8-recipe mxfp8 --moe-router-padding-for-fp8",
         Effect.DIFFERENT),
        (f"{DROPLESS} --fp8-format e4m3 --fp8-recipe mxfp8 --num-layers-at-end-in-bf16 2",
         "--num-experts 4 --fp8-format e4m3 --moe-grouped-gemm --moe-expert-rank-capacity-factor 2 --fp8-recipe mxfp8",
         Effect.DIFFERENT),
        (f"{DROPLESS} --moe-expert-capacity-factor 1 --fp8-format e4m3 --fp8-recipe mxfp8",
         f"{DROPLESS} --moe-expert-capacity-factor 1 --bf16", Effect.DIFFERENT),
        ("--num-experts 4 --fp8-recipe mxfp8 --num-layers-at-start-in-bf16 2", "--num-experts 4", Effect.SAME),
        (f"{STATIC} --fp8-format e4m3 --fp8-recipe mxfp8 --num-layers-at-start-in-bf16 2"
         " --moe-dispatch-fwd-dtype mxfp8",
         f"{STATIC} --fp8-format e4m3 --fp8-recipe mxfp8", Effect.DIFFERENT),
        ("--optimizer dist_muon --muon-coefficient-type simple",
         "--optimizer muon --use-distributed-optimizer --muon-coefficient-type simple", Effect.SAME),
        ("--optimizer muon", "--optimizer muon", Effect.DIFFERENT),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "--use-torch-fsdp2", Effect.SPEED),
        ("--ckpt-format torch --lr=0.1", "--ckpt-format torch_dist --lr 0.1", Effect.SAME),
        ("--load x --ckpt-format torch", "--load x --ckpt-format torch_dist", Effect.SAME),
        ("--load x --ckpt-format zarr", "--load x --ckpt-format torch_dist", Effect.DIFFERENT),
        ("--one-logger-project x --enable-ft-package", "", Effect.SAME),
        ("--is-hybrid-model --lr 1", "--lr 1", Effect.DIFFERENT),
        ("--perform-rl-step", "", Effect.DIFFERENT),
        ("--dsa-indexer-topk 4", "", Effect.DIFFERENT),
        ("--no-such-flag 3", "", Effect.DIFFERENT),
        ("--position-embedding-type mrope", "", Effect.DIFFERENT),
        ("--mamba-state-dim 128", "", Effect.SAME),  # set to its default, in a script that sets every flag
        # Flags whose meaning differs, and lists and units of the same meaning.
        ("--tokenizer-type NullTokenizer --vocab-size 64",
         "--tokenizer-type NullTokenizer --vocab-size 65", Effect.SAME),
        ("--vocab-size ${V} --tokenizer-type NullTokenizer", "--vocab-size $((${V}+1)) --tokenizer-type NullTokenizer",
         Effect.SAME),
        ("--tokenizer-type NullTokenizer --vocab-size 64 --null-tokenizer-eod-id 3",
         "--tokenizer-type NullTokenizer --vocab-size 64 --null-tokenizer-eod-id 3", Effect.SAME),
        ("--tokenizer-type HuggingFaceTokenizer --vocab-size 64", "--tokenizer-type HuggingFaceTokenizer", Effect.SAME),
        ("--tokenizer-type TikTokenizer --vocab-size 64", "--tokenizer-type TikTokenizer --vocab-size 64", Effect.SAME),
        ("--use-checkpoint-args --load x --hidden-dropout 0.1", "--use-checkpoint-args --load x", Effect.SAME),
        ("--load x --hidden-dropout 0.1", "--load x --hidden-dropout 0.1", Effect.SAME),
        ("--dataloader-type cyclic", "--dataloader-type cyclic", Effect.DIFFERENT),
        ("--dataloader-type single", "--dataloader-type single", Effect.SAME),
        ("--moe-router-load-balancing-type seq_aux_loss global_aux_loss",
         "--moe-router-load-balancing-type seq_aux_loss global_aux_loss", Effect.DIFFERENT),
        ("--save-retain-interval 10 --ckpt-fully-parallel-load", "--save-retain-interval 10 --ckpt-fully-parallel-load",
         Effect.SAME),
        ("--embedding-init-method-std 0.3", "--embedding-init-method-std 0.3", Effect.DIFFERENT),
        ("--step-batch-size-schedule 0:2,0.256K:4", "--step-batch-size-schedule 0:2,0.256K:4", Effect.SAME),
        ("--moe-layer-freq ([0]*3+[1]*45)", "--moe-layer-freq ([0]*3+[1]*45)", Effect.SAME),
        ("--window-size (128,0) --split 969/30/1", "--window-size (128,0) --split 969/30/1", Effect.SAME),
        ("--moe-layer-freq [i%2]", "", Effect.DIFFERENT),
    ],
)  # fmt: skip
def test_flags_become_ours(given: str, result: str, effect: Effect) -> None:
    assert _translate(*given.split()) == (result.split(), effect)


@pytest.mark.parametrize(
    ("given", "result"),
    [
        ("--lr 1 --lr 2 --lr 1", "--lr 2 --lr 1"),
        ("--bf16 --lr 1 --bf16", "--lr 1 --bf16"),
        ("--untie-embeddings-and-output-weights --lr 1 --lr 1", "--untie-embeddings-and-output-weights --lr 1"),
    ],
)
def test_the_last_occurrence_of_a_flag_decides(given: str, result: str) -> None:
    assert _translate(*given.split())[0] == result.split()


def test_repeated_flags_of_a_script_of_the_users_own_stay() -> None:
    words = ("--tag", "a", "--tag", "b", "--tag", "a")
    assert translate(Launch((), "my/train.py", words)).launch.words == words


def test_the_page_has_the_verdicts_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
    for effect, verdict in VERDICTS.items():
        assert f"| {effect.value} | {verdict} |" in page


def test_every_change_has_a_reason_of_one_line() -> None:
    translation = translate(Launch((), "pretrain_gpt.py", tuple(STASH)))
    assert len(translation.changes) == 12
    for change in translation.changes:
        assert change.why and "\n" not in str(change) and str(change).count("[") == 1


def test_rules_name_flags_that_exist_and_results_that_work() -> None:
    table = flag_table()
    works = {word for flag in table.in_state(FlagState.WORKS) for word in flag.flags}
    known = {word for flag in table.flags for word in flag.flags}
    for rule in load_rules():
        results = [word for word in rule.becomes if word.startswith("--")]
        assert set(results) <= works, rule
        assert set(rule.flags) <= known | _NAMES_OF_OTHER_VERSIONS, rule


# Flags of earlier versions of Megatron-LM, which are missing in the list of known flags.
_NAMES_OF_OTHER_VERSIONS = {"--use-custom-fsdp", "--tp-only-amax-red"}


def test_a_kept_flag_is_never_one_that_our_command_line_refuses() -> None:
    """Translates every known flag separately: flags that are kept work, or are accepted without effect."""
    for flag in flag_table().flags:
        setting = Setting(flag.flags[0], ())
        change = change_of(setting, {setting.flag: setting}, own_script=False)
        assert change is not None or flag.state in (FlagState.WORKS, FlagState.DEFAULT_ONLY), flag.flags


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([*MODEL, *RUN, *DATA, "--bf16"], 0),
        ([*MODEL, *RUN, *DATA, "--transformer-impl", "transformer_engine"], 10),
        ([*MODEL, *RUN, *DATA, *EXPERTS, *STASH], 20),
        ([*MODEL, *RUN, *DATA, "--tensor-model-parallel-size", "3"], 2),
        ([*MODEL, *RUN, *DATA, "--hidden-size", "${WIDTH}"], 2),
    ],
    ids=["same", "speed", "different", "refused", "unknown value"],
)
def test_the_exit_status_says_which_run_it_is(
    words: list[str], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Joined without quoting, because a quoted variable would be literal text.
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {' '.join(words)}\n", encoding="utf-8")
    assert main([str(script)]) == status
    printed = capsys.readouterr()
    assert bool(printed.err) == (status == 2)


def test_a_refused_result_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _write(tmp_path, *MODEL, *RUN, *DATA, "--tensor-model-parallel-size", "3")
    assert main([str(script)]) == 2
    assert "--num-attention-heads is 4" in capsys.readouterr().err


def test_flags_of_a_script_of_the_users_own_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _write(tmp_path, *MODEL, *RUN, "--my-flag", "3", program="my/train.py")
    assert main([str(script)]) == 0
    assert "my/train.py" in (printed := capsys.readouterr().out) and "--my-flag 3" in printed


@pytest.mark.parametrize("program", ["pretrain_mamba.py", "/opt/megatron/pretrain_vlm.py", "train_rl.py"])
def test_programs_that_train_something_else_are_refused(program: str) -> None:
    with pytest.raises(ScriptError, match="trains an unsupported model"):
        translate(Launch((), program, ("--num-layers", "2")))


def test_one_of_several_commands_must_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "sweep.sh"
    words = shlex.join([*MODEL, *RUN, *DATA])
    script.write_text(f"for s in 1 2; do torchrun pretrain_gpt.py {words} --seed $s; done\n", encoding="utf-8")
    assert main([str(script)]) == 2
    assert "choose one with --launch N (1: line 1, 2: line 1)" in capsys.readouterr().err
    assert main([str(script), "--launch", "2"]) == 0
    assert "--seed 2" in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 3])
def test_a_command_that_is_not_there_cannot_be_chosen(number: int, tmp_path: Path) -> None:
    script = _write(tmp_path, "--lr", "1")
    assert main([str(script), "--launch", str(number)]) == 2


@pytest.mark.parametrize("text", ["x", "=3", "a-b=1"])
def test_wrong_values_from_outside_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(_write(tmp_path, "--lr", "1")), "--set", text]) == 2
    assert f"--set is {text!r}" in capsys.readouterr().err


def test_a_missing_script_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.sh")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_config_gets_the_fewest_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = group_words([*MODEL, *RUN, *DATA, *EXPERTS, "--expert-model-parallel-size", "2"])
    lines = [f"  {setting.flag}: {setting.text or 'true'}" for setting in settings]
    config = tmp_path / "model_config.yaml"
    config.write_text("\n".join(["MODEL_ARGS:", *lines, "  --pipeline-model-parallel-size: 2", ""]), encoding="utf-8")
    assert main([str(config)]) == 0
    assert "torchrun --nproc-per-node 4 pretrain_gpt.py" in capsys.readouterr().out


def test_the_paged_stash_recipe_translates_to_a_line_that_trains(tmp_path: Path) -> None:
    words = [*MODEL, *RUN, *DATA, *EXPERTS, *STASH]
    translation = translate(Launch(("torchrun", "--nproc-per-node", "2"), "pretrain_gpt.py", tuple(words)))
    assert translation.effect is Effect.DIFFERENT and problems_of(translation) == []
    run = run_program(translation.launch.words, 2, folder=tmp_path)
    assert run.exit_codes == [0, 0], run.written()
    assert sorted(run.steps) == [1, 2]
    # The stash is logged in the last step.
    stash = next(line["stash"] for line in run.log if line.get("stash"))
    assert stash["pool"]["device_high_water"] > 0 and stash["capacity_factor"] == 1.5


def test_an_unknown_word_behind_a_flag_that_is_left_out_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun pretrain_gpt.py {' '.join([*MODEL, *RUN, *DATA])} --auto-detect-ckpt-format $EXTRA\n")
    assert main([str(script)]) == 2
    assert "EXTRA has no value and may contain flags" in capsys.readouterr().err
    assert main([str(script), "--set", "EXTRA="]) == 0


def test_a_script_that_is_not_followed_exactly_has_the_status_of_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"N=1\nsource env.sh\ntorchrun pretrain_gpt.py {' '.join([*MODEL, *RUN, *DATA])} --seed $N\n")
    assert main([str(script)]) == 20
    assert "could not be evaluated, so compare its values with these: line 2: source is not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "printed"),
    [
        (
            'D=$(date +%F)\nCMD="torchrun pretrain_gpt.py\n FLAGS --tensorboard-dir x_$D"\neval $CMD',
            ["D=$(date +%F)", "x_${D}"],
        ),
        ("P=$(shuf -n 1 -i 1-9)\ntorchrun --master_port $P pretrain_gpt.py FLAGS", ["P=$(shuf -n 1 -i 1-9)", "${P}"]),
        (
            'P=${P:-$RANDOM}\nCMD="torchrun --master_port $P --rdzv_id $P pretrain_gpt.py FLAGS"\n$CMD',
            ['RANDOM_VALUE="${RANDOM}"'],
        ),
        ('P=$((RANDOM % 9))\nCMD="torchrun --master_port $P pretrain_gpt.py FLAGS"\n$CMD', ['P="$((RANDOM % 9))"']),
        ('CMD="TRAIN"\necho $CMD\neval $CMD', ["torchrun pretrain_gpt.py"]),
        ("A=7\nX=$(expr $A + 1)\nTRAIN --tensorboard-dir x_$X", ["X=$(A=7; expr $A + 1)"]),
        ('A=(FLAGS)\nA+=(--bf16)\ntorchrun pretrain_gpt.py "${A[@]}"', ["--bf16"]),
        (
            "run() { TRAIN $@; }\nrun --seed ${SEED:-5}",
            ["--seed 5", "assumed to be unset: SEED"],
        ),
        ("cat <<EOF > run.sh\nTRAIN --seed 5\nEOF\nbash run.sh", ["--seed 5"]),
        (
            "srun -N 2 bash -c 'torchrun --node_rank $SLURM_NODEID pretrain_gpt.py FLAGS'",
            ["srun -N 2 bash -c 'torchrun"],
        ),
        ("TRAIN --tensorboard-dir ~/runs --seed 5", ['"${HOME}/runs"']),
        (
            "export CUDA_DEVICE_MAX_CONNECTIONS=1\nCUDA_DEVICE_MAX_CONNECTIONS=2 TRAIN",
            ["=2\n"],
        ),
    ],
)
def test_commands_in_strings_functions_and_documents_are_translated(
    lines: str, printed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    flags = " ".join([*MODEL, *RUN, *DATA])
    script.write_text(lines.replace("TRAIN", "torchrun pretrain_gpt.py FLAGS").replace("FLAGS", flags) + "\n")
    assert main([str(script)]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in [*printed, "--num-layers 2", "--lr 0.001"]), out


def test_a_rejected_command_is_not_called_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    flags = " ".join([*MODEL, *RUN, *DATA])
    script.write_text(f"N=$(wc -l < list)\ntorchrun pretrain_gpt.py {flags} --seed $N\n")
    assert main([str(script)]) == 2
    found = capsys.readouterr()
    assert found.out.startswith("# [rejected] the command line rejects this command: --seed: '${N}' is not an integer")
    assert "trains the same" not in found.out
