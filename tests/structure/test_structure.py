"""The project keeps the limits of its house style; the list of exemptions does not grow."""

from collections import Counter
from functools import cache

import pytest

from tests.structure.allow_list import ALLOWED, PUBLIC_NAMES
from tests.structure.rules import ANY_CODE_RULES, PRODUCT_RULES, Finding, findings

MOST_ALLOWED = 1  # lower it whenever an entry goes
MOST_PUBLIC_NAMES = 73


@cache
def everything_found() -> tuple[Finding, ...]:
    return tuple(findings())


def breaches() -> list[Finding]:
    """Findings that no exemption covers."""
    return [finding for finding in everything_found() if finding.key not in ALLOWED and not _fixed_by_users(finding)]


def _fixed_by_users(finding: Finding) -> bool:
    return finding.rule in ("keyword_only", "parameters") and finding.name in PUBLIC_NAMES


@pytest.mark.parametrize("rule", [*PRODUCT_RULES, *ANY_CODE_RULES])
def test_project_keeps_the_limit(rule: str) -> None:
    broken = [str(finding) for finding in breaches() if finding.rule == rule]
    assert not broken, "\n".join(["", *broken])


def test_exemptions_do_not_grow() -> None:
    assert len(ALLOWED) <= MOST_ALLOWED and len(PUBLIC_NAMES) <= MOST_PUBLIC_NAMES


def test_every_exemption_is_needed_and_has_a_reason() -> None:
    needed = Counter(finding.key for finding in everything_found())
    assert [key for key, reason in ALLOWED.items() if not needed[key] or not reason] == []
