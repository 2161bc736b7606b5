"""`bridle finetune`: train a run's encoder on labels and score it on items it never saw.

RUN/finetune/iter2-3f9c21/[fold1/]            config.yaml, metrics.jsonl, checkpoints, scores.safetensors, figures.json
RUN/finetune/iter2-3f9c21/result.json         what all its folds say together
RUN/finetune.json                             the figures of all starting points under the settings last asked for

The digits name the settings, so that other settings get a folder of their own and the same command finds its own work
again: what is finished is not redone, what was interrupted goes on. Nothing is chosen on the test items; they are
scored once, by the weights after the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bridle import distributed, failpoints
from bridle.config import Config, with_absolute_paths
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.digests import splits_digest
from bridle.data.loading.balance import balancing_weights, label_set
from bridle.data.loading.loader import require_even_shares
from bridle.data.loading.mixing import mixed
from bridle.data.sources import Source, Splits
from bridle.data.subset import subset_of
from bridle.errors import ConfigError, DataError, UsageError
from bridle.evaluate.collector import readable_rows
from bridle.evaluate.finetune_scores import Scored, blind_score, score_items
from bridle.evaluate.finetune_units import (
    Task,
    Unit,
    few_label_scores,
    few_label_units,
    find_units,
    labels_of,
    settings_of,
)
from bridle.evaluate.probe_command import DATA_KEYS, data_protocol
from bridle.evaluate.scorers.probe import Part, summarise
from bridle.evaluate.transfer import (
    fitted_to,
    on_other_data,
    require_unchanged,
    results_name,
    with_measured_statistics,
)
from bridle.machine import StopRequest
from bridle.models.build import build_classifier, build_encoder
from bridle.models.classifier import Classifier
from bridle.runs.callbacks import Callback, running
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.results import Evaluation, Protocol, Scores, read_record, results_header, write_record
from bridle.runs.results_file import ResultsFile
from bridle.runs.trackers import open_trackers
from bridle.train.algorithm1 import restore_frozen
from bridle.train.finetune import Tuned, finetune
from bridle.train.run import Run, locked_by_first, open_machine

MAY_CHANGE = (
    *("finetune.", *(f"data.{key}" for key in DATA_KEYS), "data.workers", "data.cache_mb", "data.bad_share"),
    *("runtime.", "seed"),
)
FIGURES, SCORES = "figures.json", "scores.safetensors"


class Start(NamedTuple):
    """The encoder that fine-tuning begins with."""

    iteration: int  # 0: from scratch
    checkpoint: Path | None

    @property
    def name(self) -> str:
        return f"iter{self.iteration}" if self.iteration else "scratch"


def finetune_run(
    folder: Path,
    overrides: Sequence[str],
    *,
    iteration: int | None = None,
    on: str | None = None,
    callbacks: Sequence[Callback] = (),
    command: str | None = None,
) -> Path:
    """Fine-tune the encoder after the last finished iteration (or `iteration`), or go on; returns the results file.

    With `on` the data, input size and fine-tuning settings are those of that recipe.
    """
    run = RunFolder(folder)
    trained = with_absolute_paths(run.config())
    if on is None:
        config = with_absolute_paths(run.config(overrides))
        require_unchanged(trained, config, MAY_CHANGE, reason="fine-tuning cannot change this")
    else:
        config = on_other_data(trained, on, overrides, may_change=MAY_CHANGE)
    start = find_start(folder, config, iteration)
    with distributed.process_group(device=config.runtime.device, timeout_minutes=config.runtime.timeout_minutes):
        config = with_measured_statistics(config)
        place = run.finetune(f"{start.name}-{protocol(config, on).digits}").path
        if distributed.done_once((place / "result.json").is_file):
            note_changes(place, config)
        else:
            require_even_shares(config.finetune.batch, distributed.world_size(), key="finetune.batch")
            distributed.done_once(partial(place.mkdir, parents=True, exist_ok=True))
            with locked_by_first(RunFolder(place)), StopRequest().listening() as stop:
                everyone = callbacks if distributed.rank() == 0 else ()
                job = Job(place, config, start, stop, everyone, command, trained=trained)
                entry = job.entry()
                if distributed.rank() == 0:
                    write_record(place / "result.json", entry)
        return gather_results(folder, config, on)


class Job:
    """Everything it takes from one start to one entry of finetune.json."""

    def __init__(
        self,
        place: Path,
        config: Config,
        start: Start,
        stop: StopRequest,
        callbacks: Sequence[Callback],
        command: str | None,
        *,
        trained: Config,
    ) -> None:
        # Samples are augmented as fine-tuning wants it, not as pretraining did.
        self.config = config.model_copy(update={"augment": config.finetune.augment})
        self.place, self.start, self.stop = place, start, stop
        self.callbacks, self.command, self.trained = callbacks, command, trained
        self.machine, self.progress = open_machine(config.runtime), ProgressLine()

    def entry(self) -> Evaluation:
        """Train and score what is still missing."""
        splits = open_data(self.config)
        for note in splits.notes:
            self.progress.note(note)
        task = find_task(splits, self.config)
        whole = find_units(splits, self.config, task)
        units = [*whole, *few_label_units(whole, self.config, task)]
        for number, unit in enumerate(units, start=1):
            folder = self.place / unit.name
            if not distributed.done_once((folder / FIGURES).is_file):
                which = f", {number} of {len(units)} ({unit.name})" if unit.name else ""
                self.progress.note(f"fine-tuning from {self.start.name}{which}: {len(unit.train)} items")
                distributed.done_once(partial(folder.mkdir, exist_ok=True))
                self.tune(folder, unit, task)
        return self._entry(
            Scores.model_validate(distributed.done_once(lambda: self.together(units).model_dump(mode="json"))),
            data=splits_digest(splits),
        )

    def _entry(self, scores: Scores, data: str | None = None) -> Evaluation:
        iteration, start = self.start.iteration, self.start.name
        return Evaluation(iteration=iteration, start=start, phase="finetune", finetune=scores, data=data)

    def together(self, units: Sequence[Unit]) -> Scores:
        """The scores over all folds."""
        every = [read_record(Scores, self.place / unit.name / FIGURES) for unit in units]
        few = few_label_scores(units, [one.main or 0.0 for one in every])
        whole = [unit for unit in units if unit.shots is None]
        each = [one for unit, one in zip(units, every, strict=True) if unit.shots is None]
        if len(whole) == 1:
            return each[0].joined(few)
        found = summarise([self.scored_part(unit) for unit in whole], seed=self.config.seed, began=0.0).joined(few)
        left_out = tuple(dict.fromkeys(name for one in each for name in one.left_out))  # an item is in several folds
        return found.model_copy(update={"seconds": sum(one.seconds for one in each), "left_out": left_out})

    def scored_part(self, unit: Unit) -> Part:
        """The scores that the unit's model gave its test items."""
        scored = Scored.read(self.place / unit.name / SCORES)
        steps = settings_of(unit, self.config.finetune).step_count(len(unit.train))
        chance = blind_score(labels_of(unit.train), scored)
        return Part(unit.fold, scored.scores, scored.truth, chance, len(unit.train), {"steps": steps})

    def tune(self, folder: Path, unit: Unit, task: Task) -> None:
        """Train one model to its end and score its test items."""
        settings = settings_of(unit, self.config.finetune)
        config = self.config.model_copy(update={"finetune": settings})
        distributed.done_once(lambda: RunFolder(folder).write_settings(config, command=self.command))
        everyone = [*open_trackers(config.log), *self.callbacks] if distributed.rank() == 0 else []
        nets = self.build(task)
        source = mixed(unit.train, config.augment)  # partners too come from this unit's training items
        run = Run(RunFolder(folder), config, self.machine, source, nets, self.stop, self.progress, everyone)
        if settings.sampling == "balanced":
            run.weights = balancing_weights(labels_of(unit.train)).tolist()
        with running(everyone, folder, config.model_dump(mode="json")):
            model = finetune(run, iteration=self.start.iteration, loss=task.loss)
            with self.stop.leaving_at_once("the fine-tuned model is saved, its test items are not scored yet."):
                failpoints.hit("evaluation.begin")
                scored, left_out = self.score(model, unit, task)
            failpoints.hit("evaluation.end")
            found = distributed.done_once(lambda: self.write_scores(folder, unit, scored, left_out))
            for callback in everyone:
                callback.on_evaluation(found)

    def score(self, model: Classifier, unit: Unit, task: Task) -> tuple[Scored | None, tuple[str, ...]]:
        """Scores of the test items that can be read, and the names of items that cannot."""

        def scored(source: Source) -> Scored | None:
            kind = {"multilabel": task.multilabel, "exclusive": task.loss == "ce"}
            return score_items(model, source, config=self.config, machine=self.machine, **kind)

        try:
            return scored(unit.test), ()
        except DataError:
            kept, names = readable_rows([unit.train, unit.test], self.config.data, self.progress)
            if not names:
                raise
            return scored(subset_of(unit.test, kept[1])), names

    def write_scores(
        self, folder: Path, unit: Unit, scored: Scored | None, left_out: tuple[str, ...]
    ) -> dict[str, Any]:
        """Write the scores of one model; rank 0's work. Returns what callbacks are told."""
        assert scored is not None  # rank 0 has the scores of all items
        scored.save(folder / SCORES)
        seconds = training_seconds(RunFolder(folder).metrics(), settings_of(unit, self.config.finetune).batch)
        found = summarise([self.scored_part(unit)], seed=self.config.seed, began=0.0)
        unused = tuple(sample.name for sample in RunFolder(folder).quarantined())  # in training
        found = found.model_copy(update={"seconds": seconds, "left_out": tuple(dict.fromkeys((*unused, *left_out)))})
        write_record(folder / FIGURES, found)
        return self._entry(found).model_dump(mode="json")

    def build(self, task: Task) -> Tuned:
        """The starting encoder with a new head."""
        config, start = self.config, self.start
        if start.checkpoint is None:
            encoder = build_encoder(config)
        else:
            encoder, _ = restore_frozen(self.trained, load_checkpoint(start.checkpoint))
            fitted_to(encoder, config, self.progress)
        return Tuned(build_classifier(config, encoder, classes=task.classes, iteration=start.iteration))


