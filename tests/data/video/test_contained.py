"""Calls in a child process: answers come back, and whatever happens to the process costs one call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bridle.data.loading.worker_pool import in_order
from bridle.data.video import contained
from bridle.data.video.contained import Answer, Contained, ContainedError, CrashError, RefusedError, SlowError
from bridle.data.video.source import DECODER

PROGRAM = """
import ctypes, os, signal, sys, time
import numpy as np

poisoned = []

def answer(**facts):
    return {"pid": os.getpid(), **facts}, np.arange(3, dtype=np.uint8)

def square(numbers):
    yield {"count": len(numbers)}, np.array(numbers, dtype=np.uint8)[:, None] ** 2

def who():
    yield answer()

def refuse(text):
    raise ValueError(text)
    yield

def hang():
    while True:
        ctypes.CDLL(None).sleep(100)  # in C: a Python signal handler would have to wait
    yield

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
    yield

def leave():
    os._exit(3)
    yield

def poison():
    poisoned.append(1)
    yield answer()

def stumble():
    if poisoned:
        os.kill(os.getpid(), signal.SIGSEGV)
    yield answer()

def devour():
    yield {}, np.ones(6 * 2**30, dtype=np.uint8)

def babble():
    os.write(int(sys.argv[1]), b"\\x05\\x00\\x00\\x00hello")
    yield answer()

def awkward():
    yield {}, np.arange(6, dtype=np.uint8).reshape(2, 3).T

def count(to, fail=False):
    for number in range(to):
        yield answer(number=number)
    if fail:
        raise ValueError("no more")
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Contained]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    yield Contained(file)
    contained.close_idle()


def pid_of(program: Contained) -> int:
    return int(program.call("who", timeout=20).facts["pid"])


def is_gone(pid: int, *, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # ended; whoever inherited it has not looked yet
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def test_an_answer_is_facts_and_an_array(program: Contained) -> None:
    answer = program.call("square", timeout=20, numbers=[1, 2, 15])
    assert answer.facts == {"count": 3}
    assert answer.array.tolist() == [[1], [4], [225]]


def test_one_process_serves_all_calls(program: Contained) -> None:
    assert pid_of(program) == pid_of(program) != os.getpid()


def test_a_refusal_is_told_and_the_process_goes_on(program: Contained) -> None:
    pid = pid_of(program)
    with pytest.raises(RefusedError, match=r"^it is empty$"):
        program.call("refuse", timeout=20, text="it is empty")
    assert pid_of(program) == pid


def test_a_call_that_hangs_ends_in_time_and_the_next_one_works(program: Contained) -> None:
    pid = pid_of(program)
    began = time.monotonic()
    with pytest.raises(SlowError, match=r"took longer than 0\.3 s"):
        program.call("hang", timeout=0.3)
    assert time.monotonic() - began < 15
    assert is_gone(pid, within=10)
    assert pid_of(program) != pid


def test_a_crash_names_its_signal_and_the_next_call_works(program: Contained) -> None:
    with pytest.raises(CrashError, match=r"crashed \(SIGSEGV\)"):
        program.call("crash", timeout=20)
    assert pid_of(program) > 0
    with pytest.raises(CrashError, match=r"ended by itself \(code 3\)"):
        program.call("leave", timeout=20)


def test_a_crash_that_an_earlier_call_prepared_is_not_blamed_on_this_one(program: Contained) -> None:
    pid = int(program.call("poison", timeout=20).facts["pid"])
    assert program.call("stumble", timeout=20).facts["pid"] != pid


def test_memory_is_bounded(program: Contained) -> None:
    pid = pid_of(program)
    with pytest.raises(RefusedError, match="more memory than a file may take"):
        program.call("devour", timeout=20)
    assert pid_of(program) == pid


def test_nonsense_from_the_process_is_an_error(program: Contained) -> None:
    with pytest.raises(ContainedError, match="nonsense"):
        program.call("babble", timeout=20)
    assert pid_of(program) > 0


def test_an_answer_that_cannot_be_sent_is_an_error_at_once(program: Contained) -> None:
    with pytest.raises(RefusedError, match="TypeError"):
        program.call("awkward", timeout=20)


def test_a_program_that_does_not_start_says_why(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module\n")
    with pytest.raises(ContainedError, match="no_such_module"):
        Contained(file).call("who", timeout=20)


def test_answers_are_streamed_one_by_one(program: Contained) -> None:
    answers = list(program.stream("count", timeout=20, to=5))
    assert [answer.facts["number"] for answer in answers] == [0, 1, 2, 3, 4]
    numbers = []
    with pytest.raises(RefusedError, match="no more"):
        numbers.extend(answer.facts["number"] for answer in program.stream("count", timeout=20, to=2, fail=True))
    assert pid_of(program) == answers[0].facts["pid"]


def test_a_call_in_the_middle_of_a_stream_has_a_process_of_its_own(program: Contained) -> None:
    stream = program.stream("count", timeout=20, to=3)
    first = next(stream).facts["pid"]
    assert pid_of(program) != first
    assert [answer.facts["number"] for answer in stream] == [1, 2]


def test_a_stream_that_is_given_up_leaves_nothing_behind(program: Contained) -> None:
    stream = program.stream("count", timeout=20, to=10_000_000)
    pid = next(stream).facts["pid"]
    del stream
    assert is_gone(pid, within=2)


def square_in_child(task: tuple[Path, int]) -> Answer:
    file, number = task
    return Contained(file).call("square", timeout=20, numbers=[number])


def test_worker_processes_have_children_of_their_own(program: Contained) -> None:
    pid = pid_of(program)  # the main process has one before it forks
    found = in_order(square_in_child, [(program.program, n) for n in range(6)], workers=2)
    assert [int(answer.array[0, 0]) for answer in found] == [n * n for n in range(6)]
    assert pid_of(program) == pid


@pytest.mark.parametrize(("function", "within"), [("who", 2.0), ("hang", 6.0)])
def test_a_child_ends_with_its_parent_even_while_it_hangs(program: Contained, function: str, within: float) -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.write(write, str(pid_of(program)).encode())
        program.call(function, timeout=0.5)
        time.sleep(60)
    pid = int(os.read(read, 20))
    time.sleep(0.2)  # let it begin to hang
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert is_gone(pid, within=within)


def test_the_decoder_program_starts_without_torch() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code, str(DECODER)], check=False).returncode == 0


def test_an_array_beyond_the_limit_is_refused(program: Contained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contained, "LARGEST", 2)
    with pytest.raises(ContainedError, match="larger than"):
        program.call("who", timeout=20)
    monkeypatch.setattr(contained, "LARGEST", 3)
    assert program.call("who", timeout=20).array.dtype == np.uint8
