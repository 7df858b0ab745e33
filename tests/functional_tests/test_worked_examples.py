"""The commands of docs/example_*.md and of the path through docs/ run at a small size and print the shown output."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import pretrain_gpt
from megatron.tools import plan_layout, plan_stash
from tests.counts import soak_only
from tests.functional_tests.launch import ROOT, run_program
from tests.functional_tests.warm_scripts import run_script
from tests.megatron_core.settings import STEPS

DOCS = ROOT / "docs"
BASH = ["bash", "-euo", "pipefail", "-c"]
FIXTURES = ROOT / "tests" / "megatron_core" / "fixtures"
# Override the flags of a page, so that its model for GPUs becomes a tiny one on two processes.
TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --moe-ffn-hidden-size 32
    --num-experts 8 --moe-router-topk 2 --seq-length 32 --max-position-embeddings 32 --vocab-size 256
    --global-batch-size 8 --train-iters 2 --eval-iters 0 --log-interval 1
"""


def page(name: str) -> str:
    return (DOCS / f"example_{name}.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """Returns the code blocks of a page in a language. "" selects blocks without a language, which show output."""
    every = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    return [block for found, block in every if found == language]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Creates a folder with links to the clone's files, so that commands write only into the test's folder."""
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "runs", "data", "build", "dist", "site"):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def shell(clone: Path, *scripts: str) -> str:
    """Runs shell scripts, with warm programs, and returns their output."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HOME": str(clone / "hub")}
    done = run_script([*BASH, "\n".join(scripts)], env=environment, cwd=clone)
    assert done.exit_code == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def without_numbers(text: str) -> list[str]:
    """Returns the lines with # in place of each number or time, and with repeated spaces collapsed."""
    return [" ".join(re.sub(r"\d[\d.,:E+-]*", "#", line).split()) for line in text.splitlines() if line.strip()]


def shown(name: str, start: str) -> list[str]:
    """Returns the lines of the page's output block that contains `start`."""
    (block,) = [block for block in blocks(name, "") if start in block]
    return block.splitlines()


@pytest.mark.slow
def test_own_data_becomes_a_trained_model(clone: Path) -> None:
    scripts = blocks("own_data", "bash")
    assert len(scripts) == 3
    small = scripts[2].replace(
        "--train-iters 200 --log-interval 50", "--train-iters 4 --log-interval 2 --lr-warmup-iters 1"
    )
    assert small != scripts[2]
    printed = without_numbers(shell(clone, *scripts[:2], small))
    for line in without_numbers("\n".join(shown("own_data", "documents, "))):
        assert line in printed
    assert any("iteration #/ #" in line and "lm loss: #" in line for line in printed)