def note_changes(place: Path, config: Config) -> None:
    """Say so if a finished result is of other data; hours of training are not done again unasked."""
    progress, known = ProgressLine(), distributed.done_once(lambda: read_record(Evaluation, place / "result.json").data)
    try:
        changed = splits_digest(open_data(config)) != known
    except DataError as error:
        progress.note(f"{place}: was finished before, but its data cannot be read now: {error}")
        return
    if changed and known is not None:
        progress.note(f"{place}: files or labels of the data have changed since; delete it to fine-tune again.")


def training_seconds(rows: Sequence[Mapping[str, Any]], batch: int) -> float:
    """Time spent training, over all interruptions, from the log's rates."""
    before = [0, *(row["step"] for row in rows)]
    rates = [max(row["samples_per_second"], 1e-9) for row in rows]
    return float(sum((b - a) * batch / rate for a, b, rate in zip(before, before[1:], rates, strict=False)))


def find_start(folder: Path, config: Config, iteration: int | None) -> Start:
    """The encoder to begin with: of the last finished iteration, of the one asked for, or a new one."""
    if config.finetune.from_scratch:
        if iteration is not None:
            raise UsageError(f"--iteration {iteration} and finetune.from_scratch=true exclude each other; give one.")
        return Start(0, None)
    ends = RunFolder(folder).encoder_ends(iteration)
    return Start(int(load_checkpoint(ends[-1]).state["iteration"]), ends[-1])


