"""Failpoints: off by default, named, countable, and each firing leaves a line."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import bridle
from bridle import failpoints

PACKAGE = Path(bridle.__file__).parent


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_nothing_happens_unless_it_is_asked_for() -> None:
    assert failpoints.armed is None
    assert not failpoints.hit("step.begin")


def test_the_nth_passage_fires_once_and_is_logged(tmp_path: Path) -> None:
    failpoints.arm("step.loss@3=nan", log=str(tmp_path / "log"))
    assert [failpoints.hit("step.loss") for _ in range(5)] == [False, False, True, False, False]
    assert (tmp_path / "log").read_text() == "step.loss@3=nan\n"


def test_a_plus_fires_from_then_on(tmp_path: Path) -> None:
    failpoints.arm("step.loss@2+=nan;step.begin=nan", log=str(tmp_path / "log"))
    assert [failpoints.hit("step.loss") for _ in range(4)] == [False, True, True, True]
    assert (tmp_path / "log").read_text().splitlines() == ["step.loss@2+=nan"] * 3


def test_what_the_log_holds_does_not_fire_again_in_the_next_process(tmp_path: Path) -> None:
    for expected in (True, False):
        failpoints.arm("step.loss=nan", log=str(tmp_path / "log"))  # as a new process would
        assert failpoints.hit("step.loss") == expected


def test_actions_do_what_they_say(tmp_path: Path) -> None:
    failpoints.arm("step.begin=enospc")
    with pytest.raises(OSError, match="No space left"):
        failpoints.hit("step.begin")
    for action, code in (("kill", -signal.SIGKILL), ("sigterm", -signal.SIGTERM), ("exit", failpoints.EXIT_CODE)):
        child = os.fork()
        if child == 0:
            failpoints.arm(f"step.begin={action}", log=str(tmp_path / action))
            failpoints.hit("step.begin")
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        assert (tmp_path / action).read_text() == f"step.begin={action}\n"


@pytest.mark.parametrize("text", ["step.bgin=kill", "step.begin@0=kill", "step.begin=explode", "step.begin"])
def test_a_wrong_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="BRIDLE_FAILPOINTS"):
        failpoints.arm(text)


def test_every_name_in_the_table_is_in_the_code_and_the_other_way_round() -> None:
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            used |= {
                ast.literal_eval(argument)
                for argument in node.args
                if name == "failpoints.hit" and isinstance(argument, ast.Constant)
            }
            used |= {ast.literal_eval(k.value) for k in node.keywords if k.arg == "failpoint" and name == "append_row"}
    assert used == set(failpoints.POINTS)
