"""`bridle demo`: the whole method on embedded data, VQ beside RQ, for three modalities, with a table and a report.

The two runs of a modality are two ordinary `bridle pretrain` commands side by side, each on one thread: that uses two
cores fully, and shows what a user would type.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console

from bridle.config import load_config
from bridle.errors import BridleError, Interrupted
from bridle.report.page import read_run, write_report
from bridle.report.terminal import results_table

MODALITIES = {"image": "digits-tiny", "video": "moving-digits-tiny", "audio": "sounds-tiny"}


def demo_arguments(modality: str, *, seed: int) -> dict[str, list[str]]:
    """The arguments of `bridle pretrain` for VQ and RQ: the same total number of codes, everything else equal."""
    recipe = MODALITIES[modality]
    total = sum(load_config(recipe).quantizer.sizes)
    vq = ["quantizer.codebooks=1", f"quantizer.codes={total}"]
    return {"vq": [recipe, f"seed={seed}", *vq], "rq": [recipe, f"seed={seed}"]}


def run_demo(modalities: Sequence[str], *, seed: int, out: Path) -> Path:
    """Run the demo, print the table, write the report; an interrupted demo continues where it was."""
    console = Console(highlight=False)
    began = time.perf_counter()
    runs: list[Path] = []
    for modality in modalities:
        console.rule(modality, align="left")
        folders = {method: out / f"{modality}-{method}" for method in ("vq", "rq")}
        arguments = demo_arguments(modality, seed=seed)
        run_beside({method: [*arguments[method], "--out", str(folder)] for method, folder in folders.items()}, console)
        runs += folders.values()
    summaries = [read_run(run) for run in runs]
    table = results_table(summaries)
    if table is not None:
        console.print()
        console.print(table)
    page = write_report(summaries, out / "report.html", title="bridle demo")
    minutes = (time.perf_counter() - began) / 60
    console.print(
        f"\nSeed {seed}, {minutes:.1f} minutes. Accuracy: linear probe on test data ± half its 95 % interval."
    )
    console.print("CUR: share of codes used. ECU: CUR × entropy / log K. One seed: small gaps mean nothing.")
    console.print(f"wrote {page}  (open it in a browser)", soft_wrap=True, markup=False)
    console.print("Next:  bridle recipes  ·  bridle pretrain image data.root=FOLDER --out runs/mine")
    return page


def run_beside(commands: dict[str, list[str]], console: Console) -> None:
    """Run `bridle pretrain` with each list of arguments, all at once, and show what they say line by line."""
    processes = {}
    for name, arguments in commands.items():
        console.print(f"$ bridle pretrain {' '.join(arguments)}", soft_wrap=True, markup=False)
        command = [sys.executable, "-m", "bridle", "pretrain", *arguments]
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    said: dict[str, list[str]] = {name: [] for name in commands}
    readers = [
        threading.Thread(target=relay, args=(process.stderr, name, said[name], console), daemon=True)
        for name, process in processes.items()
    ]
    for reader in readers:
        reader.start()
    try:
        codes = {name: process.wait() for name, process in processes.items()}
    except KeyboardInterrupt:  # a terminal's Ctrl-C reaches the runs as well: they save and leave
        codes = {name: process.wait() for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
    for reader in readers:
        reader.join()
    for name, code in codes.items():
        if code in (130, 143):
            raise Interrupted("the demo was stopped; run the same command again to continue.", exit_code=code)
        if code:
            error = BridleError(f"{name}: {said[name][-1] if said[name] else f'exit code {code}'}")
            error.exit_code = code if code > 0 else 1
            raise error


def relay(stream: IO[str] | None, name: str, kept: list[str], console: Console) -> None:
    """Print each line under the run's name, and keep it."""
    for line in stream or ():
        kept.append(line.rstrip())
        console.print(f"{name.upper()}  {line.rstrip()}", soft_wrap=True, markup=False)
