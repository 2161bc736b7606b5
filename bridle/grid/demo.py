"""`bridle demo`: the whole method on embedded data, VQ beside RQ, for three modalities, with a table and a report.

The two runs of a modality are two ordinary `bridle pretrain` commands side by side, each on one thread: that uses two
cores fully, and shows what a user would type.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bridle.config import load_config
from bridle.data.embedded.modality import MODALITIES as EMBEDDED
from bridle.evaluate.verdict import judge_results
from bridle.grid.subprocesses import run_beside
from bridle.report.page import write_report
from bridle.report.runs import RunSummary, read_run
from bridle.report.tables import few_shot_table, results_table
from bridle.report.token_maps import gallery_of

SHOTS = (1, 5, 10)  # labels per class
MODALITIES = {modality.kind: f"{modality.name}-tiny" for modality in EMBEDDED}  # recipes


def demo_arguments(modality: str, *, seed: int) -> dict[str, list[str]]:
    """The arguments of `bridle pretrain` for VQ and RQ: the same total number of codes, everything else equal."""
    recipe = MODALITIES[modality]
    total = sum(load_config(recipe).quantizer.sizes)
    vq = ["quantizer.codebooks=1", f"quantizer.codes={total}"]
    shared = [recipe, f"seed={seed}", f"probe.shots=[{','.join(map(str, SHOTS))}]"]
    return {"vq": [*shared, *vq], "rq": shared}


def few_labels(runs: Sequence[RunSummary]) -> Iterator[Table | str | None]:
    """For each RQ run its scores with few labels, then a sentence on what it beats."""
    for run in runs:
        verdict = judge_results(run.results)
        if verdict is None or run.method != "RQ":
            continue
        table = few_shot_table(run.results)
        if table is not None:
            table.title, table.title_justify = run.title, "left"
        yield table
        yield f"{run.title}: {verdict.text}"


def run_demo(modalities: Sequence[str], *, seed: int, out: Path) -> Path:
    """Run the demo, print the table, write the report; an interrupted demo continues where it was."""
    console = Console(highlight=False)
    began = time.perf_counter()
    runs: list[Path] = []
    for modality in modalities:
        console.rule(modality, align="left")
        folders = {method: out / f"{modality}-{method}" for method in ("vq", "rq")}
        arguments = demo_arguments(modality, seed=seed)
        commands = {
            method.upper(): ["pretrain", *arguments[method], "--out", str(folder)] for method, folder in folders.items()
        }
        run_beside(commands, jobs=2, console=console)
        runs += folders.values()
    summaries = [read_run(run) for run in runs]
    for found in (results_table(summaries), *few_labels(summaries)):
        if found is not None:
            console.print()
            console.print(found)
    pictured = [summary._replace(gallery=gallery_of(run)) for summary, run in zip(summaries, runs, strict=True)]
    page = write_report(pictured, out / "report.html", title="bridle demo")
    minutes = (time.perf_counter() - began) / 60
    console.print(
        f"\nSeed {seed}, {minutes:.1f} minutes. Accuracy: linear probe on test data ± half its 95 % interval."
    )
    console.print("CUR: share of codes used. ECU: CUR × entropy / log K. One seed: small gaps mean nothing.")
    console.print(f"wrote {page}  (open it in a browser)", soft_wrap=True, markup=False)
    console.print("Next:  bridle recipes  ·  bridle pretrain image data.root=FOLDER --out runs/mine")
    return page
