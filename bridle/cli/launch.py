"""`bridle launch`: several processes on one machine, on several machines, or through Slurm."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bridle.cli.app import TRAIN, app
from bridle.console import json_output
from bridle.errors import UsageError


@app.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False}, rich_help_panel=TRAIN
)
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="A bridle command, after --.")],
    devices: Annotated[
        int | None, typer.Option(min=1, help="Processes per machine; default: one per GPU (required with --slurm).")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this machine, from 0.")] = 0,
    rendezvous: Annotated[str | None, typer.Option(help="HOST:PORT of machine 0; needed with --nodes.")] = None,
    slurm: Annotated[str | None, typer.Option(help="Submit a Slurm job: partition=…,account=…,time=…")] = None,
    logs: Annotated[Path, typer.Option(help="Shared folder for the output of a Slurm job.")] = Path("slurm"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command or script and do not run it.")] = False,
) -> None:
    """Run a command in several processes: on this machine, on several machines, or as a Slurm job.

    Example:  bridle launch --devices 2 -- pretrain digits-tiny --out runs/digits
    """
    from bridle.grid import launch as launching

    if command[0] == "launch":
        raise UsageError("launch cannot launch itself; give the command to run, such as pretrain.")
    if slurm is not None:
        if rendezvous is not None or node_rank:
            raise UsageError("--slurm finds --rendezvous and --node-rank by itself; leave them out.")
        if devices is None:  # this is a login node: its GPUs say nothing of those of the job
            raise UsageError("--slurm needs --devices: how many GPUs (or, on CPUs, processes) each node is to use.")
        gpus = "runtime.device=cpu" not in command
        settings = launching.slurm_settings(slurm, launching.Topology(devices, nodes), gpus=gpus)
        task = launching.SlurmTask(devices=devices, nodes=nodes, command=command)
        if dry_run:
            script = launching.slurm_script(task, settings, logs)
            json_output.result("launch", script=script)
            typer.echo(script)
            return
        number = launching.submit(task, settings, logs)
        json_output.result("launch", job=number, logs=logs)
        typer.echo(f"job {number} is queued; it saves and is queued again when Slurm takes its nodes back.")
        typer.echo(f"Next:  tail -f {logs}/{number}_0_log.err   ·   scancel {number}")
        return
    topology = launching.checked_topology(devices=devices, nodes=nodes, node_rank=node_rank, rendezvous=rendezvous)
    if dry_run:
        script = shlex.join(["torchrun", *launching.torchrun_arguments(topology, command)])
        json_output.result("launch", script=script)
        typer.echo(script)
        return
    launching.run_local(topology, command)
