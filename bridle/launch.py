"""`bridle launch`: the same command in several processes, on this machine, on several, or through Slurm.

torch's own agent (torchrun) starts and watches the processes of one machine. Here its arguments are put together, its
outcome becomes one line and an exit code, and a Slurm job runs one agent a node.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridle.errors import BridleError, UsageError, quoted
from bridle.machine import usable_cores

# What --slurm takes, and the name submitit has for it.
SLURM_KEYS = {
    "partition": "partition",
    "account": "account",
    "time": "time",
    "qos": "qos",
    "constraint": "constraint",
    "mem": "mem",
    "cpus": "cpus_per_task",
    "name": "job_name",
}
SIGNAL_SECONDS = 120  # between Slurm's warning and the end of the job: time for one step and a checkpoint
MOST_TIMEOUTS = 1000  # a job that runs out of time is queued again this often
FIRST_PORT, PORTS = 20000, 20000


class Place(NamedTuple):
    """Where the processes run."""

    devices: int  # processes on each machine
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None  # HOST:PORT of machine 0; needed with several


class LaunchError(BridleError):
    """A process that was started here failed; it has said why."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def default_devices() -> int:
    """One process for each GPU; one on a machine without."""
    import torch

    return max(1, torch.cuda.device_count())


def make_place(*, devices: int | None, nodes: int, node_rank: int, rendezvous: str | None) -> Place:
    """Check that the numbers fit together."""
    if nodes > 1 and rendezvous is None:
        raise UsageError("--nodes needs --rendezvous HOST:PORT, the same on every machine: a name of machine 0.")
    address = re.fullmatch(r"[^:\s]+:(\d{1,5})", rendezvous or "node0:29500")
    if address is None or not 0 < int(address[1]) < 2**16:
        raise UsageError(f"--rendezvous {quoted(rendezvous)}: expected HOST:PORT, such as node0:29500.")
    if not 0 <= node_rank < nodes:
        raise UsageError(f"--node-rank {node_rank}: with --nodes {nodes} it goes from 0 to {nodes - 1}.")
    return Place(devices or default_devices(), nodes, node_rank, rendezvous)


def torchrun_arguments(place: Place, command: Sequence[str]) -> list[str]:
    """What torchrun is told."""
    if place.rendezvous is None:
        where = ["--standalone"]
    else:
        host, port = place.rendezvous.split(":")
        where = ["--nnodes", str(place.nodes), "--node-rank", str(place.node_rank)]
        where += ["--master-addr", host, "--master-port", port]
    return [*where, "--nproc-per-node", str(place.devices), "-m", "bridle", *command]


def torchrun_line(place: Place, command: Sequence[str]) -> str:
    """The same as a line for a shell."""
    return shlex.join(["torchrun", *torchrun_arguments(place, command)])


def run_here(place: Place, command: Sequence[str]) -> None:
    """Start the processes of this machine and wait for them; the exit code of the first that failed is raised."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it tells is told below, shorter
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // place.devices)))
    try:
        torchrun.run(torchrun.parse_args(torchrun_arguments(place, command)))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        raise failure_of(rank, failure.exitcode) from failed
    except SignalException as stopped:
        raise LaunchError("stopped; run the same command again to continue.", exit_code=128 + stopped.sigval) from None
    except (DistError, RendezvousError) as error:
        raise no_meeting(place, error) from error


def failure_of(rank: int, code: int) -> LaunchError:
    """The end of the first process that failed, with the exit code it gives the whole; a signal counts 128 + number."""
    if code < 0:
        name = signal.Signals(-code).name
        return LaunchError(f"rank {rank} was ended first, by {name}; the others were stopped.", exit_code=128 - code)
    return LaunchError(f"rank {rank} ended first, with exit code {code}; why is said above.", exit_code=code)


def no_meeting(place: Place, error: Exception) -> UsageError:
    """The agents did not find each other; torch has no better word for it than which socket failed how."""
    where = "on this machine" if place.rendezvous is None else f"at {place.rendezvous} (--rendezvous)"
    return UsageError(
        f"the processes cannot meet {where}: {quoted(str(error).splitlines()[0], 200)}. Machine 0 must be up, its port "
        "free there and reachable from the others; try another port, look at the firewall."
    )


# --- Slurm -----------------------------------------------------------------------------------------------------------


def slurm_settings(text: str, place: Place, *, gpus: bool) -> dict[str, Any]:
    """`partition=gpu,account=abc,time=24:00:00` as submitit wants it."""
    settings: dict[str, Any] = {"job_name": "bridle", "time": 24 * 60}
    for pair in text.split(","):
        key, equals, value = pair.strip().partition("=")
        if not equals or not value or key not in SLURM_KEYS:
            raise UsageError(f"--slurm {quoted(pair)}: expected KEY=VALUE with KEY one of {', '.join(SLURM_KEYS)}.")
        if key == "cpus" and not re.fullmatch(r"[1-9]\d*", value):
            raise UsageError(f"--slurm cpus={quoted(value)}: expected a number of cores.")
        settings[SLURM_KEYS[key]] = minutes(value) if key == "time" else int(value) if key == "cpus" else value
    settings |= {"nodes": place.nodes, "ntasks_per_node": 1, "signal_delay_s": SIGNAL_SECONDS}
    return settings | ({"gpus_per_node": place.devices} if gpus else {})


def minutes(text: str) -> int:
    """Slurm's time: minutes, H:M:S or D-H:M:S, in minutes."""
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):(\d\d):(\d\d)|(\d+))", text)
    if found is None:
        raise UsageError(f"--slurm time={quoted(text)}: expected minutes, H:MM:SS or D-H:MM:SS.")
    days, hours, mins, seconds, only = (int(part or 0) for part in found.groups())
    return max(1, only + days * 1440 + hours * 60 + mins + (seconds > 0))


