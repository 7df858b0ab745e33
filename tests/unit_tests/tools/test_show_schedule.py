"""Drawings of schedules: text with one column per time unit, SVG with a box per pass, and one-line errors."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron.tools.show_schedule import main


def test_a_schedule_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--stages", "2", "--microbatches", "2", "--steps", "1", "--svg", str(tmp_path / "a.svg")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["stage 0   F0 F1 ......B0    ...B1", "stage 1   ...F0 B0    F1 B1"]
    assert lines[2] == "2 stages, 2 micro-batches: 9 forward passes long, 33.3% idle"
    assert lines[3:6] == ["stage 1:", "  [receive F0.0 from 0]", "  await F0.0"]
    drawn = ElementTree.parse(tmp_path / "a.svg").getroot()
    # A background, 8 passes and 2 legend colors; 4 transfers.
    assert len(drawn.findall("{*}rect")) == 1 + 8 + 2 and len(drawn.findall("{*}line")) == 4
    main(["--stages", "2", "--chunks", "2", "--microbatches", "1", "--forward-only"])
    assert capsys.readouterr().out.splitlines()[0] == "stage 0   F0.0 .....F1.0"
    main(["--stages", "2", "--schedule", "zbv", "--microbatches", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stage 0   F0.0 ..........F1.0 B1.0 W1.0 .....B0.0 W0.0"
    assert lines[1] == "stage 1   .....F0.0 F1.0 ..........B1.0 B0.0 W1.0 W0.0"


def test_the_passes_of_a_pair_are_shown_as_one_box(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--stages", "2", "--microbatches", "3", "--paired", "--steps", "1", "--svg", str(tmp_path / "a.svg")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["stage 0   F0 F1 F2 ......B0    ...B1    B2", "stage 1   ...F0 B0+F1    B1+F2    B2"]
    assert lines[2] == "2 stages, 3 micro-batches: 12 forward passes long, 25.0% idle"
    assert "  B0.0+F0.1" in lines[4:]
    drawn = ElementTree.parse(tmp_path / "a.svg").getroot()
    # A background, 8 other passes, 2 legend colors and the frame of the legend; two passes and a frame in each pair.
    assert len(drawn.findall("{*}rect")) == 1 + 8 + 2 + 1
    assert [len(pair.findall("{*}rect")) for pair in drawn.findall("{*}g")] == [3, 3]
    main(["--stages", "2", "--microbatches", "3", "--paired", "--forward-only"])
    assert capsys.readouterr().out.splitlines()[0] == "stage 0   F0 F1 F2"


def test_a_schedule_that_cannot_be_is_refused() -> None:
    with pytest.raises(SystemExit, match="error: microbatch_group_size_per_vp_stage is 2: must be at least"):
        main(["--stages", "4", "--chunks", "2", "--group-size", "2"])
