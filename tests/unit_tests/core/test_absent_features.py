"""absent_features.json: complete rows, one place for each flag, value and field, and nothing that works."""

import dataclasses
import importlib
import json
from collections import Counter
from typing import Any

import pytest

from megatron.core.absent_features import FEATURES_FILE, AbsentField, AbsentState, absent_features
from megatron.core.config_field import MegatronConfig, absent_fields, field_problems

ENTRIES: list[dict[str, Any]] = json.loads(FEATURES_FILE.read_text(encoding="ascii"))
KEYS = {
    "flags": ({"flag", "group"}, {"also", "dest", "state", "action", "type", "nargs", "choices", "default"}),
    "values": ({"flag", "values"}, set()),
    "fields": ({"config", "field", "type", "default"}, {"state"}),
}
OF_ANY_ROW = {"advice"}
OF_FLAGS = {"hint", "in_scripts"}
RULE_KEYS = {"becomes", "effect", "why", "values", "given", "without"}
CONFIGS = {
    name: getattr(importlib.import_module(f"megatron.core.{module}"), name)
    for name, module in {
        "ModelParallelConfig": "model_parallel_config",
        "TransformerConfig": "transformer.transformer_config",
        "MLATransformerConfig": "transformer.transformer_config",
        "DistributedDataParallelConfig": "distributed.distributed_data_parallel_config",
        "OptimizerConfig": "optimizer.optimizer_config",
        "BlendedMegatronDatasetConfig": "datasets.blended_megatron_dataset_config",
        "GPTDatasetConfig": "datasets.gpt_dataset",
    }.items()
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["feature"].replace(" ", "-"))
def test_every_row_is_complete(entry: dict[str, Any]) -> None:
    allowed = {"feature", "advice", "in_python", "no_effect", "changes_speed", "in_scripts", *KEYS}
    assert entry["feature"] and entry.keys() <= allowed and entry.keys() & KEYS.keys()
    for kind, (required, optional) in KEYS.items():
        more = OF_ANY_ROW | (OF_FLAGS if kind == "flags" else set())
        for row in entry.get(kind, ()):
            assert required <= row.keys() <= required | optional | more, row
    for owner in (entry, *entry.get("flags", ())):
        for rule in owner.get("in_scripts", ()):
            assert {"becomes", "effect", "why"} <= rule.keys() <= RULE_KEYS, rule
    # A sentence that no row uses would be left over from rows that are gone.
    users: dict[str, list[Any]] = {"advice": [], "in_python": [], "no_effect": []}
    for kind, key in (("flags", "advice"), ("fields", "in_python")):
        for row in entry.get(kind, ()):
            users["no_effect" if row.get("state") == "no effect" else key].append(row)
    if "in_python" not in entry:
        users["advice"] += users.pop("in_python")
    for key, rows in users.items():
        assert (key in entry) == any("advice" not in row for row in rows), f"{key} of {entry['feature']}"


def test_nothing_is_listed_twice() -> None:
    features = absent_features()
    listed = [
        *(word for flag in features.flags for word in flag.flags),
        *(f"argument {flag.dest}" for flag in features.flags),
        *(f"{row.flag} {value}" for row in features.values for value in row.values),
        *(f"{field.config}.{field.name}" for field in features.fields),
        *(entry["feature"] for entry in ENTRIES),
    ]
    assert not [name for name, count in Counter(listed).items() if count > 1]


@pytest.mark.parametrize("field", absent_features().fields, ids=lambda field: f"{field.config}.{field.name}")
def test_every_field_is_one_that_its_configuration_accepts_and_does_not_have(field: AbsentField) -> None:
    config_class = CONFIGS[field.config]
    assert issubclass(config_class, MegatronConfig)
    assert field.name not in {one.name for one in dataclasses.fields(config_class)}
    # Listed for the class that Megatron-LM's code defines it in, not also for a base.
    rows = [row for row in absent_features().fields if row.name == field.name]
    assert [row for row in rows if issubclass(config_class, CONFIGS[row.config])] == [field]
    assert absent_fields(config_class)[field.name] is field
    assert field_problems(config_class, {"absent_values": {field.name: field.default}}) == {}
    problems = field_problems(config_class, {"absent_values": {field.name: _Other()}})
    accepts_all = field.state is AbsentState.NO_EFFECT
    assert problems[field.name].startswith(f"{config_class.__name__}.{field.name} is other: ")
    assert problems[field.name].endswith(f"keep the default {field.default!r}") == (not accepts_all)


class _Other:
    """A value that no field has."""

    def __repr__(self) -> str:
        return "other"
