"""The command-line surface is frozen: flags, their docs page, cases, defaults and rejected flags."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.core.absent_features import FEATURES_FILE, AbsentFlag, AbsentState, absent_features
from megatron.tools.write_flag_docs import DOCS_FILE, SURFACE_FILE, flags_page, surface
from megatron.training.command_line.flags import Flag, FlagState, flag_table, refusal
from tests.functional_tests.case import FOLDER, read_bases, read_cases
from tests.functional_tests.expectations import EXPECTATIONS
from tests.structure.measure import ROOT
from tests.structure.megatron_flags import WORKING_FLAGS_FILE, MegatronFlag, working_megatron_flags

REWRITE = "run `python -m tools.write_flag_docs` and commit what it writes, if the change is meant"
UPSTREAM_FILE = ROOT.parent / "shared" / "flags.json"

# Owners in megatron_flags.json whose flags must all be explained on a page.
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


_BY_WORD = {word: row for row in working_megatron_flags() for word in row.flags}
# Flags that work with what Megatron-LM's list says of them.
_OF_MEGATRON = [
    (flag, next(_BY_WORD[word] for word in flag.flags if word in _BY_WORD))
    for flag in flag_table().in_state(FlagState.WORKS)
    if not _BY_WORD.keys().isdisjoint(flag.flags)
]


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
    flags = [flag.flags[0] for flag, known in _OF_MEGATRON if known.owner in SHOWN_OWNERS]
    unexplained = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", pages)]
    assert not unexplained, f"no page in docs/ explains {unexplained}"


@pytest.mark.skipif(not UPSTREAM_FILE.exists(), reason="the list of known flags is not next to this checkout")
def test_known_flags_are_those_of_the_shared_list() -> None:
    shared = json.loads(UPSTREAM_FILE.read_text())
    expected = {row["flags"][0]: _facts(row, group) for group, members in shared["groups"].items() for row in members}
    known = {flag.flags[0]: _facts(vars(flag), flag.group) for flag in _known()}
    # Its default here is another one, because quintic trains a different model than torch.optim.Muon's coefficients.
    known["--muon-coefficient-type"]["default"] = "quintic"
    wrong = [name for name in {*known, *expected} if known.get(name) != expected.get(name)]
    assert not wrong, f"{FEATURES_FILE} and {WORKING_FLAGS_FILE} disagree with {UPSTREAM_FILE} about {wrong}"


def _facts(row: dict[str, Any], group: str) -> dict[str, Any]:
    """Returns what the shared list and ours say of a flag, with one form for each fact."""
    facts = {key: row.get(key) for key in ("flags", "dest", "action", "type", "default", "choices", "nargs", "owner")}
    is_switch = facts["action"] in ("store_true", "store_false", "boolean_optional")
    facts.update(group=group, flags=list(row["flags"]), choices=row["choices"] and list(row["choices"]))
    facts.update(type="str" if is_switch or facts["type"] in (None, "None") else facts["type"])
    facts.update(nargs=None if is_switch else facts["nargs"])
    return facts


def _known() -> list[AbsentFlag | MegatronFlag]:
    """Returns all flags of Megatron-LM, each once."""
    return [*absent_features().flags, *working_megatron_flags()]


def test_all_flags_of_megatron_are_known() -> None:
    assert len(_known()) == len({flag.flags[0] for flag in _known()}) == 852


def _working() -> list[Flag]:
    return flag_table().in_state(FlagState.WORKS)


def test_every_known_flag_has_exactly_one_place() -> None:
    words = [word for flag in flag_table().flags for word in flag.flags]
    assert len(words) == len(set(words))
    assert {word for row in _known() for word in row.flags} <= set(words)
    # Nothing that works is listed as absent.
    works = {word for flag in _working() for word in flag.flags}
    assert works.isdisjoint(word for row in absent_features().flags for word in row.flags)
    assert works.issuperset(word for row in working_megatron_flags() for word in row.flags)


@pytest.mark.parametrize(("flag", "known"), _OF_MEGATRON, ids=[flag.dest for flag, _ in _OF_MEGATRON])
def test_working_flags_keep_megatrons_names_and_defaults(flag: Flag, known: MegatronFlag) -> None:
    assert set(known.flags) <= set(flag.flags), "an alias that scripts use is missing"
    assert flag.dest == known.dest
    if flag.dest not in OTHER_DEFAULTS:
        same_as_none = (None, False) if flag.constant is not None else ()
        assert flag.default == known.default or flag.default in same_as_none and known.default in same_as_none


def test_the_absent_values_of_a_flag_are_those_that_only_megatron_has() -> None:
    listed = {(row.flag, value) for row in absent_features().values for value in row.values}
    assert len(listed) == sum(len(row.values) for row in absent_features().values)
    only_there = set()
    for flag, known in _OF_MEGATRON:
        # Enum choices are listed as `AttnBackend.flash`; users write `flash`.
        theirs = {str(choice).rpartition(".")[2] for choice in known.choices or ()} if flag.choice_names() else set()
        only_there |= {(flag.flags[0], value) for value in theirs - set(flag.choice_names())}
    assert listed == only_there


def test_refusals_advise_only_what_a_user_can_do() -> None:
    for flag in [*flag_table().in_state(FlagState.REFUSED), *flag_table().in_state(FlagState.DEFAULT_ONLY)]:
        assert len(refusal(flag)) > 25, flag.flags[0]
    names = {word: flag for flag in flag_table().flags for word in flag.flags}
    features = absent_features()
    # Flags without effect may say that they are read only with a flag that is refused.
    sentences = {row.advice for row in features.flags if row.state is not AbsentState.NO_EFFECT}
    sentences |= {row.advice for row in features.fields if row.state is not AbsentState.NO_EFFECT}
    sentences |= {row.advice or "" for row in features.values}
    sentences |= {row.hint or "" for row in features.flags}
    for sentence in sentences:
        advised = [word.strip(",:;()") for word in sentence.split() if word.startswith("--")]
        refused_too = [word for word in advised if word in names and names[word].state is FlagState.REFUSED]
        unknown = [word for word in advised if word not in names and word not in ("--max-restarts", "--dsa")]
        assert not refused_too + unknown, sentence
    assert all(row.state is AbsentState.NO_EFFECT for row in features.flags if row.hint)