@pytest.mark.slow
def test_a_megatron_checkpoint_computes_the_same_in_transformers(clone: Path, monkeypatch, capsys) -> None:
    (script,) = blocks("megatron_to_hugging_face", "bash")
    printed = without_numbers(shell(clone, script))
    assert [
        line for line in without_numbers("\n".join(shown("megatron_to_hugging_face", "wrote"))) if line not in printed
    ] == []
    monkeypatch.chdir(clone)
    (code,) = blocks("megatron_to_hugging_face", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert capsys.readouterr().out.splitlines()[-1:] == shown("megatron_to_hugging_face", "MixtralForCausalLM torch")
    # Compared with the loss that Megatron-Core logged on the same batch, in the step after the checkpoint.
    tokens = torch.from_numpy(numpy.load(FIXTURES / "batches.npz")["tokens"][STEPS].astype(numpy.int64))
    with torch.no_grad():
        logits = names["model"](tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    logged = json.loads((FIXTURES / "experts" / "losses.json").read_text())["further"][str(STEPS + 1)]
    assert loss == pytest.approx(logged, abs=1e-5) and f"{logged:.5f}" in page("megatron_to_hugging_face")


@pytest.mark.slow
def test_attempts_without_a_cluster_print_what_the_page_shows(clone: Path) -> None:
    (script,) = blocks("slurm", "bash")
    # Its programs supervise processes of their own, so they cannot be warm.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 300}
    done = subprocess.run([*BASH, script], cwd=clone, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, **how)
    assert done.returncode == 0, done.stdout
    printed = done.stdout.splitlines()
    expected = [line for line in shown("slurm", "exit code 75") if line != "..."]
    found = iter(printed)
    assert [line for line in expected if line not in found] == [], printed


@pytest.mark.slow
def test_commands_of_the_path_run_one_after_another(clone: Path) -> None:
    """Trains on a text, saves, resumes in a different layout, converts the checkpoint and generates text."""
    scripts = ["mkdir -p runs/moe"]
    for name in ("train_a_moe", "save_and_convert"):
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        found = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        # examples/resume.sh and named models are tested separately.
        omitted = (".venv/bin/activate", "examples/", "--model ")
        scripts += [block for block in found if not any(word in block for word in omitted)]
    assert len(scripts) == 10
    script = "\n".join(scripts)
    for pattern, small in {
        "--max-bytes 2000000": "--max-bytes 300000",
        "--lr-warmup-iters 20 ": "--lr-warmup-iters 1 ",
        "--train-iters 200 --log-interval 50": "--train-iters 4 --log-interval 2",
        "--eval-interval 100 --eval-iters 4": "--eval-interval 4 --eval-iters 1",
        "--train-iters 220": "--train-iters 6",
    }.items():
        assert pattern in script
        script = script.replace(pattern, small)
    printed = shell(clone, script)
    assert "iteration        6/       6" in printed
    assert (clone / "runs" / "from_hub").is_dir()


# Commands that need GPUs are only planned. LAYOUTS: flags, GiB and step time of each row of the page's table.
LAYOUTS = re.findall(r"^\| [^|]+ \| `(.*)` \| ([\d.]+) of 79.6 GiB \| ([\d.]+ s) \|$", page("64_experts"), re.MULTILINE)
STASH = "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 1.09".split()
# Flags to remove from the command of the Qwen3 page, by the row of its table.
CHANGES = {
    "none": [],
    "fp32 moments": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split(),
    "fp32 gradients": ["--grad-reduce-in-bf16"],
    "whole buffers": STASH,
    "dropless": ["--moe-expert-rank-capacity-factor", "1.35", *STASH],
}


def dry_run(flags: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the lines of a memory plan. flags: arguments of pretrain_gpt.py."""
    pretrain_gpt.main(flags.split())
    return capsys.readouterr().out.splitlines()


def commands(name: str, program: str) -> list[str]:
    """Returns the arguments of each command of a page that runs `program`."""
    lines = "\n".join(blocks(name, "bash")).replace("\\\n", " ").splitlines()
    found = (" ".join(line.split()).partition(f"{program} ") for line in lines)
    return [flags for _, program, flags in found if program]


def test_the_tables_of_layouts_are_found() -> None:
    assert [size for _, size, _ in LAYOUTS] == ["60.6", "39.2", "37.6", "42.6"]
    assert all(f"| {change}" in page("qwen3_30b") for change in CHANGES)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, *map(soak_only, (0, 2, 3))])
def test_64_experts_are_planned_as_the_page_tells(number: int, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    layout, size, seconds = LAYOUTS[number]
    (flags,) = (flags for flags in commands("64_experts", "pretrain_gpt.py") if "--dry-run" in flags)
    lines = dry_run(flags.replace("$LAYOUT", layout), capsys)
    assert lines[-1] == f"fits H100: {size} of 79.6 GiB per rank"
    assert any(line.startswith(f"estimated step on H100: {seconds}, ") for line in lines)
    if number == 1:
        assert [line for line in shown("64_experts", "stage  rank") if line not in [*lines, "..."]] == []


@pytest.mark.slow
def test_a_layout_of_64_experts_is_in_the_table_of_the_search(capsys, monkeypatch) -> None:
    """Searches with the sizes of one table line fixed, since the whole search takes half a minute."""
    monkeypatch.chdir(ROOT)
    (flags,) = commands("64_experts", "tools/plan_layout.py")
    fixed = "--pipeline-model-parallel-size 1 --expert-model-parallel-size 8 --micro-batch-size 1 --top 1"
    plan_layout.main([*flags.split(), *fixed.split()])
    found = [line.split(". ", 1)[1] for line in capsys.readouterr().out.splitlines() if re.match(r" *\d+\.  +\d", line)]
    # Columns 1 to 7 of a line are tp, pp, vpp, cp, ep, etp and the micro-batch size.
    sizes = "1 1 1 1 8 1 1".split()
    (line,) = (line for line in shown("64_experts", "step/s") if line.split()[1:8] == sizes)
    assert line.split(". ", 1)[1] in found


@pytest.mark.slow
@pytest.mark.parametrize("change", ["none", *map(soak_only, list(CHANGES)[1:])])
def test_qwen3_is_planned_as_the_page_tells(change: str, capsys) -> None:
    _, flags, _ = commands("qwen3_30b", "pretrain_gpt.py")
    lines = dry_run(flags.replace(" ".join(CHANGES[change]), "") if CHANGES[change] else flags, capsys)
    size, seconds = re.findall(rf"^\| {change}[^|]*\| ([^|]+) \| ([^|]+) \|$", page("qwen3_30b"), re.MULTILINE)[0]
    assert any(re.match(rf"(does NOT fit|fits) H100: {size} of 79.6 GiB per rank", line) for line in lines)
    assert any(line.startswith(f"estimated step on H100: {seconds}, ") for line in lines)
    if change == "none":
        assert [line for line in shown("qwen3_30b", "stage  rank") if line not in [*lines, "..."]] == []


@pytest.mark.soak
def test_qwen3_without_flags_does_not_fit_by_as_much_as_the_page_tells(capsys) -> None:
    flags, _, _ = commands("qwen3_30b", "pretrain_gpt.py")
    expected = shown("qwen3_30b", "does NOT fit")
    assert len(expected) == 2 and dry_run(flags, capsys)[-2:] == expected


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, soak_only(None)])
@pytest.mark.parametrize("name", ["64_experts", "qwen3_30b"])
def test_the_stash_is_planned_as_the_page_tells(name: str, steps: int | None, capsys, monkeypatch) -> None:
    """Checks with a few steps that the flags are accepted, and with all steps that the factors match the page."""
    monkeypatch.chdir(ROOT)
    (flags,) = commands(name, "tools/plan_stash.py")
    assert plan_stash.main([*flags.split(), *([] if steps is None else ["--plan-steps", str(steps)])]) == 0
    printed = capsys.readouterr().out.splitlines()
    expected = [line for line in shown(name, "p99.9  median") if line != "..."]
    assert expected[0] in printed
    if steps is None:
        assert [line for line in expected if line not in printed] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["64_experts", "qwen3_30b"])
def test_a_launch_trains_in_a_small_size(name: str, tmp_path: Path) -> None:
    """Trains on two processes with made-up data, and without loading the page's checkpoint."""
    words = commands(name, "pretrain_gpt.py")[-1].replace("examples/", f"{ROOT}/examples/").split()
    given = {"--load": None, "--save": str(tmp_path / "saved"), "--data-path": None, "--split": None}
    given |= {"--tokenizer-type": None, "--tokenizer-model": None, "--lr-warmup-iters": None}
    argv = []
    for word, before in zip(words, ["", *words], strict=False):
        if before in given:
            argv += [] if given[before] is None else [given[before]]
        elif word not in given or given[word] is not None:
            argv.append(word)
    tiny = [*TINY.split(), "--expert-model-parallel-size", "2", "--mock-data", "--tokenizer-type", "NullTokenizer"]
    tiny += ["--model-scale", "tiny"] if name == "qwen3_30b" else []
    run = run_program([*argv, *tiny], 2, folder=tmp_path)
    assert run.exit_codes == [0, 0] and list(run.steps) == [1, 2], run.written()
