"""The progress line on a terminal and in a log file."""

from __future__ import annotations

import io

import pytest

from bridle import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_and_notes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    line = console.ProgressLine(stream)
    line.show("step 1 of a hundred thousand", "step 1")
    line.note("a note")
    line.show("done", "done", final=True)
    assert stream.getvalue() == "\r\x1b[2Kstep 1\r\x1b[2Ka note\n\r\x1b[2Kdone\n"


def test_in_a_log_file_states_are_rare_and_the_last_one_is_there() -> None:
    stream = io.StringIO()
    line = console.ProgressLine(stream)
    for step in range(100):
        line.show(f"step {step}", "", final=step == 99)
    assert stream.getvalue() in ("step 0\nstep 99\n", "step 99\n")


def test_only_the_first_process_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        console.ProgressLine().note(f"rank {rank}")
    assert capsys.readouterr().err == "rank 0\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3661.2, "1:01:01")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert console.clock(seconds) == text


def test_time_to_go_follows_from_what_is_done() -> None:
    assert console.eta(10, 40, 20.0) == "ETA 1:00"
