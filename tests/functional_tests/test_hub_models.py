"""A transformers model is converted, trained further and converted back; both forms continue a prompt identically."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.tools.checkpoint import main as checkpoint_tool
from megatron.tools.generate import main as generate
from megatron.tools.hugging_face.companions import read_config
from megatron.tools.hugging_face.settings import config_of_settings
from megatron.training.arguments import parse_args
from tests.functional_tests.case import Flags, command_line
from tests.functional_tests.launch import run_program
from tests.unit_tests.core.tokenizers.vocabularies import TEXT
from tests.unit_tests.tools.hugging_face.conversions import contents
from tests.unit_tests.tools.hugging_face.small_hub import model_on, saved

MODEL: Flags = {"model": "qwen3-30b-a3b", "model-scale": "tiny"}
PROMPT, NEW_TOKENS = "hello world", 12
FLAGS: Flags = {
    "mock-data": True,
    "tokenizer-type": "HuggingFaceTokenizer",
    "seq-length": 32,
    "micro-batch-size": 2,
    "train-iters": 3,
    "lr-decay-style": "constant",
    "lr-decay-iters": 10,
    "lr": 1e-3,
    "eval-iters": 0,
    "num-workers": 0,
    "expert-model-parallel-size": 2,
    "moe-token-dispatcher-type": "alltoall",
}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Creates a tiny Qwen3-MoE with random weights and a tokenizer that has fewer ids than the model."""
    settings = vars(parse_args(argv=command_line(MODEL)))
    torch.manual_seed(3)
    folder = saved(
        model_on("cpu", {**config_of_settings(settings, dtype="float32"), "initializer_range": 0.2}), tmp_path / "hub"
    )
    library = ByteLevelBPETokenizer()
    library.train_from_iterator(TEXT * 3, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    return folder


# The model is defined by the checkpoint's arguments, or by --model.
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    # The second case is soak only, since the adapter test below also passes --model.
    [
        pytest.param({"use-checkpoint-args": True, "hidden-dropout": 0.0}, id="stored"),
        pytest.param(MODEL, id="named", marks=pytest.mark.soak),
    ],
)
def test_a_model_is_trained_further_and_given_back(
    hub: Path, tmp_path: Path, model: Flags, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trained, back = (tmp_path / name for name in ("run", "trained", "back"))
    assert checkpoint_tool(_convert("hf", "megatron", source=hub, target=run)) == 0
    flags: Flags = {**FLAGS, **model, "tokenizer-model": str(run / "hugging_face"), "load": str(run)}
    done = run_program(command_line({**flags, "save": str(trained)}), 2, folder=tmp_path / "log")
    assert done.exit_codes == [0, 0] and list(done.steps) == [1, 2, 3], done.written()
    # From its own checkpoint, the run resumes with its optimizer state and data position.
    flags |= {"load": str(trained), "train-iters": 4}
    more = run_program(command_line({**flags, "save": str(trained)}), 2, folder=tmp_path / "more")
    assert list(more.steps) == [4], more.written()
    assert checkpoint_tool([*_convert("megatron", "hf", source=trained, target=back), "--verify"]) == 0
    assert "random tokens agree" in capsys.readouterr().out
    before, after = contents(hub), contents(back)
    assert before.keys() == after.keys() and all(before[name] != after[name] for name in before)
    assert read_config(back) == read_config(hub)
    assert _text_here(trained, capsys) == _text_there(back)
    assert _text_here(run, capsys) == _text_there(hub) != _text_there(back)


@pytest.mark.slow
def test_adapters_are_trained_beside_a_model_and_merged_when_it_is_given_back(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trained, back = (tmp_path / name for name in ("run", "trained", "back"))
    assert checkpoint_tool(_convert("hf", "megatron", source=hub, target=run)) == 0
    flags: Flags = {**FLAGS, **MODEL, "tokenizer-model": str(run / "hugging_face"), "load": str(run), "finetune": True}
    adapted: Flags = {"lora-rank": 4, "lora-alpha": 64, "lr": 0.05, "save": str(trained)}
    done = run_program(command_line({**flags, **adapted}), 2, folder=tmp_path / "log")
    assert done.exit_codes == [0, 0] and list(done.steps) == [1, 2, 3], done.written()
    assert checkpoint_tool([*_convert("megatron", "hf", source=trained, target=back), "--verify"]) == 0
    assert "random tokens agree" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob(".merged-*")] == []
    before, after = contents(hub), contents(back)
    changed = {name for name in before if before[name] != after[name]}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert _text_there(back) != _text_there(hub)


def _convert(kind: str, other: str, *, source: Path, target: Path) -> list[str]:
    return ["convert", "--from", kind, "--to", other, "--load", str(source), "--save", str(target)]


def test_a_model_without_a_tokenizer_is_given_one(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(hub, source, ignore=shutil.ignore_patterns("*token*", "vocab*", "merges*"))
    assert checkpoint_tool(_convert("hf", "megatron", source=source, target=run)) == 0
    with pytest.raises(SystemExit):
        _text_here(run, capsys, tokenizer=hub)
    assert "contains no tokenizer: give --tokenizer-type and its files" in capsys.readouterr().err
    given = ["--tokenizer-type", "HuggingFaceTokenizer"]
    assert _text_here(run, capsys, *given, tokenizer=hub) == _text_there(hub)


def _text_here(run: Path, capsys: pytest.CaptureFixture[str], *flags: str, tokenizer: Path | None = None) -> str:
    capsys.readouterr()
    generate(
        ["--load", str(run), "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--temperature", "0"]
        + ["--tokenizer-model", str(tokenizer or run / "hugging_face"), *flags]
    )
    return capsys.readouterr().out.removesuffix("\n")


def _text_there(folder: Path) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
    found = model.generate(tokens, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(found[0]))
