"""Two gloo processes against one: the same samples, decisions and codebooks, and nobody is left waiting."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks_worker as worker
import torch
from safetensors.torch import load_file
from torch import Tensor

from bridle import api
from bridle.errors import Interrupted
from bridle.evaluate.finetune import finetune_run
from bridle.evaluate.probe_command import knn_run
from bridle.infer.model import load

WORKER = Path(worker.__file__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
LAUNCH = [sys.executable, "-m", "bridle", "launch", "--devices", "2", "--"]
ROOT = WORKER.parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenarios in one process."""
    out = tmp_path_factory.mktemp("one")
    with worker.Recorder(out / "turns", 0).listening():
        api.pretrain("digits-tiny", out=out / "turns", overrides=worker.SMALL)
    knn_run(out / "turns", [])
    finetune_run(out / "turns", worker.FINETUNE)
    for name, settings in (("joint", worker.JOINT), ("sharded", worker.TURNS)):
        with worker.Recorder(out / name, 0).listening():
            api.pretrain("digits-tiny", out=out / name, overrides=settings)
    worker.pretrain_holes(out / "holes")
    return out


@pytest.fixture(scope="module")
def two(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in two processes that torchrun starts, and what only several can meet."""
    out = tmp_path_factory.mktemp("two")
    with pytest.raises(Interrupted), worker.Recorder(out / "before", 0).listening(worker.stop_once):
        api.pretrain("digits-tiny", out=out / "from-one", overrides=worker.NO_PROBE)
    before = tmp_path_factory.mktemp("before") / "whole"
    shutil.copytree(out, before)
    done = all_scenarios(out)
    if re.search(r"exitcode: -(6|11)\b", done.stderr):  # SIGABRT or SIGSEGV: not raised by Python code
        # Seen once in some fifty runs, "free(): unaligned chunk" while FSDP2 trained over gloo in torch 2.13; not
        # reproduced since, with checking allocators or valgrind. A second crash fails, and this one is not hidden.
        warnings.warn(f"native code crashed, all scenarios are run again: {done.stderr[-6000:]}", stacklevel=1)
        shutil.rmtree(out)
        shutil.copytree(before, out)
        done = all_scenarios(out)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def all_scenarios(out: Path) -> subprocess.CompletedProcess[str]:
    """ranks_worker.py in two processes."""
    words = [*TORCHRUN, str(out)]
    return subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)


def samples(*files: Path) -> dict[tuple[str, int], list[int]]:
    """Sample indices of every step: rows of rank 0, then of rank 1."""
    found: dict[tuple[str, int], list[int]] = {}
    for file in files:
        for key, step, indices in json.loads(file.read_text()):
            found.setdefault((key, step), []).extend(indices)
    return found


def worst(a: dict[str, Tensor], b: dict[str, Tensor], *, codebooks: bool) -> float:
    """The largest difference of codebooks, or of weights; key biases are left out, softmax takes no notice of them."""
    names = [n for n in a if ("quantizer" in n) == codebooks and a[n].is_floating_point() and "kv.bias" not in n]
    assert a.keys() == b.keys()
    assert names
    return max(float((a[n] - b[n]).abs().max()) for n in names)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["turns", "joint"])
def test_two_ranks_end_with_the_same_bits(two: Path, name: str) -> None:
    first, second = (load_file(two / name / f"rank{r}.safetensors") for r in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["turns", "joint"])
def test_two_processes_train_what_one_trains(one: Path, two: Path, name: str) -> None:
    alone, shared = (load_file(out / name / "rank0.safetensors") for out in (one, two))
    assert worst(alone, shared, codebooks=True) <= 1e-6
    assert worst(alone, shared, codebooks=False) <= 1e-3


@pytest.mark.parametrize("name", ["turns", "joint"])
def test_both_world_sizes_see_the_same_samples_in_the_same_order(one: Path, two: Path, name: str) -> None:
    alone = samples(one / name / "samples0.json")
    assert samples(two / name / "samples0.json", two / name / "samples1.json") == alone
    assert len(alone) == (60 if name == "turns" else 6)


def test_logged_figures_are_those_of_the_global_batch(one: Path, two: Path) -> None:
    for alone, shared in zip(rows(one / "turns"), rows(two / "turns"), strict=True):
        assert (alone["world_size"], shared["world_size"]) == (1, 2)
        for key in ("loss", "grad_norm", "top_share", "code_usage", "token_accuracy", "cosine"):
            if key in alone:
                assert shared[key] == pytest.approx(alone[key], abs=2e-3), (key, alone["step"])


def test_sharded_weights_learn_the_same_and_are_saved_whole(one: Path, two: Path) -> None:
    ours, theirs = (load_file(folder / "rank0.safetensors") for folder in (two / "sharded-joint", two / "joint"))
    assert worst(ours, theirs, codebooks=True) <= 1e-6
    assert worst(ours, theirs, codebooks=False) <= 1e-3
    # Interrupted in the second phase and continued, with code vectors that the optimizer moves.
    ours, theirs = (load_file(out / "sharded" / "rank0.safetensors") for out in (two, one))
    assert worst(ours, theirs, codebooks=True) <= 1e-3
    assert worst(ours, theirs, codebooks=False) <= 1e-3
    assert rows(two / "sharded")[-1]["resumed_from"] == 4
    x = torch.zeros(1, 1, 16, 16)
    assert torch.allclose(load(two / "sharded").encode(x), load(one / "sharded").encode(x), atol=1e-2)


def plain(value: Any) -> Any:
    """A result without its running time."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key != "seconds"}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def test_evaluation_by_two_ranks_finds_what_one_finds(one: Path, two: Path) -> None:
    first, second = (json.loads((out / "turns/results.json").read_text()) for out in (one, two))
    assert plain(second["baselines"]) == plain(first["baselines"])  # untrained: the same weights, so the same numbers
    for alone, shared in zip(first["evaluations"], second["evaluations"], strict=True):
        assert shared["probe"]["test_items"] == alone["probe"]["test_items"]
        assert shared["probe"]["accuracy"] == pytest.approx(alone["probe"]["accuracy"], abs=0.02)
        assert [s["tokens"] for s in shared["codebooks"]] == [s["tokens"] for s in alone["codebooks"]] == [300 * 16] * 4
    for file in ("knn.json", "finetune.json"):
        first, second = (json.loads((out / "turns" / file).read_text()) for out in (one, two))
        assert first["evaluations"]
        for alone, shared in zip(first["evaluations"], second["evaluations"], strict=True):
            kind = "finetune" if file == "finetune.json" else "probe"
            assert shared[kind]["test_items"] == alone[kind]["test_items"]
            assert shared[kind]["accuracy"] == pytest.approx(alone[kind]["accuracy"], abs=0.02)


def test_a_run_that_lacks_its_last_evaluation_gets_it_from_both_ranks(two: Path) -> None:
    first, second = (json.loads((two / f"again{r}.json").read_text()) for r in (0, 1))
    assert first == second == json.loads((two / "turns/results.json").read_text())
    assert [entry["iteration"] for entry in first["evaluations"]] == [1, 2]


def test_a_signal_to_one_rank_stops_both_after_the_same_step(two: Path) -> None:
    told = [(two / f"stopped{r}.txt").read_text() for r in (0, 1)]
    assert told[0] == told[1]
    assert told[0].startswith(f"143 stopped by SIGTERM; saved at step {worker.STOP_AT[1] + 1} of iter1-encoder")


def test_a_run_continues_on_another_number_of_processes(
    one: Path, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = samples(one / "turns" / "samples0.json")
    begun = samples(two / "to-one" / "samples0.json", two / "to-one" / "samples1.json")
    with worker.Recorder(two / "after", 0).listening():
        api.pretrain("digits-tiny", out=two / "to-one", overrides=worker.NO_PROBE)
    assert "world_size 2 -> 1" in capsys.readouterr().err
    assert begun | samples(two / "after" / "samples0.json") == whole
    grown = samples(two / "before" / "samples0.json")
    assert grown | samples(two / "from-one" / "samples0.json", two / "from-one" / "samples1.json") == whole
    assert {row["world_size"] for row in rows(two / "from-one")} == {1, 2}
    assert [row["step"] for row in rows(two / "from-one")] == [row["step"] for row in rows(one / "turns")]


def test_a_rank_that_holds_other_numbers_ends_the_run_by_name(two: Path) -> None:
    told = [(two / f"spoilt{r}.txt").read_text() for r in (0, 1)]
    assert told[0] == told[1]
    assert "iter1-encoder step 3: 'tokenizer.quantizer.stages.1.code' on rank 1" in told[0]


def test_bad_samples_of_all_ranks_are_listed_once(one: Path, two: Path) -> None:
    alone, shared = ((out / "holes/quarantine.jsonl").read_text().splitlines() for out in (one, two))
    assert len(shared) == len(set(shared))
    assert sorted(shared) == sorted(alone)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(two: Path) -> None:
    assert rows(two / "nan")[-1]["skipped"] == 3  # a loss, an input, and a gradient that went bad after the exchange
    first, second = (load_file(two / "nan" / f"rank{r}.safetensors") for r in (0, 1))
    assert all(torch.equal(first[key], second[key]) and bool(torch.isfinite(first[key]).all()) for key in first)


def started(words: list[str], **environment: str) -> tuple[int, str]:
    """Exit code and what was said; whatever hangs is ended with its children."""
    process = subprocess.Popen(
        words, env=ENVIRONMENT | environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        told = process.communicate(timeout=300)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, told


def test_a_rank_that_hangs_ends_the_job_and_is_named(tmp_path: Path) -> None:
    command = ["pretrain", "digits-tiny", *worker.SHORT, "runtime.timeout_minutes=0.1", "--out", str(tmp_path / "run")]
    code, told = started([*TORCHRUN, "step.begin@3=hang", *command])
    assert code != 0
    assert "rank 0: RankError: rank 1 died or hangs (Timed out waiting 6000ms" in told
    last = max(path.stat().st_mtime for path in (tmp_path / "run").rglob("*"))
    assert time.time() - last < 6 + 30 + 24  # what is promised, and the time that a busy machine takes to end anything


def test_launch_names_a_rank_that_is_killed_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = ["pretrain", "digits-tiny", *worker.SHORT, "runtime.checkpoint_every=1", "--out", str(tmp_path / "run")]
    fault = {"BRIDLE_FAILPOINTS": "step.begin@3=kill", "BRIDLE_FAILPOINTS_LOG": str(tmp_path / "fired.txt")}
    code, told = started([*LAUNCH, *command], **fault)
    assert code == 128 + signal.SIGKILL
    assert re.search(r"rank [01] was killed first, by SIGKILL", told)
    assert not list((tmp_path / "run/checkpoints").glob("*-end"))
    api.pretrain("digits-tiny", out=tmp_path / "run", overrides=worker.SHORT)
    assert rows(tmp_path / "run")[-1]["resumed_from"] >= 1
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_an_error_of_all_ranks_is_said_once_and_its_exit_code_passed_on() -> None:
    code, told = started([*LAUNCH, "pretrain", "nosuch"])
    assert code == 2
    assert told.count("no recipe 'nosuch'") == 1


def test_two_machines_meet_at_an_address(tmp_path: Path) -> None:
    """The guide's two terminals, on loopback."""
    found = re.findall(r"^bridle launch .* --nodes 2 .*$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE)
    assert len(found) == 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [[sys.executable, "-m", *line.replace("29500", port).split(), *worker.SHORT] for line in found]
    agents = [subprocess.Popen(line, env=ENVIRONMENT, cwd=tmp_path, start_new_session=True) for line in words]
    try:
        assert [agent.wait(timeout=300) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert {row["world_size"] for row in rows(tmp_path / "runs/nodes")} == {2}
