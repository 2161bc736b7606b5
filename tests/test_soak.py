"""The long tests count right: what failed, what was skipped, what was done before, and how long it took."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import exports, faults
from soak.__main__ import CONTAINED, HOSTILES, RANKS
from soak.suites import ROOT, read_junit
from soak.tally import Ledger, Tally, case, clock, judged

from bridle import failpoints

JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="a" name="test_one" time="1.5"/>
<testcase classname="a" name="test_two" time="0.5"><failure message="assert 1 == 2"/></testcase>
<testcase classname="a" name="test_three" time="0.0"><skipped message="no such thing here"/></testcase>
<testcase classname="a" name="test_rank" time="2.0"><error message="boom"/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_by_area_and_skipped_ones_are_not_tried(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(JUNIT)
    found = read_junit(tmp_path / "x.xml", lambda test: "ranks" if "rank" in test else "others")
    assert found == {
        "others": Tally(2, 1, ["a.test_two: 'assert 1 == 2'"], 2.0, ("a.test_three",)),
        "ranks": Tally(1, 0, ["a.test_rank: 'boom'"], 2.0),
    }


def test_the_table_adds_up_and_a_second_command_knows_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks() -> Tally:
        raise ValueError("no")

    cases = [
        case("a", "1", lambda: Tally(10, 9, ["seed 3"])),
        case("a", "2", lambda: judged([])),
        case("b", "1", breaks),
    ]
    first = Ledger(tmp_path, scale=1)
    for one in cases:
        first.try_one(one, names={one.name for one in cases})
    assert "   2 of 3, 0:00, failed so far: 1   1/1" in capsys.readouterr().out
    again = Ledger(tmp_path, scale=1)
    assert again.finished == {"a: 1", "a: 2", "b: 1"}
    lines = again.table(["a", "b", "c"]).splitlines()
    assert lines[2:6] == ["| a | 11 | 10 | 0 |", "| b | 1 | 0 | 0 |", "| c | 0 | 0 | 0 |", "| all | 12 | 10 | 0 |"]
    assert lines[-2:] == ["- failed: seed 3", "- failed: b: 1: ValueError: no"]
    assert Ledger(tmp_path, scale=0.1).finished == set()  # a tenth of everything is another experiment


def test_every_failpoint_has_its_place_in_the_long_tests() -> None:
    tried = {point for points in (*faults.POINTS.values(), *exports.POINTS.values()) for point in points}
    elsewhere = {"quarantine.append", "sample.load"}  # in soak/media.py, and in test_reliability_containment.py
    assert tried | set(faults.SPOILT) | elsewhere == set(failpoints.POINTS)


def test_the_files_of_ordinary_tests_that_it_runs_are_there() -> None:
    assert [file for file in (*RANKS, *HOSTILES, *CONTAINED) if not (ROOT / file).is_file()] == []


def test_clock() -> None:
    assert [clock(seconds) for seconds in (7, 67, 3727)] == ["0:07", "1:07", "1:02:07"]
