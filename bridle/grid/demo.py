"""`bridle demo`: what pretraining is worth with few labels, on embedded data of three modalities, VQ beside RQ.

The runs of a modality are ordinary `bridle` commands, each on one thread and two at a time: that uses two cores fully,
and shows what a user would type. Beside two `bridle pretrain` stands the same network trained on the labels alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bridle.config import Config, load_config
from bridle.console import json_output, plain_table
from bridle.data.embedded.modality import MODALITIES as EMBEDDED
from bridle.evaluate.verdict import comparisons, sentence
from bridle.grid.run_lines import RunLines
from bridle.grid.subprocesses import run_beside
from bridle.report.page import write_report
from bridle.report.runs import Measured, RunSummary, read_run
from bridle.report.tables import Named, baselines_of, models_of, score_text, stages_text, with_spread
from bridle.report.token_maps import gallery_of
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RESULT, Reconstruction
from bridle.runs.results import Evaluation, Scores, read_record, read_results

SHOTS = (1, 5, 10)  # labels per class
JUDGED = (5, 10)  # those that the sentence below a table is about, and on which the network is trained from scratch
SETS = ("patterns", "moving-patterns", "sounds")
MODALITIES = {modality.kind: f"{modality.name}-tiny" for modality in EMBEDDED if modality.name in SETS}  # recipes
QUICK = next(iter(MODALITIES))  # the pictures
# Training on labels alone, without what is meant for a pretrained start (slower lower layers, dropped branches).
FROM_SCRATCH = (
    *("finetune.from_scratch=true", f"finetune.shots=[{','.join(map(str, JUDGED))}]", "finetune.shot_steps=200"),
    *("finetune.steps=600", "finetune.warmup_steps=30", "finetune.batch=16", "finetune.deviation=true"),
    *("finetune.layer_decay=1", "finetune.drop_path=0"),
)
DECODING_STEPS = 200  # of the network that shows what the codes keep


class Stage(NamedTuple):
    """One command of the demo, and where it writes."""

    name: str
    folder: Path
    arguments: list[str]
    after: str | None = None  # the stage that must have ended

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")


def demo_arguments(modality: str, *, seed: int, iterations: int = 1) -> dict[str, list[str]]:
    """The arguments of `bridle pretrain` for RQ and VQ: the same total number of codes, everything else equal."""
    recipe = MODALITIES[modality]
    total = sum(load_config(recipe).quantizer.sizes)
    shared = [recipe, f"seed={seed}", f"schedule.iterations={iterations}", f"probe.shots=[{','.join(map(str, SHOTS))}]"]
    return {"rq": shared, "vq": [*shared, "quantizer.codebooks=1", f"quantizer.codes={total}"]}


def scratch_arguments(config: Config) -> list[str]:
    """The overrides of `bridle finetune` for training the network of a config from scratch, pooled as it is probed."""
    return [*FROM_SCRATCH, f"finetune.pool={config.probe.pool}", f"finetune.axis={config.probe.axis}"]


def stages_of(modality: str, methods: dict[str, list[str]], out: Path) -> list[Stage]:
    """The commands of a modality. Training from scratch is second, so that RQ and VQ do not both measure baselines."""
    found = []
    for method, arguments in methods.items():
        folder = out / f"{modality}-{method}"
        found.append(Stage(f"{modality} {method.upper()}", folder, ["pretrain", *arguments, "--out", str(folder)]))
    folder, (recipe, *overrides) = out / f"{modality}-scratch", methods["rq"]
    config = load_config(recipe, overrides)
    own = RunFolder(folder)
    own.prepare(config)
    own.write_settings(config)
    found.insert(1, Stage(f"{modality} from scratch", folder, ["finetune", str(folder), *scratch_arguments(config)]))
    rq, decoding = found[0], out / f"{modality}-decoding"
    arguments = ["detokenizer", str(rq.folder), f"detokenizer.steps={DECODING_STEPS}", "detokenizer.warmup_steps=20"]
    return [*found, Stage(f"{modality} decoding", decoding, arguments, after=rq.name)]


class Story:
    """What the runs of one modality found."""

    def __init__(self, modality: str, out: Path, methods: Sequence[str], iterations: int) -> None:
        self.scratch = out / f"{modality}-scratch" / "finetune.json"
        self.folders = [out / f"{modality}-{method}" for method in methods]
        self.decoded = RunFolder(self.folders[0]).detokenizer(iterations).path / RESULT

    @property
    def is_ready(self) -> bool:
        written = [self.scratch, *(RunFolder(folder).results() for folder in self.folders)]
        return self.decoded.is_file() and all(path.is_file() and read_results(path).evaluations for path in written)

    def runs(self) -> list[RunSummary]:
        """The summaries of the runs, RQ last; the last has training from scratch beside it."""
        *others, last = [read_run(folder) for folder in reversed(self.folders)]
        return [*others, last._replace(further=(*last.further, Measured("finetune", read_results(self.scratch))))]

    @property
    def from_scratch(self) -> Scores:
        return read_results(self.scratch).evaluations[0].scores or Scores()

    def table(self) -> Table:
        """Accuracy with few labels and with all, of the baselines and of each run's models, and their codebooks."""
        runs, table = self.runs(), plain_table()
        table.add_column(f"[cyan]{runs[0].title}[/]", no_wrap=True)
        for heading in (*(f"{n} label{'s' if n > 1 else ''}" for n in SHOTS), "all labels"):
            table.add_column(heading, justify="right")
        table.add_column("ECU per stage")
        scratch = Named("from scratch", Evaluation(iteration=0, probe=self.from_scratch))
        models = [named for run in runs for named in models_of(run.results)]
        for name, entry in (*baselines_of(runs[-1].results), scratch, *models):
            scores = entry.probe or Scores()
            few = [score_text(scores.few_shot.get(n)) for n in SHOTS]
            table.add_row(
                name, *few, with_spread(scores), stages_text(entry, "effective_usage") if entry.codebooks else ""
            )
        return table

    def sentence(self) -> str:
        """What the last RQ model beats with five and ten labels a class, in words."""
        results = self.runs()[-1].results
        name, entry = list(models_of(results))[-1]
        beside = results.named_baselines | {"training from scratch": self.from_scratch}
        found = [one for one in comparisons(entry.probe or Scores(), beside) if one.shots in JUDGED]
        return f"{name.split()[0]} {sentence(found)}."

    def kept(self) -> str:
        """What the codes keep, by how many stages of RQ are decoded."""
        found = read_record(Reconstruction, self.decoded).by_stages
        shares = " / ".join(f"{100 * row.explained:.0f}" for row in found)
        return f"What the codes keep: {shares} % of the input's variance, decoded from 1 … {len(found)} stages."

    def tell(self, console: Console) -> None:
        """Print the table and what it says."""
        console.print(self.table())
        console.print(f"[bold]{self.sentence()}[/]\n{self.kept()}\n")


