"""`bridle launch`: what torchrun and Slurm are told, and what is refused."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bridle.cli import app
from bridle.errors import UsageError
from bridle.grid.launch import (
    LaunchError,
    SlurmTask,
    Topology,
    checked_topology,
    first_failure,
    minutes,
    run_local,
    slurm_settings,
    torchrun_arguments,
)

ROOT = Path(__file__).parents[2]
COMMAND = ["pretrain", "digits-tiny", "--out", "a b"]


def test_one_machine_needs_no_address() -> None:
    topology = checked_topology(devices=4, nodes=1, node_rank=0, rendezvous=None)
    assert torchrun_arguments(topology, COMMAND) == ["--standalone", "--nproc-per-node", "4", "-m", "bridle", *COMMAND]


def test_every_machine_is_told_where_the_first_is_and_which_it_is() -> None:
    topology = checked_topology(devices=8, nodes=2, node_rank=1, rendezvous="node0:29500")
    told = torchrun_arguments(topology, COMMAND)
    assert told[:8] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", "node0", "--master-port", "29500"]


@pytest.mark.parametrize(
    ("nodes", "node_rank", "rendezvous", "why"),
    [
        (2, 0, None, "--rendezvous"),
        (2, 2, "a:1", "--node-rank 2"),
        (2, 0, "nowhere", "HOST:PORT"),
        (2, 0, "node0:99999", "HOST:PORT"),
        (2, 0, "node0:0", "HOST:PORT"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(nodes: int, node_rank: int, rendezvous: str | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        checked_topology(devices=1, nodes=nodes, node_rank=node_rank, rendezvous=rendezvous)


def test_a_dry_run_prints_the_command_for_a_shell() -> None:
    result = CliRunner().invoke(app, ["launch", "--devices", "2", "--dry-run", "--", *COMMAND])
    assert result.output == "torchrun --standalone --nproc-per-node 2 -m bridle pretrain digits-tiny --out 'a b'\n"


@pytest.mark.parametrize(
    ("text", "wanted"), [("90", 90), ("2:30:00", 150), ("0:00:30", 1), ("1-01:00:00", 1500), ("24:00:00", 1440)]
)
def test_slurm_times_become_minutes(text: str, wanted: int) -> None:
    assert minutes(text) == wanted


@pytest.mark.parametrize("text", ["partition", "colour=red", "time=soon", "partition=", "cpus=many"])
def test_slurm_settings_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--slurm"):
        slurm_settings(text, Topology(8, 2), gpus=True)


@pytest.mark.parametrize(
    "words",
    [
        ["--slurm", "partition=a", "--dry-run", "--", "launch", "recipes"],
        ["--", "launch", "recipes"],
        ["--slurm", "partition=a", "--rendezvous", "node0:1", "--dry-run", "--", "recipes"],
    ],
)
def test_a_launch_that_contradicts_itself_is_refused(words: list[str]) -> None:
    refused = CliRunner().invoke(app, ["launch", "--devices", "1", *words]).exception
    assert isinstance(refused, UsageError)


def test_the_gpus_of_a_login_node_are_not_taken_for_those_of_a_job() -> None:
    refused = CliRunner().invoke(app, ["launch", "--slurm", "partition=a", "--dry-run", "--", *COMMAND]).exception
    assert isinstance(refused, UsageError)
    assert "--slurm needs --devices" in str(refused)


def test_a_port_that_is_taken_is_the_users_to_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        topology = Topology(1, 2, 0, f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UsageError, match=r"cannot meet at 127\.0\.0\.1:\d+ .*address already in use"):
            run_local(topology, ["recipes"])


def test_the_slurm_script_asks_for_nodes_gpus_and_a_warning() -> None:
    pytest.importorskip("submitit", reason="the cluster extra is not installed")
    words = [
        "launch",
        "--devices",
        "8",
        "--nodes",
        "2",
        "--slurm",
        "partition=gpu,account=me,time=1:00:00",
        "--dry-run",
    ]
    result = CliRunner().invoke(app, [*words, "--", *COMMAND])
    assert result.exit_code == 0
    for line in ("--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=1", "--signal=USR2@120", "--time=60"):
        assert f"#SBATCH {line}\n" in result.output
    assert "launch --devices 8 --nodes 2 --node-rank 0 --rendezvous NODE0:20000 -- pretrain" in result.output


def test_a_job_that_must_make_room_ends_its_command_and_asks_for_the_same_again() -> None:
    pytest.importorskip("submitit", reason="the cluster extra is not installed")
    task = SlurmTask(devices=2, nodes=1, command=COMMAND)
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print(flush=True); time.sleep(60)"
    task.child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert task.child.stdout is not None
    task.child.stdout.readline()
    again = task.checkpoint()
    assert task.child.returncode == 143
    assert (again.function.command, again.function.devices) == (COMMAND, 2)


def test_a_command_that_fails_fails_the_job() -> None:
    with pytest.raises(LaunchError, match="ended with 65"):
        SlurmTask(devices=1, nodes=1, command=COMMAND).wait_for([sys.executable, "-c", "raise SystemExit(65)"])


@pytest.mark.parametrize(("code", "wanted", "words"), [(65, 65, "exit code 65"), (-9, 137, "SIGKILL")])
def test_the_first_failure_gives_the_exit_code(code: int, wanted: int, words: str) -> None:
    error = first_failure(3, code)
    assert error.exit_code == wanted
    assert "rank 3" in str(error)
    assert words in str(error)


def test_every_launch_of_the_guide_is_understood() -> None:
    lines = re.findall(r"^bridle (launch .*)$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE)
    assert len(lines) >= 7
    for line in lines:
        before, _, command = line.partition(" -- ")
        result = CliRunner().invoke(app, [*before.split(), "--dry-run", "--", *command.split()])
        assert result.exit_code == 0, line
        assert command.split()[0] in ("pretrain", "probe", "finetune")
