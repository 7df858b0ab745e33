from itertools import combinations

from tests.pairwise import Case, pairwise

DTYPES = ["fp32", "bf16", "fp16"]
STAGES = [0, 1, 2]
SWITCH = [False, True]


def _meetings(cases: list[Case]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}


def _stage_zero_without_overlap(case: Case) -> bool:
    return case["stage"] > 0 or not case["overlap"]


def test_every_two_values_meet_in_far_fewer_cases_than_the_product() -> None:
    cases = pairwise(dtype=DTYPES, stage=STAGES, overlap=SWITCH, accumulate=SWITCH)
    assert len(_meetings(cases)) == 3 * 3 + 2 * 3 * 2 + 2 * 3 * 2 + 2 * 2
    assert len(cases) <= 12  # of 36; the minimum is nine


def test_every_two_values_that_an_allowed_case_has_meet_and_no_other_case_is_chosen() -> None:
    cases = pairwise(dtype=DTYPES, stage=STAGES, overlap=SWITCH, allowed=_stage_zero_without_overlap)
    assert all(map(_stage_zero_without_overlap, cases))
    assert len(_meetings(cases)) == 3 * 3 + 3 * 2 + (3 * 2 - 1)


def test_the_same_options_give_the_same_cases() -> None:
    assert pairwise(dtype=DTYPES, overlap=SWITCH) == pairwise(dtype=DTYPES, overlap=SWITCH)


def test_values_of_a_single_option_are_all_chosen_and_need_no_hash() -> None:
    assert pairwise(flags=[["--a"], ["--b"]]) == [{"flags": ["--a"]}, {"flags": ["--b"]}]


def test_no_case_is_chosen_if_none_is_allowed() -> None:
    assert pairwise(dtype=DTYPES, overlap=SWITCH, allowed=lambda case: False) == []
