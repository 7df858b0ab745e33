"""The comparison of answers: what counts as a difference, and a changed tree is found from end to end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.tools import same_answers
from megatron.tools.gate import questions as asking
from megatron.tools.gate.questions import KINDS, Question, questions_of
from megatron.tools.same_answers import ask, differences, key_of, report

ROOT = Path(__file__).resolve().parents[3]
# A small part of each kind.
SMALL: dict[str, Question] = {
    "value": {"ask": "parse", "argv": ["--num-layers", "3"], "yaml": None},
    "file": {"ask": "parse", "argv": [], "yaml": "lr: 0.5\n"},
    "error": {"ask": "parse", "argv": ["--num-layers", "three"], "yaml": None},
    "refused": {"ask": "parse", "argv": ["--rl-profile"], "yaml": None},
    "all": {"ask": "read"},
    "line": {"ask": "validate", "argv": [*asking._SMALL.split(), "--swiglu"], "ranks": 2},
    "write": {"ask": "write", "argv": asking._SMALL.split(), "name": "num_layers", "value": 4, "when": "after"},
    "provider": {"ask": "provide", "argv": ["--my-rate", "2"], "provider": "adds"},
    "translation": {"ask": "translate", "text": "torchrun pretrain_gpt.py --model-parallel-size 2\n", "words": []},
    "program": {"ask": "program", "argv": ["--list-models"]},
    "script": {
        "ask": "script", "argv": asking._SMALL.split(), "provided": {}, "written": {"lr": 0.5}, "defaults": {},
    },
}  # fmt: skip


def _answers(tree: Path, folder: Path, *, catalog: Any) -> Any:
    (folder / "asked").write_text(json.dumps({"catalog": catalog, "questions": SMALL}), encoding="utf-8")
    return ask(tree, folder / "answers", questions=folder / "asked")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ask(ROOT, tmp_path_factory.mktemp("catalog") / "catalog")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, catalog: Any) -> Any:
    return _answers(ROOT, tmp_path_factory.mktemp("here"), catalog=catalog)


def _changed_tree(folder: Path, file: str, old: str, new: str) -> Path:
    """Copies this tree with one text of a file replaced."""
    ignored = shutil.ignore_patterns("tests", "docs", "benchmarks", "__pycache__", ".git", ".venv")
    shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    return folder


def test_answers_hold_values_and_errors(here: Any) -> None:
    assert here["value"]["is"] == {"num_layers": "3"}
    assert here["file"]["is"] == {"config": "{here}/flags.yaml", "lr": "0.5"}
    assert here["error"] == {"error": "ValueError: --num-layers: 'three' is not an integer"}
    assert "not supported" in here["refused"]["error"]
    assert here["line"]["is"]["transformer"]["gated_linear_unit"] == "True"
    assert here["write"]["is"]["transformer"]["num_layers"] == "4"
    assert here["provider"]["is"]["my_rate"] == "2.0"
    assert "--tensor-model-parallel-size 2" in here["translation"]["printed"]
    assert here["program"]["is"]["exit code"] == 0 and "mixtral" in here["program"]["is"]["written"]["printed.txt"]
    assert here["script"]["is"]["written"]["built.json"]["optimizer"]["lr"] == "0.5"


def test_a_copy_differs_only_in_its_changed_default(here: Any, catalog: Any, tmp_path: Path) -> None:
    change = ("clip_grad: float = config_field(1.0,", "clip_grad: float = config_field(2.0,")
    tree = _changed_tree(tmp_path / "copy", "megatron/core/optimizer/optimizer_config.py", *change)
    changed = _answers(tree, tmp_path, catalog=catalog)
    assert list(differences(here["all"], changed["all"])) == ["/is/values/clip_grad: '1.0' -> '2.0'"]
    same = [name for name in SMALL if here[name] == changed[name]]
    assert same == [name for name in SMALL if name != "all"]
    assert report("lines", SMALL, here, changed, limit=9) == 1


@pytest.mark.parametrize(
    ("base", "head", "lines"),
    [
        ({"is": {"a": "1"}}, {"is": {"a": "1"}}, []),
        ({"is": {"a": "1"}}, {"is": {"a": "2"}}, ["/is/a: '1' -> '2'"]),
        ({"is": {"a": "1"}}, {"is": {}}, ["/is/a: '1' -> '(no answer)'"]),
        ({"is": {}}, {"is": {}, "printed": "x"}, ["/printed: '(no answer)' -> 'x'"]),
        ({"is": 1}, {"is": True}, ["/is: 1 -> True"]),
        ({"error": "a\nb"}, {"error": "a\nc"}, ["/error: only in base: b", "/error: only in head: c"]),
        ({"error": "a\nb"}, {"error": "b\na"}, ["/error: lines in another order"]),
        ({"is": [1, 2]}, {"is": [1, 3]}, ["/is/1: 2 -> 3"]),
    ],
)
def test_each_difference_is_described_with_its_place(base: Any, head: Any, lines: list[str]) -> None:
    assert list(differences(base, head)) == lines


def test_another_advice_for_a_refused_field_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"one": {"name": "fp8", "value": "e4m3"}}
    base, same = (
        {"one": {"error": "ValueError: fp8 is 'e4m3': no 8 bits"}},
        {"one": {"error": "fp8 is 'e4m3': use bf16"}},
    )
    assert report("fields", asked, base, same, limit=9) == 0
    assert "1 fields are refused with another advice" in capsys.readouterr().out
    for head in ({"error": "a field is wrong"}, {"error": "fp8 is wrong"}, {"is": {}}):
        assert report("fields", asked, base, {"one": head}, limit=9) == 1


def test_stored_answers_belong_to_a_commit_and_its_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = tmp_path / "questions"
    questions.write_text("a")
    known = key_of("HEAD", questions)
    assert key_of("HEAD", questions) == known
    questions.write_text("b")
    assert key_of("HEAD", questions) != known
    monkeypatch.setattr(same_answers, "DRIVER", questions)
    assert key_of("HEAD", questions) != known


def test_every_flag_and_field_is_asked_about(catalog: Any) -> None:
    asked = {kind: questions_of(kind, catalog, tree=ROOT, megatron_flags=None) for kind in KINDS}
    for flag in catalog["flags"]:
        assert flag["flags"][0] in asked["flags"]
    words = {word for one in asked["flags"].values() if "argv" in one for word in one["argv"]}
    assert {spelling for flag in catalog["flags"] for spelling in flag["flags"]} <= words
    fields = {(one["path"], one["name"]) for one in asked["fields"].values()}
    assert {(path, name) for path, names in catalog["fields"].items() for name in names} <= fields
    assert len(asked["lines"]) > 500
