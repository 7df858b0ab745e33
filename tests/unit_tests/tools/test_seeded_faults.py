"""Faults that the regression gate must detect: each applies to the current files, and lists existing cases."""

from pathlib import Path

import pytest

from megatron.tools.gate import cases as gate_cases
from megatron.tools.seeded_faults import ROOT, GateFault, read_faults


def test_every_fault_has_its_place_in_these_files_and_cases_to_notice_it() -> None:
    faults = read_faults()
    for fault in faults:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, f"{fault.name}: move it in tools/gate/faults.yaml, {fault.file} has changed"
        assert fault.chosen_cases()
    assert len({fault.kind for fault in faults}) >= 9


def test_a_fault_changes_its_text_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\nthree\n")
    fault = GateFault("name", "kind", file="a.py", old="two\n", new="2\n", cases=("llama-like",))
    fault.put_into(tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\n2\nthree\n"
    with pytest.raises(ValueError, match="its text occurs 0 times in a.py, must be 1"):
        fault.put_into(tmp_path)


def test_a_fault_whose_case_does_not_exist_is_refused() -> None:
    fault = GateFault("name", "kind", file="a.py", old="a", new="b", cases=("no such case",))
    with pytest.raises(ValueError, match="cases that do not exist: no such case"):
        fault.chosen_cases()


def test_a_fault_that_names_a_new_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = GateFault("name", "kind", file="a.py", old="a", new="b", cases=("llama-like",))
    assert fault.chosen_cases()
    monkeypatch.setattr(gate_cases, "NEW_CASES", frozenset({"llama-like"}))
    with pytest.raises(ValueError, match="cases of NEW_CASES, which are not compared: llama-like"):
        fault.chosen_cases()
