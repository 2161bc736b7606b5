"""Worker processes: results in order, calm under signals, gone when they are not needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bridle.data.loading import worker_process
from bridle.data.loading.worker_pool import map_in_order
from bridle.errors import DataError
from bridle.plugins import load_plugins


def square(x: int) -> torch.Tensor:
    time.sleep(0.01 * (x % 3))  # results do not become ready in order
    return torch.tensor(x * x)


def die(x: int) -> int:
    if x == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return x


@pytest.mark.parametrize(("workers", "method"), [(0, "fork"), (1, "fork"), (2, "fork"), (2, "spawn")])
def test_results_come_in_order(workers: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_START_METHOD", method)
    assert [int(x) for x in map_in_order(square, range(10), workers=workers)] == [x * x for x in range(10)]


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(map_in_order(square, range(3), workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_endless_stream_can_be_left_and_leaves_no_process() -> None:
    def count() -> Iterator[int]:
        x = 0
        while True:
            yield x
            x += 1

    before = set(multiprocessing.active_children())
    results = map_in_order(square, count(), workers=2)
    assert [int(next(results)) for _ in range(3)] == [0, 1, 4]
    assert len(set(multiprocessing.active_children()) - before) == 2
    results.close()
    assert set(multiprocessing.active_children()) <= before


def test_a_killed_worker_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"a data worker died .* Use fewer data workers"):
        list(map_in_order(die, range(6), workers=1))


SCRIPT = """
import multiprocessing, os, signal, sys, time
from bridle.data.loading.worker_pool import map_in_order

def work(x):
    time.sleep(0.05)
    return x

def note(signum, frame):
    received.append(signum)

received = []
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, note)
    results = map_in_order(work, iter(range(1000)), workers=2)
    next(results)
"""

GOES_ON = """
    os.killpg(os.getpgid(0), signal.SIGTERM)  # as a scheduler does: everybody gets it at once
    assert [next(results) for _ in range(20)] == list(range(1, 21))
    assert received == [signal.SIGTERM]
    results.close()
    sys.exit(43)
"""

LEAVES_SUDDENLY = """
    try:
        raise ValueError("something else went wrong")
    except ValueError:
        sys.exit(44)  # the generator is still alive
"""

IS_KILLED = """
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(rest: str, folder: Path, *, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script + rest)  # a spawned worker imports it
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.run(command, start_new_session=True, timeout=120, capture_output=True, text=True, check=False)


def test_workers_go_on_after_a_sigterm_to_the_whole_group(tmp_path: Path, start_method: str) -> None:
    done = run(GOES_ON, tmp_path)
    assert (done.returncode, done.stderr) == (43, "")


def test_leaving_in_the_middle_neither_hangs_nor_complains(tmp_path: Path, start_method: str) -> None:
    done = run(LEAVES_SUDDENLY, tmp_path)
    assert (done.returncode, done.stderr) == (44, "")


def test_workers_of_a_killed_run_go_away(tmp_path: Path, start_method: str) -> None:
    busy = SCRIPT.replace("time.sleep(0.05)", "time.sleep(60 * min(x, 1))")
    done = run(IS_KILLED, tmp_path, script=busy)
    assert done.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"  # a zombie has ended
    except FileNotFoundError:
        return False


def several(x: int) -> list[object]:
    return [square(x), (None, square(x + 1))]


def test_results_larger_than_shared_memory_come_through_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "BUFFER", 8)
    found = list(map_in_order(several, range(3), workers=1))
    assert found == [[torch.tensor(x * x), (None, torch.tensor((x + 1) ** 2))] for x in range(3)]


def fail(x: int) -> int:
    if x == 2:
        raise DataError("two is no file.")
    return x


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_when_its_turn_has_come(workers: int) -> None:
    found = []
    with pytest.raises(DataError, match=r"two is no file\."):
        for x in map_in_order(fail, range(6), workers=workers):
            found.append(x)
    assert found == [0, 1]


def test_what_a_worker_cannot_send_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot send back set"):
        list(map_in_order(lambda x: {x}, range(3), workers=1))


def sum_of_squares(x: int) -> int:
    return sum(int(y) for y in map_in_order(square, range(x), workers=2))


def test_a_worker_that_maps_does_so_itself() -> None:
    assert list(map_in_order(sum_of_squares, range(4), workers=1)) == [0, 0, 1, 5]


PLUGIN = """
class Doubled:
    def __call__(self, x):
        return 2 * x
"""


def test_a_spawned_worker_imports_the_plugins_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubled_plugin.py").write_text(PLUGIN)
    monkeypatch.setenv("BRIDLE_PLUGINS", str(tmp_path / "doubled_plugin.py"))
    monkeypatch.setenv("BRIDLE_START_METHOD", "spawn")
    load_plugins()
    module = next(m for name, m in sys.modules.items() if name.endswith("doubled_plugin"))
    assert list(map_in_order(module.Doubled(), range(3), workers=1)) == [0, 2, 4]
