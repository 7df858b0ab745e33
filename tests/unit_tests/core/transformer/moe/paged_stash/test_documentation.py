"""What docs/paged_stash.md shows as code runs, prints what the page says and does what it says."""

import re
from typing import Any

import pytest
import torch

from tests.structure.measure import ROOT

PAGE = (ROOT / "docs" / "paged_stash.md").read_text(encoding="utf-8")


def test_the_example_prints_and_trains_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    weights: list[list[torch.Tensor]] = []
    for source in (code, code.replace("device_pages=100", "device_pages=1000")):
        names: dict[str, Any] = {}
        exec(compile(source, "docs/paged_stash.md", "exec"), names)
        weights.append([weight for pair in names["weights"] for weight in pair])
    printed = capsys.readouterr().out.splitlines()
    assert [f"    {line}" for line in printed[:3]] == [line for line in PAGE.splitlines() if re.match(r"    \d ", line)]
    assert printed[:3] != printed[3:] and all(map(torch.equal, *weights))
