"""`bridle demo`: what pretraining is worth with few labels, on embedded data of three modalities, VQ beside RQ.

The two runs of a modality are two ordinary `bridle pretrain` commands side by side, each on one thread: that uses two
cores fully, and shows what a user would type.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bridle.config import load_config
from bridle.console import json_output, plain_table
from bridle.data.embedded.modality import MODALITIES as EMBEDDED
from bridle.evaluate.verdict import comparisons, sentence
from bridle.grid.run_lines import RunLines
from bridle.grid.subprocesses import run_beside
from bridle.report.page import write_report
from bridle.report.runs import RunSummary, read_run
from bridle.report.tables import baselines_of, models_of, score_text, stages_text, with_spread
from bridle.report.token_maps import gallery_of
from bridle.runs.results import Scores

SHOTS = (1, 5, 10)  # labels per class
JUDGED = (5, 10)  # those that the sentence below a table is about
SETS = ("patterns", "moving-patterns", "sounds")
MODALITIES = {modality.kind: f"{modality.name}-tiny" for modality in EMBEDDED if modality.name in SETS}  # recipes
QUICK = next(iter(MODALITIES))  # the pictures


def demo_arguments(modality: str, *, seed: int) -> dict[str, list[str]]:
    """The arguments of `bridle pretrain` for VQ and RQ: the same total number of codes, everything else equal."""
    recipe = MODALITIES[modality]
    total = sum(load_config(recipe).quantizer.sizes)
    vq = ["quantizer.codebooks=1", f"quantizer.codes={total}"]
    shared = [recipe, f"seed={seed}", f"probe.shots=[{','.join(map(str, SHOTS))}]"]
    return {"vq": [*shared, *vq], "rq": shared}


def run_pair(modality: str, *, seed: int, out: Path, console: Console) -> list[RunSummary]:
    """Train VQ and RQ side by side, or continue them; their output goes to out/*.log."""
    methods = demo_arguments(modality, seed=seed)
    names = {method: f"{modality} {method.upper()}" for method in methods}
    folders = {method: out / f"{modality}-{method}" for method in methods}
    commands = {names[method]: ["pretrain", *methods[method], "--out", str(folders[method])] for method in methods}
    logs = {names[method]: folders[method].with_suffix(".log") for method in methods}
    with RunLines(console, logs) as lines:
        run_beside(commands, jobs=2, console=console, spent=lines.spent, tell=lines.tell)
    return [read_run(folder) for folder in folders.values()]


def story_table(runs: Sequence[RunSummary]) -> Table:
    """Accuracy with few labels and with all, of the baselines and of each run's last model, and its codebooks."""
    table = plain_table()
    table.add_column(f"[cyan]{runs[0].title}[/]", no_wrap=True)
    for heading in (*(f"{n} label{'s' if n > 1 else ''}" for n in SHOTS), "all labels"):
        table.add_column(heading, justify="right")
    table.add_column("ECU per stage")
    last = [list(models_of(run.results))[-1] for run in runs]
    for name, entry in (*baselines_of(runs[0].results), *last):
        scores = entry.probe or Scores()
        few = [score_text(scores.few_shot.get(n)) for n in SHOTS]
        table.add_row(name, *few, with_spread(scores), stages_text(entry, "effective_usage") if entry.codebooks else "")
    return table


def story_sentence(run: RunSummary) -> str:
    """What a run's last model beats with five and ten labels a class, in words."""
    name, entry = list(models_of(run.results))[-1]
    found = comparisons(entry.probe or Scores(), run.results.named_baselines)
    return f"{name.split()[0]} {sentence([one for one in found if one.shots in JUDGED])}."


def run_demo(modalities: Sequence[str], *, seed: int, out: Path) -> Path:
    """Run the demo, print a table for each modality, write the report; an interrupted demo continues where it was."""
    console = Console(highlight=False)
    began = time.perf_counter()
    runs: list[RunSummary] = []
    console.print("Pretraining without labels, then classifying with few labels.")
    for modality in modalities:
        pair = run_pair(modality, seed=seed, out=out, console=console)
        console.print(story_table(pair))
        console.print(f"[bold]{story_sentence(pair[-1])}[/]\n")
        for run in pair:
            json_output.result("demo", run.results, path=out / run.folder / "results.json")
        runs += pair
    pictured = [run._replace(gallery=gallery_of(out / run.folder)) for run in runs]
    page = write_report(pictured, out / "report.html", title="bridle demo")
    json_output.result("report", path=page)
    minutes = (time.perf_counter() - began) / 60
    console.print(
        "Accuracy in %, with so many labels per class; ± is half a 95 % interval.\n"
        "ECU: how evenly the codes of a stage are used, 1 at best.\n"
        f"Seed {seed}, {minutes:.1f} minutes. Three seeds are in docs/results.md."
    )
    if left_out := [modality for modality in MODALITIES if modality not in modalities]:
        console.print(f"Left out: {', '.join(left_out)}; `bridle demo` runs all.")
    console.print(f"wrote {page}  (open it in a browser)", soft_wrap=True, markup=False)
    console.print("Next:  bridle recipes  ·  bridle pretrain image data.root=FOLDER --out runs/mine")
    return page
