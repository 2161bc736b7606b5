"""One process against two: python benchmarks/two_processes.py [RECIPE] [--batch 64] [--steps 40] [--turns 3]

Runs `bridle pretrain` in one process and in two (gloo), in turns, one thread each, and prints CPU seconds of all
processes per step. With two idle cores two processes are at most 2 · one / two times as fast. `--beside CLONE` also
measures two processes of another clone of bridle. The first and last rows of a run do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.timing import describe_machine, markdown_table

EVERY = 10  # steps between rows
ROOT = Path(__file__).parents[1]


def cpu_seconds(root: Path, recipe: str, *, processes: int, batch: int, steps: int) -> float:
    """CPU seconds per step of a new run, of all its processes together."""
    launch = ["launch", "--devices", str(processes), "--"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"encoder_phase.batch={batch}", f"runtime.log_every={EVERY}", "runtime.threads=1"]
        settings += ["schedule.iterations=1", "probe.enabled=false", "data.workers=0", f"max_steps={steps}"]
        words = [*launch, "pretrain", recipe, *settings, "--out", f"{folder}/run"]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "bridle", *words], env=environment, cwd=folder, capture_output=True, check=True
        )
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-2]
    return float(last["cpu_seconds"] - first["cpu_seconds"]) / (last["step"] - first["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="sounds-tiny")
    for name, default in (("batch", 64), ("steps", 40), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--beside", type=Path)
    chosen = parser.parse_args()
    cases = {"one process": (ROOT, 1), "two processes": (ROOT, 2)}
    if chosen.beside:
        cases["two processes, the other clone"] = (chosen.beside.resolve(), 2)
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(chosen.turns):
        for name, (root, processes) in cases.items():
            sizes = {"processes": processes, "batch": chosen.batch, "steps": chosen.steps}
            spent[name].append(cpu_seconds(root, chosen.recipe, **sizes))
    one = median(spent["one process"])
    rows = [[name, f"{1000 * median(all_):.1f}", f"{2 * one / median(all_):.2f}"] for name, all_ in spent.items()]
    print(markdown_table([f"{chosen.recipe}, batch {chosen.batch}", "CPU ms a step", "2 · one / it"], rows))
    print(describe_machine())


if __name__ == "__main__":
    main()