def find_task(splits: Splits, config: Config) -> Task:
    """How many classes there are, whether items have several labels, and the loss; what cannot be learnt is refused."""
    where = config.data.manifest or config.data.root or config.data.source
    labels = [*labels_of(splits.train, where), *(labels_of(splits.test, where) if splits.test is not None else ())]
    multilabel = any(isinstance(label, tuple) for label in labels)
    present = {one for label in labels for one in label_set(label)}
    names = splits.train.classes
    classes = max(present, default=-1) + 1 if names is None else len(names)
    if len(present) < 2:
        raise DataError(f"{where}: fine-tuning needs at least two classes, but all items have the same label.")
    if max(present) >= classes or min(present) < 0:
        raise DataError(f"{where}: labels go from {min(present)} to {max(present)}, but there are {classes} classes.")
    wanted = config.finetune.loss
    if multilabel and wanted == "ce":
        raise ConfigError("finetune.loss: 'ce' needs one label per item, but some have several; use 'bce' or 'auto'.")
    return Task(classes, multilabel, ("bce" if multilabel else "ce") if wanted == "auto" else wanted)


def protocol(config: Config, on: str | None = None) -> Protocol:
    """What makes two fine-tunings comparable; where they start from is told apart by name."""
    finetune = config.finetune.model_copy(update={"from_scratch": False})
    return data_protocol(config, on).model_copy(update={"finetune": finetune})


def gather_results(folder: Path, config: Config, on: str | None) -> Path:
    """Write RUN/finetune.json, or finetune-ON.json: every start that is finished under these settings."""
    own = protocol(config, on)
    header = results_header(config, folder).model_copy(update={"protocol": own})
    results = ResultsFile.anew(folder / results_name("finetune.json", on), header)
    found = sorted(RunFolder(folder).finetune().path.glob(f"*-{own.digits}/result.json"))
    results.add(*(read_record(Evaluation, path) for path in found))
    return results.path
