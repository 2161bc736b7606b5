"""`bridle launch`: run a command in several processes, on this machine, on several machines, or as a Slurm job.

torchrun starts and watches the processes of one machine; a Slurm job runs one torchrun per node. This module builds the
arguments, and turns the outcome into one line and an exit code.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote
from typing import Any, NamedTuple

from bridle.errors import BridleError, UsageError, quoted
from bridle.machine import usable_cores

# Keys of --slurm, and submitit's names for them.
SLURM_KEYS = {key: key for key in ("partition", "account", "time", "qos", "constraint", "mem")}
SLURM_KEYS |= {"cpus": "cpus_per_task", "name": "job_name"}
SIGNAL_SECONDS = 120  # from Slurm's warning to the end of the job: time for one step and a checkpoint
MOST_TIMEOUTS = 1000  # how often a job that runs out of time is queued again
FIRST_PORT, PORTS = 20000, 20000


class Topology(NamedTuple):
    """How many processes run on how many machines, and which machine this is."""

    devices: int  # processes on each machine
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None  # HOST:PORT of machine 0; needed with several machines


class LaunchError(BridleError):
    """A process of the launched command failed and has printed the reason."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def checked_topology(*, devices: int | None, nodes: int, node_rank: int, rendezvous: str | None) -> Topology:
    """The topology that the options describe; UsageError if they contradict each other. Default: a process per GPU."""
    if nodes > 1 and rendezvous is None:
        raise UsageError("--nodes needs --rendezvous HOST:PORT, the same on every machine: a name of machine 0.")
    address = re.fullmatch(r"[^:\s]+:(\d{1,5})", rendezvous or "node0:29500")
    if address is None or not 0 < int(address[1]) < 2**16:
        raise UsageError(f"--rendezvous {quoted(rendezvous)}: expected HOST:PORT, such as node0:29500.")
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank}: with --nodes {nodes} it goes from 0 to {nodes - 1}.")
    if devices is None:
        import torch

        devices = max(1, torch.cuda.device_count())
    return Topology(devices, nodes, node_rank, rendezvous)


def torchrun_arguments(topology: Topology, command: Sequence[str]) -> list[str]:
    """Arguments of torchrun for one machine."""
    if topology.rendezvous is None:
        where = ["--standalone"]
    else:
        host, port = topology.rendezvous.split(":")
        where = ["--nnodes", str(topology.nodes), "--node-rank", str(topology.node_rank)]
        where += ["--master-addr", host, "--master-port", port]
    return [*where, "--nproc-per-node", str(topology.devices), "-m", "bridle", *command]