def run_stages(stages: Sequence[Stage], stories: dict[str, Story], console: Console) -> None:
    """Run all commands, two at a time; print the story of a modality as soon as its last one has ended."""
    with RunLines(console, {stage.name: stage.log for stage in stages}) as lines:

        def spent(name: str, seconds: float) -> None:
            lines.spent(name, seconds)
            modality = name.split(maxsplit=1)[0]
            is_last = all(stage.name in lines.ended for stage in stages if stage.name.startswith(f"{modality} "))
            if is_last and stories[modality].is_ready:  # else one has failed, and its error follows
                stories[modality].tell(console)

        commands = {stage.name: stage.arguments for stage in stages}
        after = {stage.name: stage.after for stage in stages if stage.after is not None}
        run_beside(commands, jobs=2, console=console, spent=spent, tell=lines.tell, after=after)


def run_demo(modalities: Sequence[str], *, seed: int, out: Path, quick: bool = False, iterations: int = 1) -> Path:
    """Run the demo, print a table for each modality as soon as it is ready, write the report.

    `quick` leaves out VQ. An interrupted demo continues where it was.
    """
    console = Console(highlight=False)
    began = time.perf_counter()
    console.print("Pretraining without labels, then classifying with few labels.")
    stages, stories = list[Stage](), dict[str, Story]()
    for modality in modalities:
        methods = demo_arguments(modality, seed=seed, iterations=iterations)
        methods = {"rq": methods["rq"]} if quick else methods
        stages += stages_of(modality, methods, out)
        stories[modality] = Story(modality, out, list(methods), iterations)
    run_stages(stages, stories, console)
    runs = [run for story in stories.values() for run in story.runs()]
    for run in runs:
        json_output.result("demo", run.results, path=out / run.folder / "results.json")
    for story in stories.values():
        json_output.result("finetune", read_results(story.scratch), path=story.scratch)
    pictured = [run._replace(gallery=gallery_of(out / run.folder)) for run in runs]
    page = write_report(pictured, out / "report.html", title="bridle demo")
    json_output.result("report", path=page)
    minutes = (time.perf_counter() - began) / 60
    console.print(
        "Accuracy in %, with so many labels per class; ± is half a 95 % interval. From scratch: the same network,\n"
        "trained on the labels alone. ECU: how evenly the codes of a stage are used, 1 at best.\n"
        f"Seed {seed}, {minutes:.1f} minutes. Three seeds are in docs/results.md."
    )
    left_out = [modality for modality in MODALITIES if modality not in modalities] + (["VQ"] if quick else [])
    if left_out:
        console.print(f"Left out: {', '.join(left_out)}; `bridle demo` runs all.")
    if iterations == 1:
        console.print("One iteration of the method; `bridle demo --iterations 2` shows the second, in twice the time.")
    console.print(f"wrote {page}  (open it in a browser)", soft_wrap=True, markup=False)
    console.print("Next:  bridle recipes  ·  bridle pretrain image data.root=FOLDER --out runs/mine")
    return page
