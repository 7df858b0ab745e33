"""Checkpoints with one file per rank (--ckpt-format torch) continue like the checkpoint they were converted from."""

import shutil
from pathlib import Path

import pytest
import torch

from megatron.tools.checkpoint import main as convert
from tests.functional_tests.launch import Run, run_program
from tests.megatron_core.settings import FLAGS, STEPS, case_flags

ITERATION = f"iter_{STEPS:07d}"


def _run(case: str, folder: Path, *flags: str, ranks: int = 1, steps: int = STEPS + 2) -> Run:
    argv = [*FLAGS, *case_flags(case), "--train-iters", str(steps), "--eval-iters", "0", *flags]
    return run_program(argv, ranks, folder=folder)


def _losses(run: Run) -> dict[int, float]:
    assert set(run.exit_codes) == {0}, run.written()
    return {iteration: fields["lm_loss"] for iteration, fields in run.steps.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves checkpoints of short runs in the project's format, in one folder per case."""
    root = tmp_path_factory.mktemp("trained")
    for case in ("dense", "experts"):
        _losses(_run(case, root / "log", "--save", str(root / case), steps=STEPS))
    return root


def _legacy(trained: Path, case: str, folder: Path, *sizes: str) -> Path:
    words = ["convert", "--from", "torch_dist", "--to", "torch", "--load", str(trained / case), "--save", str(folder)]
    assert convert([*words, *sizes]) == 0
    return folder


# sizes: parallel sizes of the converted files. flags: flags of the run that loads the files.
@pytest.mark.parametrize(
    ("case", "sizes", "flags", "ranks"),
    [
        ("dense", {"tensor": 2}, ["--pipeline-model-parallel-size", "2"], 2),
        ("dense", {"pipeline": 2}, ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"], 2),
        ("experts", {"tensor": 2, "pipeline": 2, "expert": 2}, [], 1),
        ("experts", {}, ["--expert-model-parallel-size", "2", "--use-distributed-optimizer"], 2),
    ],
    ids=["tp2 as pp2", "pp2 as tp2", "tp2 pp2 ep2 as one rank", "one rank as ep2"],
)
def test_weights_and_position_are_those_of_the_checkpoint_the_files_were_made_from(
    case: str, sizes: dict[str, int], flags: list[str], ranks: int, trained: Path, tmp_path: Path
) -> None:
    words = [word for kind, size in sizes.items() for word in (f"--target-{kind}-parallel-size", str(size))]
    legacy = _legacy(trained, case, tmp_path / "legacy", *words)
    flags = [*flags, "--no-load-optim", "--no-load-rng"]
    expected = _losses(_run(case, tmp_path / "ours", "--load", str(trained / case), *flags, ranks=ranks))
    run = _run(case, tmp_path / "theirs", "--load", str(legacy), *flags, "--ckpt-format", "torch", ranks=ranks)
    assert sorted(expected) == [STEPS + 1, STEPS + 2]
    assert _losses(run) == expected


def test_a_run_saves_in_our_format_and_resumes_with_its_optimizer(trained: Path, tmp_path: Path) -> None:
    legacy, save = _legacy(trained, "dense", tmp_path / "legacy"), tmp_path / "ours"
    flags = ["--load", str(legacy), "--no-load-optim"]
    whole = _losses(_run("dense", tmp_path / "whole", *flags, steps=STEPS + 2))
    first = _losses(_run("dense", tmp_path / "first", *flags, "--save", str(save), steps=STEPS + 1))
    second = _losses(_run("dense", tmp_path / "second", "--load", str(save), steps=STEPS + 2))
    assert {**first, **second} == whole and sorted(second) == [STEPS + 2]


def test_finetune_starts_at_step_0_with_the_weights(trained: Path, tmp_path: Path) -> None:
    legacy = _legacy(trained, "dense", tmp_path / "legacy", "--target-tensor-parallel-size", "2")
    flags = ["--finetune", "--use-checkpoint-args"]
    expected = _losses(_run("dense", tmp_path / "ours", "--load", str(trained / "dense"), *flags, steps=1))
    assert _losses(_run("dense", tmp_path / "theirs", "--load", str(legacy), *flags, steps=1)) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "from which optimizer state is not read: add --no-load-optim, or --finetune"),
        (["--no-load-optim", "--hidden-size", "32"], "--hidden-size is 32 here, 16 in the checkpoint"),
        (
            ["--no-load-optim", "--vocab-size", "65"],
            "the size of the tokenizer's vocabulary is 65 here, 64 in the checkpoint",
        ),
    ],
    ids=["optimizer", "another model", "more tokens"],
)
def test_what_does_not_fit_is_refused_on_every_rank(
    flags: list[str], message: str, trained: Path, tmp_path: Path
) -> None:
    legacy = _legacy(trained, "dense", tmp_path / "legacy", "--target-tensor-parallel-size", "2")
    run = _run("dense", tmp_path, "--load", str(legacy), *flags, "--pipeline-model-parallel-size", "2", ranks=2)
    assert all(code != 0 for code in run.exit_codes)
    assert message in run.written()


@pytest.mark.parametrize("damage", ["missing", "shape", "bytes"])
def test_a_damaged_file_is_named_before_a_tensor_is_touched(damage: str, trained: Path, tmp_path: Path) -> None:
    legacy = _legacy(trained, "dense", tmp_path / "legacy", "--target-tensor-parallel-size", "2")
    path = legacy / ITERATION / "mp_rank_01" / "model_optim_rng.pt"
    if damage == "missing":
        shutil.rmtree(path.parent)
        name = "mp_rank_01/model_optim_rng.pt"
        message = f"{path.parents[1]} has no {name}, although its arguments describe tensor 2 x pipeline 1 x expert 1"
    elif damage == "shape":
        content = torch.load(path, weights_only=False)
        content["model"]["decoder.final_layernorm.weight"] = torch.ones(3)
        torch.save(content, path)
        message = f"{path} has decoder.final_layernorm.weight with shape [3]: must be [16] according to its arguments"
    else:
        data = bytearray(path.read_bytes())
        weight = torch.load(path, weights_only=False)["model"]["output_layer.weight"]
        place = bytes(data).index(weight.numpy().tobytes()[:64])
        data[place] ^= 1
        path.write_bytes(bytes(data))
        message = f"{path} is corrupt"
    flags = ["--load", str(legacy), "--no-load-optim", "--pipeline-model-parallel-size", "2"]
    run = _run("dense", tmp_path / "log", *flags, ranks=2)
    assert all(code != 0 for code in run.exit_codes)
    assert message in run.written()