class SlurmTask:
    """What each node of a Slurm job runs: one agent. Asked to make room, it lets the run save and queues it again."""

    def __init__(self, *, devices: int, nodes: int, command: Sequence[str]) -> None:
        self.devices, self.nodes, self.command = devices, nodes, list(command)

    def __call__(self) -> None:
        import submitit

        here = submitit.JobEnvironment()
        port = FIRST_PORT + int(re.sub(r"\D", "", here.raw_job_id) or 0) % PORTS
        self.wait_for(self.arguments(node=here.node, host=here.hostnames[0], port=port))

    def arguments(self, *, node: int, host: str, port: int) -> list[str]:
        words = [sys.executable, "-m", "bridle", "launch", "--devices", str(self.devices)]
        if self.nodes > 1:
            words += ["--nodes", str(self.nodes), "--node-rank", str(node), "--rendezvous", f"{host}:{port}"]
        return [*words, "--", *self.command]

    def wait_for(self, arguments: Sequence[str]) -> None:
        # A large checkpoint may take longer than the half minute that torchrun grants.
        grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SIGNAL_SECONDS - 30)}
        self.child = subprocess.Popen(arguments, env={**os.environ, **grace})
        while self.child.poll() is None:  # not wait(): `checkpoint` must be able to look, from a signal handler
            time.sleep(0.5)
        if self.child.returncode:
            raise LaunchError(f"the command ended with {self.child.returncode}.", exit_code=self.child.returncode)

    def checkpoint(self) -> Any:
        """Called by submitit when Slurm takes the node back or time is up: save, leave, and go on in a new job."""
        from submitit.helpers import DelayedSubmission

        self.child.terminate()
        until = time.monotonic() + SIGNAL_SECONDS - 20
        while self.child.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
        return DelayedSubmission(SlurmTask(devices=self.devices, nodes=self.nodes, command=self.command))


def slurm_script(task: SlurmTask, settings: Mapping[str, Any], logs: Path) -> str:
    """The sbatch script that `submit` would hand in."""
    slurm = _submitit().slurm.slurm
    # submitit's executor refuses to exist where there is no Slurm, which is where people look at a dry run first.
    text: str = slurm._make_sbatch_string(
        command=f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(logs))}",
        folder=logs,
        **settings,
    )
    return f"{text}\n# each node runs: python {shlex.join(task.arguments(node=0, host='NODE0', port=FIRST_PORT)[1:])}\n"


def submit(task: SlurmTask, settings: Mapping[str, Any], logs: Path) -> str:
    """Hand the job in; returns its number."""
    submitit = _submitit()
    try:
        executor = submitit.SlurmExecutor(folder=logs, max_num_timeout=MOST_TIMEOUTS)
    except RuntimeError as error:
        raise UsageError(f"no Slurm here ({error}); run this on a login node, or look with --dry-run.") from error
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
