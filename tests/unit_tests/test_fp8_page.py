"""docs/fp8.md: its command trains in 8 bits, and its tables have the sizes that the code computes."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.transformer.moe.dispatch_static import mean_padding
from tests.structure.measure import ROOT

PAGE = (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
# Hidden size, width of one expert.
MODELS = {"Qwen3-30B-A3B": (2048, 768), "DeepSeek-V3": (7168, 2048)}


def rows_of(heading: str) -> dict[str, list[str]]:
    """Returns the cells of a section's table by their row's first cell."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in cells}


def sizes(hidden: int, ffn: int, form: BlockFormat | None) -> Iterator[int]:
    """Yields the rows of the table of bytes; form: None for bf16."""

    def row_bytes(width: int) -> int:
        return 2 * width if form is None else form.row_bytes(width)

    encoded = (form or BlockFormat(32)).row_bytes(hidden), BlockFormat(32).row_bytes(2 * ffn)
    yield row_bytes(hidden)
    yield 2 * 2 * ffn
    yield row_bytes(hidden) + 2 * 2 * ffn + 4
    yield sum(encoded) + 4
    yield row_bytes(ffn)
    yield hidden * row_bytes(2 * ffn) + ffn * row_bytes(hidden)


def test_the_bytes_are_those_of_the_format() -> None:
    head, _, *rows = rows_of("Bytes").values()
    assert [name for name in MODELS if f"{name}: bf16" in head] == [*MODELS]
    forms = (None, BlockFormat(128), BlockFormat(32))
    columns = [sizes(*shape, form) for shape in MODELS.values() for form in forms]
    assert [[int(cell.replace(",", "")) for cell in row] for row in rows] == [list(row) for row in zip(*columns)]


def test_the_padding_is_the_mean_of_experts_in_the_planner() -> None:
    rows = {name: cells for name, cells in rows_of("Padding").items() if name[0].isdigit()}
    assert len(rows) == 4
    for name, cells in rows.items():
        experts = int(name.split()[0])
        shares = [experts * float(mean_padding(65536 / experts, block)) / 65536 for block in (64, 128, 32)]
        assert cells == [f"{100 * share:.1f} %" for share in shares]


@pytest.mark.slow
def test_the_command_trains_experts_in_8_bits() -> None:
    (command,) = (block for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S) if "pretrain_gpt.py" in block)
    program, *words = shlex.split(command.replace("\\\n", " "))
    short = "--train-iters 1 --log-interval 1 --eval-iters 0"
    assert program == ".venv/bin/python"
    done = subprocess.run([sys.executable, *words, *short.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^  experts of .*", PAGE, re.MULTILINE)
    assert shown and [line for line in shown if line not in done.stdout] == []
