"""The scripts of examples/models, which train on many GPUs, pretrain and continue a tiny model of each family."""

import os
import re
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from _pytest.mark import ParameterSet
from tokenizers import ByteLevelBPETokenizer
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.training.arguments import parse_args, validate_args
from tests.counts import long_count, soak_only
from tests.functional_tests.cluster import container_variables
from tests.functional_tests.launch import ROOT, read_log
from tests.functional_tests.warm_scripts import Finished, run_script
from tests.unit_tests.core.tokenizers.vocabularies import TEXT
from tests.unit_tests.tools.hugging_face.small_hub import VOCABULARY, saved, small_model

EXAMPLES = ROOT / "examples" / "models"
TWO_STEPS = ["--train-iters", "2", "--eval-iters", "0"]
MODELS = ["llama3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "qwen2-7b", "qwen3-8b", "mixtral-8x7b"]
MODELS += ["glm-4.5", "llama3.2-1b", "qwen2-57b-a14b", "deepseek-v2-lite", "deepseek-v2"]


def families(*usual: str) -> list[ParameterSet]:
    """Returns all models as parameters. Models other than `usual` run only under `make soak`."""
    return [pytest.param(name) if name in usual else soak_only(name) for name in MODELS]


def run_example(script: str, *flags: str, folder: Path, env: Mapping[str, str] | None = None, **how: Any) -> Finished:
    return run_script([str(EXAMPLES / script), *flags], env={"SCALE": "tiny", "OUT": str(folder), **(env or {})}, **how)


def losses_in(folder: Path) -> list[int]:
    return [line["iteration"] for line in read_log(folder) if "lm_loss" in line]


def is_planned(stdout: str, *, gpus: int) -> bool:
    """Returns whether the memory plan precedes all output of training."""
    plan, _, training = stdout.partition("== Training; ")
    return f"== Memory plan for {gpus} ranks" in plan and "parameters" in plan and "iteration" in training


# gpt-oss-20b covers attention windows with sinks. test_the_script_runs_as_users_run_it trains a model with experts,
# test_model_layouts.py checks the flags of each model, and continue.sh, below, calls the same script.
@pytest.mark.slow
@pytest.mark.parametrize("model", families("gpt-oss-20b"))
def test_a_family_is_pretrained(model: str, tmp_path: Path) -> None:
    finished = run_example("pretrain.sh", model, *TWO_STEPS, folder=tmp_path)
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    assert is_planned(finished.stdout, gpus=2), finished.stdout
    assert losses_in(tmp_path / "checkpoints") == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral-8x22b", "llama3-70b", "deepseek-v2-lite"][: long_count(1, soak=3)])
def test_four_processes_have_stages_and_parts_of_each_layer(model: str, tmp_path: Path) -> None:
    finished = run_example("pretrain.sh", model, *TWO_STEPS, folder=tmp_path, env={"GPUS": "4"})
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    assert losses_in(tmp_path / "checkpoints") == [1, 2]


@pytest.mark.slow
def test_the_script_runs_as_users_run_it(tmp_path: Path) -> None:
    """Resumes the run in a second start, with real processes under torchrun."""
    first = run_example("pretrain.sh", "qwen3-30b-a3b", "--exit-interval", "2", folder=tmp_path)
    assert first.exit_code == 0, first.stdout + first.stderr
    environment = {**os.environ, "SCALE": "tiny", "OUT": str(tmp_path)}
    command = [str(EXAMPLES / "pretrain.sh"), "qwen3-30b-a3b"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert is_planned(first.stdout, gpus=2) and is_planned(finished.stdout, gpus=2), finished.stdout
    assert losses_in(tmp_path / "checkpoints") == [1, 2, 3, 4]


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Creates a folder for a transformers model, with a tokenizer that has fewer ids than the model."""
    folder = tmp_path / "hub"
    folder.mkdir()
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(
        TEXT * 3, vocab_size=VOCABULARY - 7, special_tokens=["<|endoftext|>"], show_progress=False
    )
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    return folder


# A dense model, and a model with latent attention, experts and multi-token prediction.
# tests/unit_tests/tools/hugging_face converts each family in both directions.
@pytest.mark.slow
@pytest.mark.parametrize("model", families("llama3.1-8b", "deepseek-v3"))
def test_a_family_of_transformers_is_continued_and_given_back(model: str, hub: Path, tmp_path: Path) -> None:
    saved(small_model(model, dtype=torch.bfloat16), hub)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT * 40))
    finished = run_example("continue.sh", model, str(hub), str(text), *TWO_STEPS, folder=tmp_path / "out")
    assert finished.exit_code == 0, finished.stdout + finished.stderr
    assert is_planned(finished.stdout, gpus=2), finished.stdout
    assert losses_in(tmp_path / "out" / "checkpoints") == [1, 2]
    back = tmp_path / "out" / "hugging_face-2"
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (hub, back))
    assert before.state_dict().keys() == after.state_dict().keys()
    # Training changed the weights, but only slightly.
    moved = [(one - other).abs().max() for one, other in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 0.1
    tokens = AutoTokenizer.from_pretrained(back)("hello world", return_tensors="pt").input_ids
    assert after.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0).shape[1] == tokens.shape[1] + 8


@pytest.mark.parametrize(
    "script, flags, env, says",
    [
        ("pretrain.sh", [], {}, "usage: examples/models/pretrain.sh MODEL .*\nllama3-8b +8 GPUs\n"),
        ("pretrain.sh", ["qwen3-30-a3b"], {}, "MODEL is qwen3-30-a3b: unknown model; did you mean qwen3-30b-a3b?"),
        ("pretrain.sh", ["gpt2"], {}, "MODEL is gpt2: unknown model: must be one of llama3-8b, "),
        ("pretrain.sh", ["llama3-8b"], {"SCALE": "small"}, "SCALE is small: must be full or tiny"),
        ("pretrain.sh", ["llama3-8b"], {"GPUS": "3"}, "GPUS is 3: must be 1, 2 or 4 processes with SCALE=tiny"),
        ("pretrain.sh", ["llama3-8b"], {"SCALE": "full", "GPUS": "12"}, "GPUS is 12: must be a multiple of 8 for"),
        (
            "pretrain.sh",
            ["llama3-8b"],
            {"SCALE": "full", "GPUS": "16"},
            "on 16 GPUs requires several machines: start it with",
        ),
        ("continue.sh", ["llama3-8b"], {}, "usage: examples/models/continue.sh MODEL HF_FOLDER "),
        ("continue.sh", ["llama-8b", "/nowhere"], {}, "MODEL is llama-8b: unknown model; did you mean llama3-8b?"),
        ("continue.sh", ["llama3-8b", "/nowhere"], {}, "HF_FOLDER is /nowhere: contains no config.json"),
        ("slurm.sh", ["llama3-8b"], {}, "the first word is 'llama3-8b': must be pretrain or continue, followed by"),
    ],
)
def test_wrong_usage_is_told(script: str, flags: list[str], env: dict[str, str], says: str, tmp_path: Path) -> None:
    finished = run_example(script, *flags, folder=tmp_path, env=env)
    assert finished.exit_code == 2 and re.search(says.replace("?", r"\?"), finished.stderr), finished.stderr
    assert finished.launches == [] and finished.stdout == ""


# One layer per stage, since each layer makes the plan slower.
FEW_LAYERS = ["--num-layers", "4"]


def trained_over(nodes: list[Finished], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that each node launched its part of one run, and that only the first node printed the plan before."""
    gpus = 8 * len(nodes)
    assert [is_planned(node.stdout + " iteration", gpus=gpus) for node in nodes] == [True] + [False] * (len(nodes) - 1)
    (first, *others) = [launch for node in nodes for launch in node.launches]
    assert len(others) == len(nodes) - 1 and all(other.argv == first.argv for other in others)
    for launch in (first, *others):
        options = get_args_parser().parse_args([*launch.torchrun, "script"])
        assert (options.nnodes, options.nproc_per_node) == (str(len(nodes)), "8")
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    args = validate_args(parse_args(argv=first.argv))
    assert (args.model, args.world_size, args.save) == (model, gpus, args.load)


def is_not_trained(finished: Finished) -> bool:
    """Returns whether attempt.py found no checkpoint, as expected after a launch that was only recorded."""
    return finished.exit_code == 1 and "has no checkpoint, as at the start" in finished.stderr


@pytest.mark.slow
def test_slurm_starts_every_node_of_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates sbatch, which runs the script on the first node, and srun, which runs its command on every node."""
    nodes = 4
    for name, body in {
        "scontrol": 'echo "$*" >> "$CALLS"; echo node0; echo node1',
        "srun": f'shift 2; for ((n = 0; n < {nodes}; n++)); do SLURM_NODEID=$n "$@" > "$CALLS.$n"; done',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = {"SLURM_JOB_NODELIST": "node[0-3]", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "7"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "SCALE": "full"}
    finished = run_example(
        "slurm.sh", "pretrain", "mixtral-8x7b", *FEW_LAYERS, folder=tmp_path, env=environment, launching=False
    )
    assert is_not_trained(finished), finished.stderr
    assert (tmp_path / "calls").read_text() == "show hostnames node[0-3]\n"
    assert all("--rdzv-endpoint node0:29500" in " ".join(launch.torchrun) for launch in finished.launches)
    parts = [
        Finished(stdout=(tmp_path / f"calls.{index}").read_text(), launches=[launch])
        for index, launch in enumerate(finished.launches)
    ]
    assert len(parts) == nodes
    trained_over(parts, "mixtral-8x7b", monkeypatch)


@pytest.mark.slow
def test_kubernetes_starts_every_node_of_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and job["spec"]["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    parts = []
    for index in range(job["spec"]["completions"]):
        environment = {"SCALE": "full", **container_variables(container, index=index)}
        parts.append(run_script([*container["command"], *FEW_LAYERS], env=environment, launching=False))
        assert is_not_trained(parts[-1]), parts[-1].stderr
        assert f"--node-rank {index} --master-addr mixtral-0.mixtral" in " ".join(parts[-1].launches[0].torchrun)
    trained_over(parts, "mixtral-8x7b", monkeypatch)
