"""Worker processes: results in order, calm under signals, gone when they are not needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from bridle.data.loading.worker_pool import in_order
from bridle.errors import DataError


def square(x: int) -> torch.Tensor:
    time.sleep(0.01 * (x % 3))  # results do not become ready in order
    return torch.tensor(x * x)


def die(x: int) -> int:
    if x == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return x


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert [int(x) for x in in_order(square, range(10), workers=workers)] == [x * x for x in range(10)]


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(in_order(square, range(3), workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_endless_stream_can_be_left_and_leaves_no_process() -> None:
    def count() -> Iterator[int]:
        x = 0
        while True:
            yield x
            x += 1

    before = set(multiprocessing.active_children())
    results = in_order(square, count(), workers=2)
    assert [int(next(results)) for _ in range(3)] == [0, 1, 4]
    assert len(set(multiprocessing.active_children()) - before) == 2
    results.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= before


def test_a_killed_worker_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"a data worker died .* Use fewer data workers"):
        list(in_order(die, range(6), workers=1))


SCRIPT = """
import os, signal, sys, time
import torch
from bridle.data.loading.worker_pool import in_order

def work(x):
    time.sleep(0.05)
    return x

def note(signum, frame):
    told.append(signum)

told = []
signal.signal(signal.SIGTERM, note)
results = in_order(work, iter(range(1000)), workers=2)
next(results)
"""

GOES_ON = """
os.killpg(os.getpgid(0), signal.SIGTERM)  # as a scheduler does: everybody is told at once
assert [next(results) for _ in range(20)] == list(range(1, 21))
assert told == [signal.SIGTERM]
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
import multiprocessing
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(rest: str, *, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script + rest]
    return subprocess.run(command, start_new_session=True, timeout=60, capture_output=True, text=True, check=False)


def test_workers_go_on_after_a_sigterm_to_the_whole_group() -> None:
    done = run(GOES_ON)
    assert (done.returncode, done.stderr) == (43, "")


def test_leaving_in_the_middle_neither_hangs_nor_complains() -> None:
    done = run(LEAVES_SUDDENLY)
    assert (done.returncode, done.stderr) == (44, "")


def test_workers_of_a_killed_run_go_away() -> None:
    done = run(IS_KILLED, script=SCRIPT.replace("time.sleep(0.05)", "time.sleep(60 * min(x, 1))"))  # busy ones, too
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


def test_without_room_in_shared_memory_results_come_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(storage: object, *args: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", full)
    found = list(in_order(lambda x: [square(x), (None, square(x + 1))], range(3), workers=1))
    assert found == [[torch.tensor(x * x), (None, torch.tensor((x + 1) ** 2))] for x in range(3)]
