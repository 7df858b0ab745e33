"""A run with several processes logs one Weights & Biases run, which its restart continues."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional_tests.case import Flags, command_line, read_bases
from tests.functional_tests.launch import run_program
from tests.unit_tests.training.callbacks.wandb_files import read_wandb


@pytest.mark.slow
def test_the_last_rank_logs_what_tensorboard_gets_and_a_resumed_run_continues(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saved = str(tmp_path / "saved")
    flags: Flags = {**read_bases()["moe"], "save": saved, "load": saved, "wandb-project": "p", "wandb-exp-name": "n"}
    flags |= {"log-timers-to-tensorboard": True, "timing-log-level": 1, "moe-per-layer-logging": True}
    for more in ({"exit-interval": 3}, {}):
        run = run_program(command_line({**flags, **more}), 2, folder=folder)
        assert run.exit_codes == [0, 0], run.written()
    first, continued = read_wandb(Path(saved) / "wandb")
    assert first.run_id == continued.run_id
    assert (list(first.points), list(continued.points)) == ([1, 2, 3], [4, 5, 6])
    points = first.points | continued.points
    events = EventAccumulator(str(folder)).Reload()
    # Each rank that logs reports its own times.
    times = {"iteration-time", "tokens-per-second"}
    for tag in events.Tags()["scalars"]:
        # The final evaluation of a start may follow a regular one at the same step. The later value counts.
        found = {event.step: event.value for event in events.Scalars(tag)}
        assert found.keys() == {step for step, values in points.items() if tag in values}, tag
        if tag not in times:
            assert {step: points[step][tag] for step in found} == pytest.approx(found), tag
    assert {tag for values in points.values() for tag in values} == set(events.Tags()["scalars"])
