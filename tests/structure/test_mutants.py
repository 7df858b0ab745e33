"""The source text that each seeded fault replaces exists exactly once in the product."""

import yaml

from tests.mutants.__main__ import ROOT
from tests.mutants.results import read_mutants


def test_every_fault_has_its_place_in_these_files() -> None:
    for fault in read_mutants(ROOT / "tests/mutants/faults.yaml"):
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        found = text.count(fault.old)
        assert found == 1 and fault.old != fault.new, (
            f"{fault.name}: its text occurs {found} times in {fault.file}; fix tests/mutants/faults.yaml so that it "
            f"still breaks this: {fault.breaks}"
        )


def test_every_fault_of_the_device_model_has_its_place_in_these_files() -> None:
    for fault in yaml.safe_load((ROOT / "tests/device_model/faults.yaml").read_text(encoding="utf-8")):
        found = (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"])
        assert found == 1, (
            f"{fault['name']}: its text occurs {found} times in {fault['file']}; fix tests/device_model/faults.yaml"
        )