def run_local(topology: Topology, command: Sequence[str]) -> None:
    """Start the processes of this machine and wait for them; LaunchError has the exit code of the first that failed."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its long messages are replaced below
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // topology.devices)))
    try:
        torchrun.run(torchrun.parse_args(torchrun_arguments(topology, command)))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        raise first_failure(rank, failure.exitcode) from failed
    except SignalException as stopped:
        raise LaunchError("stopped; run the same command again to continue.", exit_code=128 + stopped.sigval) from None
    except (DistError, RendezvousError) as error:
        where = f"at {topology.rendezvous} (--rendezvous)" if topology.rendezvous else "on this machine"
        raise UsageError(
            f"the processes cannot meet {where}: {quoted(str(error).splitlines()[0], 200)}. Machine 0 must be running, "
            "with the port free and reachable from the others; try another port, or check the firewall."
        ) from error


def first_failure(rank: int, code: int) -> LaunchError:
    """The error for the first process that failed; a signal becomes exit code 128 + its number."""
    if code < 0:
        name = signal.Signals(-code).name
        return LaunchError(f"rank {rank} was killed first, by {name}; the others were stopped.", exit_code=128 - code)
    return LaunchError(f"rank {rank} failed first, with exit code {code}; its error is above.", exit_code=code)


# --- Slurm -----------------------------------------------------------------------------------------------------------


def slurm_settings(text: str, topology: Topology, *, gpus: bool) -> dict[str, Any]:
    """`partition=gpu,account=abc,time=24:00:00` as parameters of submitit."""
    settings: dict[str, Any] = {"job_name": "bridle", "time": 24 * 60}
    for pair in text.split(","):
        key, equals, value = pair.strip().partition("=")
        if not equals or not value or key not in SLURM_KEYS:
            raise UsageError(f"--slurm {quoted(pair)}: expected KEY=VALUE with KEY one of {', '.join(SLURM_KEYS)}.")
        if key == "cpus" and not re.fullmatch(r"[1-9]\d*", value):
            raise UsageError(f"--slurm cpus={quoted(value)}: expected a number of cores.")
        settings[SLURM_KEYS[key]] = minutes(value) if key == "time" else int(value) if key == "cpus" else value
    settings |= {"nodes": topology.nodes, "ntasks_per_node": 1, "signal_delay_s": SIGNAL_SECONDS}
    return settings | ({"gpus_per_node": topology.devices} if gpus else {})


def minutes(text: str) -> int:
    """Minutes of a Slurm time limit: minutes, H:M:S or D-H:M:S."""
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):(\d\d):(\d\d)|(\d+))", text)
    if found is None:
        raise UsageError(f"--slurm time={quoted(text)}: expected minutes, H:MM:SS or D-H:MM:SS.")
    days, hours, mins, seconds, only = (int(part or 0) for part in found.groups())
    return max(1, only + days * 1440 + hours * 60 + mins + (seconds > 0))


class SlurmTask:
    """What each node of a Slurm job runs: one `bridle launch`. When preempted it saves, and the job is queued again."""

    def __init__(self, *, devices: int, nodes: int, command: Sequence[str]) -> None:
        self.devices, self.nodes, self.command = devices, nodes, list(command)

    def __call__(self) -> None:
        import submitit

        job = submitit.JobEnvironment()
        port = FIRST_PORT + int(re.sub(r"\D", "", job.raw_job_id) or 0) % PORTS
        self.wait_for(self.arguments(node=job.node, host=job.hostnames[0], port=port))

    def arguments(self, *, node: int, host: str, port: int) -> list[str]:
        """The command line of one node."""
        words = [sys.executable, "-m", "bridle", "launch", "--devices", str(self.devices)]
        if self.nodes > 1:
            words += ["--nodes", str(self.nodes), "--node-rank", str(node), "--rendezvous", f"{host}:{port}"]
        return [*words, "--", *self.command]

    def wait_for(self, arguments: Sequence[str]) -> None:
        """Run a command; LaunchError if it fails."""
        # A large checkpoint may take longer than the 30 seconds that torchrun grants.
        grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SIGNAL_SECONDS - 30)}
        self.child = subprocess.Popen(arguments, env={**os.environ, **grace})
        while self.child.poll() is None:  # not wait(): `checkpoint` polls too, from a signal handler
            time.sleep(0.5)
        if self.child.returncode:
            raise LaunchError(f"the command ended with {self.child.returncode}.", exit_code=self.child.returncode)

    def checkpoint(self) -> Any:
        """Called by submitit on preemption or timeout: let the command save and end, and submit the same task again."""
        from submitit.helpers import DelayedSubmission

        self.child.terminate()
        until = time.monotonic() + SIGNAL_SECONDS - 20
        while self.child.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
        return DelayedSubmission(SlurmTask(devices=self.devices, nodes=self.nodes, command=self.command))


def slurm_script(task: SlurmTask, settings: Mapping[str, Any], logs: Path) -> str:
    """The sbatch script that `submit` would submit."""
    # submitit's executor cannot be created where there is no Slurm, which is where people try a dry run first.
    text: str = _submitit().slurm.slurm._make_sbatch_string(
        command=f"{quote(sys.executable)} -u -m submitit.core._submit {quote(str(logs))}", folder=logs, **settings
    )
    return f"{text}\n# each node runs: python {join(task.arguments(node=0, host='NODE0', port=FIRST_PORT)[1:])}\n"


def submit(task: SlurmTask, settings: Mapping[str, Any], logs: Path) -> str:
    """Submit the job; returns its id."""
    submitit = _submitit()
    try:
        executor = submitit.SlurmExecutor(folder=logs, max_num_timeout=MOST_TIMEOUTS)
    except RuntimeError as error:
        raise UsageError(f"no Slurm on this machine ({error}); use a login node, or --dry-run.") from error
    executor.update_parameters(**settings)
    try:
        return str(executor.submit(task).job_id)
    except submitit.core.utils.FailedJobError as error:
        raise UsageError(f"Slurm refused the job: {quoted(error, 300)}") from error


def _submitit() -> Any:
    try:
        import submitit.slurm.slurm
    except ImportError:
        raise UsageError('--slurm needs submitit: pip install "bridle[cluster]"') from None
    return submitit
