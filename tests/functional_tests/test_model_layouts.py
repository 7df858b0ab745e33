"""The layouts of examples/models fit their models. These tests only plan and train nothing."""

import re
import shlex
from typing import Any

import pytest

import pretrain_gpt
from examples.models.layouts import Layout, layout_for, main, read_layouts, tiny_layout, words
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.model_presets import known_models
from megatron.training.compute.devices import NAME_VARIABLE
from tests.counts import soak_only
from tests.harness import ROOT

SIZES = {
    "tensor-model-parallel-size": "tensor",
    "pipeline-model-parallel-size": "stages",
    "num-virtual-stages-per-pipeline-rank": "chunks",
    "expert-model-parallel-size": "experts",
}
# Models that are planned within seconds; `make soak` plans the larger ones. test_the_page_has_every_layout checks the
# rows of all models, and tests/distributed/test_dry_run.py compares plans with the memory of runs.
PLANNED = ["llama3.2-1b"]
DATA = "--mock-data --tokenizer-type NullTokenizer --save /checkpoints".split()


def arguments_of(model: str, flags: list[str], *, world_size: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return validate_args(parse_args(argv=["--model", model, *flags, *DATA]))


@pytest.mark.slow
@pytest.mark.parametrize("model", [one.name for one in known_models()])
def test_every_named_model_has_layouts_that_fit_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus in read_layouts()[model]:
        for copies in (1, 2):
            args = arguments_of(
                model, words(layout_for(model, copies * gpus)), world_size=copies * gpus, monkeypatch=monkeypatch
            )
            assert args.data_parallel_size % copies == 0
    small = words(tiny_layout(layout_for(model, gpus), 4))
    assert arguments_of(model, small, world_size=4, monkeypatch=monkeypatch).num_layers == 4


def test_layouts_are_of_named_models_alone() -> None:
    assert list(read_layouts()) == [one.name for one in known_models()]


def test_the_largest_layout_that_divides_the_gpus_is_taken() -> None:
    found = {gpus: "grad-reduce-in-bf16" in layout_for("qwen3-30b-a3b", gpus) for gpus in (8, 32, 40, 64)}
    assert found == {8: True, 32: False, 40: True, 64: False}


def test_a_tiny_layout_cuts_in_two_what_the_whole_one_cuts() -> None:
    sizes = ["tensor", "pipeline", "expert"]
    found = {}
    for model, gpus in {"mixtral-8x22b": 64, "qwen3-32b": 16, "qwen3-0.6b": 1, "deepseek-v2-lite": 8}.items():
        for processes in (1, 2, 4):
            small = tiny_layout(layout_for(model, gpus), processes)
            found[model, processes] = [small[f"{size}-model-parallel-size"] for size in sizes]
    assert found == {
        **{(model, 1): [1, 1, 1] for model, _ in found},
        ("mixtral-8x22b", 2): [2, 1, 2],
        ("mixtral-8x22b", 4): [2, 2, 2],
        ("qwen3-32b", 2): [2, 1, 1],
        ("qwen3-32b", 4): [2, 2, 1],
        ("qwen3-0.6b", 2): [1, 1, 1],
        ("qwen3-0.6b", 4): [1, 1, 1],
        ("deepseek-v2-lite", 2): [1, 1, 2],
        ("deepseek-v2-lite", 4): [1, 1, 2],
    }


@pytest.mark.parametrize(
    "argv, says",
    [
        (["qwen3-30-a3b"], "error: MODEL is qwen3-30-a3b: unknown model; did you mean qwen3-30b-a3b?"),
        (["qwen3-30b"], "error: MODEL is qwen3-30b: unknown model; did you mean qwen3-30b-a3b?"),
        (["gpt2", "8"], "error: MODEL is gpt2: unknown model: must be one of llama3-8b, llama3-70b, "),
        (["llama3.2-3b", "0"], "error: GPUS is 0: must be a multiple of 1 or 8 for llama3.2-3b"),
        (["llama3-8b", "12"], "error: GPUS is 12: must be a multiple of 8 for llama3-8b"),
        (["llama3-8b", "3", "--tiny"], "error: GPUS is 3: must be 1, 2 or 4 processes with SCALE=tiny"),
    ],
)
def test_what_has_no_layout_is_told(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(says)


def test_words_and_sizes_are_printed_for_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama3.2-3b"]) == 0 and capsys.readouterr().out == "1\n"
    assert main(["llama3.2-3b", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "--bf16" and printed[-2:] == ["--recompute-num-layers", "1"]
    assert main([]) == 0 and "llama3.2-3b        1 or 8 GPUs\n" in capsys.readouterr().out


def table_rows() -> dict[tuple[str, int], tuple[str, float]]:
    """Returns the layout and the GiB in the table of docs/models.md, by model and number of GPUs."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| (\d+) \| ([^|]*) \| (\d+) \|$", page, re.MULTILINE)
    return {(model, int(gpus)): (layout, float(size)) for model, gpus, layout, size in rows}


def test_the_page_has_every_layout() -> None:
    rows = {key: layout for key, (layout, _) in table_rows().items()}
    assert rows == {(model, gpus): summary(one) for model, by in read_layouts().items() for gpus, one in by.items()}


def summary(layout: Layout) -> str:
    sizes = [f"{name} {layout[flag]}" for flag, name in SIZES.items() if flag in layout]
    return ", ".join(sizes) or ("data" if "recompute-method" not in layout else "data, layers recomputed")


def verdict(argv: list[str], *, gpus: int, capsys: pytest.CaptureFixture[str]) -> float:
    """Asserts that a plan fits, and returns the GiB of its fullest rank."""
    pretrain_gpt.main([*argv, "--dry-run", "--world-size", str(gpus)])
    out = capsys.readouterr().out
    found = re.search(r"^fits H100: ([\d.]+) of 79.6 GiB per rank", out, re.MULTILINE)
    assert found is not None, (argv, out.splitlines()[-1])
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [name if name in PLANNED else soak_only(name) for name in (one.name for one in known_models())]
)
def test_the_page_tells_what_is_planned(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    for (name, gpus), (_, told) in table_rows().items():
        if name == model:
            found = verdict(["--model", model, *words(layout_for(model, gpus)), *DATA], gpus=gpus, capsys=capsys)
            assert found == pytest.approx(told, abs=0.56), gpus


def commands_of_pages() -> list[tuple[list[str], int]]:
    """Returns the pretrain_gpt.py arguments, with made-up data, and the GPUs of each command with --model."""
    found = []
    for page in ("README.md", "docs/models.md"):
        for block in re.findall(
            r"^```\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                program, _, flags = line.partition("pretrain_gpt.py ")
                if "--model " in flags and not program.startswith("examples/"):
                    gpus = re.search(r"--nproc-per-node (\d+)|--world-size (\d+)", line)
                    found.append(
                        (with_made_up_data(shlex.split(flags, comments=True)), int(gpus[1] or gpus[2]) if gpus else 1)
                    )
    return found


def with_made_up_data(argv: list[str]) -> list[str]:
    """Replaces a command's data by made-up data, and removes its folders, which are not in every checkout."""
    named = "--tokenizer-type --tokenizer-model --data-path --load --save --world-size --vocab-size".split()
    kept = [word for word, before in zip(argv, ["", *argv], strict=False) if before not in named and word not in named]
    # The tokenizer is not needed either, since the model defines the vocabulary size.
    return [*(word for word in kept if word not in ("--dry-run", "--mock-data")), *DATA]


COMMANDS = commands_of_pages()


def test_commands_have_the_flags_of_their_layouts() -> None:
    """Compares parallelism, precision and recomputation. Commands choose their own batch sizes, rates and logging."""
    sizes = re.compile("parallel|distributed|precision|exp-avg|grad-reduce|param-gather|recompute|moe-(?!aux)|bf16")
    compared = 0
    for argv, gpus in COMMANDS:
        model = argv[argv.index("--model") + 1]
        if (model, gpus) not in table_rows() or "--model-scale" in argv:
            continue
        flags = " ".join(argv)
        for flag, value in layout_for(model, gpus).items():
            text = " ".join(words({flag: value}))
            assert text in flags or not sizes.search(flag), f"{model} on {gpus} GPUs lacks {text}"
        compared += 1
    assert len(COMMANDS) == 3 and compared == 1


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "gpus"), [one if "--model-scale" in one[0] else soak_only(*one) for one in COMMANDS])
def test_commands_fit_the_gpus_that_they_name(
    argv: list[str], gpus: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    found = verdict(argv, gpus=gpus, capsys=capsys)
    model = argv[argv.index("--model") + 1]
    if "--model-scale" not in argv and (model, gpus) in table_rows():
        assert found == pytest.approx(table_rows()[model, gpus][1], abs=0.56)
