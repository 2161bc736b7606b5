"""`bridle demo`: the whole method on embedded data, VQ beside RQ, for three modalities, with a table and a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bridle import api
from bridle.config import Config, load_config
from bridle.report.page import read_run, write_report
from bridle.report.terminal import results_table

MODALITIES = {"image": "digits-tiny", "video": "moving-digits-tiny", "audio": "sounds-tiny"}


def demo_configs(modality: str, *, seed: int) -> dict[str, Config]:
    """VQ and RQ with the same total number of codes, everything else equal."""
    rq = load_config(MODALITIES[modality], [f"seed={seed}"])
    total = sum(rq.quantizer.sizes)
    vq = load_config(MODALITIES[modality], [f"seed={seed}", "quantizer.codebooks=1", f"quantizer.codes={total}"])
    return {"vq": vq, "rq": rq}


def run_demo(modalities: Sequence[str], *, seed: int, out: Path) -> Path:
    """Run the demo, print the table, write the report; an interrupted demo continues where it was."""
    console = Console(highlight=False)
    began = time.perf_counter()
    runs = []
    for modality in modalities:
        for method, config in demo_configs(modality, seed=seed).items():
            folder = out / f"{modality}-{method}"
            console.rule(f"{modality} · {method.upper()}", align="left")
            api.pretrain(config, out=folder, command=f"bridle demo --modality {modality} --seed {seed}")
            runs.append(folder)
    summaries = [read_run(run) for run in runs]
    table = results_table(summaries)
    if table is not None:
        console.print()
        console.print(table)
    page = write_report(summaries, out / "report.html", title="bridle demo")
    minutes = (time.perf_counter() - began) / 60
    console.print(
        f"\nSeed {seed}, {minutes:.1f} minutes. Accuracy: linear probe on test data; CUR: share of codes used;"
    )
    console.print("ECU: CUR × entropy / log K, over the whole training set. One seed: small gaps mean nothing.")
    console.print(f"wrote {page}  (open it in a browser)")
    console.print("Next:  bridle recipes   ·   bridle pretrain image data.root=YOUR_FOLDER --out runs/mine")
    return page
