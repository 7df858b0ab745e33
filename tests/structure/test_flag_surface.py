"""The command-line surface is frozen: flags, their docs page, cases, defaults and rejected flags."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.tools.write_flag_docs import DOCS_FILE, SURFACE_FILE, flags_page, surface
from megatron.training.command_line.flags import (
    KNOWN_FLAGS_FILE,
    Flag,
    FlagState,
    flag_table,
    known_flag,
    load_known_flags,
    refusal,
)
from megatron.training.command_line.refusals import HARMLESS, MISSING, NO_EFFECT_HINTS, REFUSALS
from tests.functional_tests.case import FOLDER, read_bases, read_cases
from tests.functional_tests.expectations import EXPECTATIONS
from tests.structure.measure import ROOT

REWRITE = "run `python -m tools.write_flag_docs` and commit what it writes, if the change is meant"
UPSTREAM_FILE = ROOT.parent / "shared" / "flags.json"

# Owners in known_flags.json whose flags must all be explained on a page.
SHOWN_OWNERS = ("trainer", "parallel", "ddp", "stash", "graphs", "adam", "fsdp2", "faults", "models", "planner")

# Working flags that no case can train with, and the tests that run them.
RUN_ELSEWHERE = {
    "--cuda-graph-impl": "needs a GPU: test_step_graphs.py and test_module_graphs.py, on tapes",
    "--cuda-graph-modules": "needs a GPU: test_module_graphs.py, on tapes",
    "--cuda-graph-warmup-steps": "needs a GPU: test_step_graphs.py, on tapes",
    "--optimizer-cuda-graph": "needs a GPU: test_step_graphs.py, on tapes",
    "--moe-flex-dispatcher-backend": "needs a package and GPUs: test_flex_backends.py, with a stand-in for both",
    "--moe-use-upcycling": "needs another model's checkpoint: test_upcycling.py",
    "--data-args-path": "its file names corpora by a folder that a case does not know: test_blends_and_splits.py",
}

# Arguments whose defaults intentionally differ from Megatron's, and the reason.
OTHER_DEFAULTS = {
    "attention_backend": "an enum here, its repr there",
    "cp_comm_type": "one word is for all layers; Megatron keeps it in a list",
    "distributed_backend": "unset picks nccl or gloo by the device",
    "num_query_groups": "unset is one group per head; Megatron ignores its 1 without --group-query-attention",
    "transformer_impl": "Transformer Engine needs a GPU and a package of its own",
    "yarn_correction_range_round_to_int": "on; of Megatron's two flags for it, one has no default",
}


def test_flag_surface_is_the_frozen_one() -> None:
    frozen, present = (set(text.splitlines()) for text in (SURFACE_FILE.read_text(), surface(flag_table())))
    gone, new = sorted(frozen - present), sorted(present - frozen)
    assert not gone and not new, "\n".join([*(f"- {line}" for line in gone), *(f"+ {line}" for line in new), REWRITE])


def test_flags_page_is_current() -> None:
    assert DOCS_FILE.read_text() == flags_page(flag_table()), f"docs/flags.md is stale: {REWRITE}"


def test_every_flag_that_works_is_run_by_a_case_and_has_a_line_of_help() -> None:
    used = set(_flags_of_runs())
    unrun = {flag.flags[0] for flag in _working() if not any(word.removeprefix("--") in used for word in flag.flags)}
    unsaid = [flag.flags[0] for flag in _working() if len(flag.help.split()) < 2]
    assert unrun == RUN_ELSEWHERE.keys() and not unsaid, (
        f"without a case: {unrun ^ RUN_ELSEWHERE.keys()}; without help: {unsaid}"
    )


def _flags_of_runs() -> Iterator[str]:
    """Yields the flags, without dashes, of all cases that train. Cases that must fail do not exercise their flags."""
    bases = read_bases()
    for path in (FOLDER / "cases").glob("*.yaml"):
        for case in read_cases(path, bases, set(EXPECTATIONS)):
            if "failure" not in case.expect:
                yield from _set_flags(case.flags)
                yield from _set_flags(case.expect)


def _set_flags(value: Any) -> Iterator[str]:
    for name, inside in value.items() if isinstance(value, dict) else ():
        if inside is not None and inside is not False:
            yield name
        yield from _set_flags(inside)


def test_every_flag_of_a_feature_is_explained_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md") if path != DOCS_FILE)
    flags = [f.flags[0] for f in flag_table().flags if f.known is not None and f.known.owner in SHOWN_OWNERS]
    unexplained = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", pages)]
    assert not unexplained, f"no page in docs/ explains {unexplained}"


@pytest.mark.skipif(not UPSTREAM_FILE.exists(), reason="the list of known flags is not next to this checkout")
def test_known_flags_are_those_of_the_shared_list() -> None:
    shared = json.loads(UPSTREAM_FILE.read_text())
    rows = [{**row, "group": group} for group, members in shared["groups"].items() for row in members]
    expected = [known_flag(_compact(row)) for row in rows]
    assert list(load_known_flags().flags) == expected, f"{KNOWN_FLAGS_FILE} disagrees with {UPSTREAM_FILE}"
    assert len(expected) == 852


def _compact(row: dict) -> dict:
    """Returns a row of the shared list without entries that equal their defaults."""
    silent = {"action": "store", "nargs": 0}
    kept = {key: value for key, value in row.items() if value is not None and value != silent.get(key, ...)}
    if kept.get("type") in ("str", "None"):
        del kept["type"]
    return kept


def _working() -> list[Flag]:
    return flag_table().in_state(FlagState.WORKS)


def test_every_known_flag_has_exactly_one_place() -> None:
    words = [word for flag in flag_table().flags for word in flag.flags]
    assert len(words) == len(set(words))
    assert {word for row in load_known_flags().flags for word in row.flags} <= set(words)


@pytest.mark.parametrize("flag", [flag for flag in _working() if flag.known], ids=lambda flag: flag.dest)
def test_working_flags_keep_megatrons_names_and_defaults(flag: Flag) -> None:
    assert flag.known is not None
    assert set(flag.known.flags) <= set(flag.flags), "an alias that scripts use is missing"
    assert flag.dest == flag.known.dest
    if flag.dest not in OTHER_DEFAULTS:
        same_as_none = (None, False) if flag.constant is not None else ()
        assert flag.default == flag.known.default or flag.default in same_as_none and flag.known.default in same_as_none


def test_refusals_advise_only_what_a_user_can_do() -> None:
    for flag in [*flag_table().in_state(FlagState.REFUSED), *flag_table().in_state(FlagState.DEFAULT_ONLY)]:
        assert len(refusal(flag)) > 25, flag.flags[0]
    names = {word: flag for flag in flag_table().flags for word in flag.flags}
    for sentence in [text for _, text in (*REFUSALS, *MISSING)] + list(NO_EFFECT_HINTS.values()):
        advised = [word.strip(",:;()") for word in sentence.split() if word.startswith("--")]
        refused = [word for word in advised if word in names and names[word].state is FlagState.REFUSED]
        unknown = [word for word in advised if word not in names and word not in ("--max-restarts", "--dsa")]
        assert not refused + unknown, sentence
    accepted = {flag.flags[0] for flag in flag_table().in_state(FlagState.NO_EFFECT)}
    assert set(NO_EFFECT_HINTS) <= accepted and set(HARMLESS) == accepted
