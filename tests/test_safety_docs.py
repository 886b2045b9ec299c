"""docs/reliability.md names tests that exist, and every report of the checklist once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
TEXT = (REPO / "docs" / "reliability.md").read_text()
# Numbers that no report of the checklist has.
ABSENT = {11, 13, 14, 28, 30, 34, 35, 44, 45, 48, 49, 59, 60, 64, 72, 73, 76, 81, 85, 90}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|tools)/[\w/.]+?)[`:]", TEXT))))
def test_files_exist(path):
    assert (REPO / path).is_file()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", TEXT))))
def test_tests_exist(name):
    path, function = name.split("::")
    assert f"def {function}(" in (REPO / path).read_text()


def rows() -> list[tuple[set[int], str]]:
    """(numbers of the reports, tests) of each row of the last table."""
    table = TEXT[TEXT.index("## Reports of users") :]
    found = []
    for left, right in re.findall(r"^\| ([\d\-, ]+)(?:\([^|]*\) )?\| (.*) \|$", table, re.M):
        numbers: set[int] = set()
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", left):
            numbers |= set(range(int(low), int(high or low) + 1))
        found.append((numbers - ABSENT, right))
    return found


def test_every_report_is_in_the_table_once():
    listed = [number for numbers, _ in rows() for number in numbers]
    assert sorted(listed) == sorted(set(range(1, 113)) - ABSENT)


def test_reports_said_to_be_in_one_file_are_there():
    """Numbers in names of tests: test_a1_to_a9_..., test_a15_and_b40_..., test_c52_and_c53_..."""
    source = (REPO / "tests" / "test_field_reports_a_d.py").read_text()
    tested: set[int] = set()
    for name in re.findall(r"^def test_([a-d]\d\w*)", source, re.M):
        numbers = [int(n) for n in re.findall(r"(?:^|_)[a-d](\d+)", name)]
        span = range(numbers[0], numbers[-1] + 1) if "_to_" in name else numbers
        tested |= set(span)
    claimed = next(numbers for numbers, tests in rows() if tests == "`a_d`")
    assert claimed <= tested, sorted(claimed - tested)
