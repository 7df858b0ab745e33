"""Reads the files that the package wandb writes offline. Contains no tests."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore


@dataclass
class WandbRun:
    """One start of a run: id, project, name, entity, settings, points by step, and exit status."""

    run_id: str
    project: str
    name: str
    entity: str
    config: dict[str, Any]
    points: dict[int, dict[str, float]] = field(default_factory=dict)
    exit_code: int | None = None


def read_wandb(folder: Path) -> list[WandbRun]:
    """Returns the starts of runs in the folder passed to wandb.init, oldest first."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    return [_read(path) for path in files]


def _read(path: Path) -> WandbRun:
    run: WandbRun | None = None
    for record in _records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            about = record.run
            config = {item.key: json.loads(item.value_json) for item in about.config.update}
            run = WandbRun(about.run_id, about.project, about.display_name, about.entity, config)
        elif kind == "history":
            assert run is not None
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = values.pop("_step")
            run.points[step] = {name: value for name, value in values.items() if not name.startswith("_")}
        elif kind == "exit":
            assert run is not None
            run.exit_code = record.exit.exit_code
    assert run is not None, f"{path} contains no run"
    return run


def _records(path: Path) -> Iterator[Any]:
    store = DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record
