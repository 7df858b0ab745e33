"""The project does not violate any structure rule."""

from functools import cache

import pytest

from tests.structure.rules import ANY_CODE_RULES, PRODUCT_RULES, Finding, findings


@cache
def everything_found() -> tuple[Finding, ...]:
    return tuple(findings())


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*PRODUCT_RULES, *ANY_CODE_RULES])
def test_project_keeps_the_rule(rule: str) -> None:
    broken = [str(finding) for finding in everything_found() if finding.rule == rule]
    assert not broken, "\n".join(["", *broken])
