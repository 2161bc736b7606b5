"""`bridle probe` and `bridle knn`: evaluate the encoders of a run, on its own data or on other, and write JSON beside.

The result files have one form: a header with the protocol, the baselines, and one entry per finished iteration whose
`probe` holds the scores. The protocol names the data by its files, so that what was measured before they changed is
measured again. Results of another protocol are kept beside, as probe-3f9c21.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from bridle import distributed
from bridle.config import Config, with_absolute_paths
from bridle.console import ProgressLine
from bridle.data.build import is_labelled, open_data
from bridle.data.digests import splits_digest
from bridle.data.loading.cache import MEGABYTE
from bridle.data.sources import Splits
from bridle.errors import ConfigError, DataError, UsageError
from bridle.evaluate.evaluator import Evaluator, probe_header, protocol_of
from bridle.evaluate.feature_cache import FeatureCache
from bridle.evaluate.transfer import (
    fitted_to,
    on_other_data,
    other_inputs,
    require_unchanged,
    results_name,
    with_measured_statistics,
)
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.results import Evaluation, Protocol, Results, read_results
from bridle.runs.results_file import ResultsFile
from bridle.train.algorithm1 import restore_frozen, restore_nets, step_of
from bridle.train.run import open_machine

# Which items are seen, and how much of each.
DATA_KEYS = ("root", "manifest", "layout", "segments", "test_fold", "views", "trim")
MAY_CHANGE = (
    *("probe.", *(f"data.{key}" for key in DATA_KEYS), "data.workers", "data.cache_mb"),
    *("video.crops", "runtime.", "seed"),
)

Classifier = Literal["linear", "neighbours"]


def probe_run(folder: Path, overrides: Sequence[str], *, on: str | None = None, splits: Splits | None = None) -> Path:
    """Probe the encoder after each finished iteration. Asking again with the same settings computes nothing anew.

    With `on` the data, input size and probe settings are those of that recipe. `splits` are the data of a run that no
    command can open: a Dataset given from Python.
    """
    with _opened(folder, overrides, "probe.json", on=on, splits=splits) as evaluation:
        known = evaluation.take_over() if on is None and not evaluation.results.value.evaluations else []
        if measured := [entry for entry in known if entry.probe is not None]:
            evaluation.results.add(*measured)
        return evaluation.score_iterations()


def knn_run(folder: Path, overrides: Sequence[str], *, on: str | None = None, splits: Splits | None = None) -> Path:
    """The same with weighted k-nearest neighbours in place of the linear classifier; codebooks are left out."""
    with _opened(folder, overrides, "knn.json", on=on, classifier="neighbours", splits=splits) as evaluation:
        return evaluation.score_iterations()


def curve_run(folder: Path, overrides: Sequence[str]) -> Path:
    """Probe every checkpoint inside encoder phases that was kept, and their ends: RUN/curve.json, a point an entry."""
    if RunFolder(folder).is_exported():
        raise UsageError(f"{folder}: an exported model is one checkpoint; a curve needs the run it comes from.")
    with _opened(folder, overrides, "curve.json") as evaluation:
        evaluation.take_over()
        return evaluation.score_checkpoints()


def probe_configs(folder: Path, overrides: Sequence[str], on: str | None = None) -> tuple[Config, Config]:
    """The run's config, and the same with overrides that an evaluation may make, or on the data of another recipe."""
    run = RunFolder(folder)
    trained = run.config()
    if on is not None:
        return trained, on_other_data(trained, on, overrides, may_change=MAY_CHANGE)
    config = with_absolute_paths(run.config(overrides))
    require_unchanged(trained, config, MAY_CHANGE, reason="a probe cannot change this")
    return trained, config


@contextmanager
def _opened(
    folder: Path,
    overrides: Sequence[str],
    name: str,
    *,
    on: str | None = None,
    classifier: Classifier = "linear",
    splits: Splits | None = None,
) -> Iterator[RunEvaluation]:
    """An evaluation inside its process group."""
    trained, config = probe_configs(folder, overrides, on)
    if classifier == "neighbours" and config.probe.pool == "attentive":
        raise ConfigError("probe.pool: 'attentive' learns with a linear classifier; use mean, axis or class for k-NN.")
    with distributed.process_group(device=config.runtime.device, timeout_minutes=config.runtime.timeout_minutes):
        yield RunEvaluation(
            RunFolder(folder), trained, with_measured_statistics(config), name,
            on=on, classifier=classifier, splits=splits,
        )  # fmt: skip


class RunEvaluation:
    """The finished encoders of a run, labelled data and a results file; an error says which of them is missing."""

    def __init__(
        self, run: RunFolder, trained: Config, config: Config, name: str, *, on: str | None, classifier: Classifier,
        splits: Splits | None,
    ) -> None:  # fmt: skip
        self.run, self.trained, self.config, self.progress = run, trained, config, ProgressLine()
        self.ends, splits = run.encoder_ends(), splits or open_data(config)
        for note in splits.notes:
            self.progress.note(note)
        if not is_labelled(splits.train):
            raise DataError(
                f"{config.data.manifest or config.data.root or config.data.source}: a probe needs labels, one folder "
                "per class; point data.root=… to a labelled folder."
            )
        self.digest = splits_digest(splits)  # of the data as it is now, where it has one
        measured = "k-NN" if classifier == "neighbours" else "probe"
        header = self.header(config, on).model_copy(update={"evaluation": measured})
        self.results = self.open_results(run.path / results_name(name, on), header)
        # A probe computes in fp32, whatever the run was trained in.
        machine = open_machine(config.runtime, precision="fp32")
        limit = config.probe.cache_mb * MEGABYTE
        cache = FeatureCache(run.cache, limit=limit, tell=self.progress.note) if limit else None
        self.evaluator = Evaluator(
            config, splits, machine, self.results, self.progress, strict=True, classifier=classifier, cache=cache
        )

    def header(self, config: Config, on: str | None = None) -> Results:
        """Results without scores."""
        head = probe_header(config, self.run.path)
        assert head.protocol is not None
        own = {"probe": head.protocol.probe, "classifier": head.protocol.classifier}
        update = {**own, "data": self.digest, "crops": config.video.crops}
        return head.model_copy(update={"protocol": data_protocol(config, on).model_copy(update=update)})

    def open_results(self, path: Path, header: Results) -> ResultsFile:
        """What was measured by the same protocol on the same data; other protocols are kept in files beside."""
        before, wanted = read_results(path).protocol if path.is_file() else None, header.protocol
        if before is not None and wanted is not None and before != wanted and before.digits == wanted.digits:
            self.progress.note(f"{path.name}: files or labels of the data have changed since; measuring again.")
        return ResultsFile.of_protocol(path, header)

    def take_over(self) -> Sequence[Evaluation]:
        """Use the baselines that the run itself measured; returns the evaluations that stand beside them.

        Nothing, unless all of it was measured by the same protocol and on this data.
        """
        path, same_probe = self.run.results(), self.trained.model_copy(update={"probe": self.config.probe})
        if not path.is_file() or self.header(self.config) != self.header(same_probe):
            return []
        known = read_results(path)
        # An older version, a run that was continued with other settings, or data that has changed.
        if known.protocol != protocol_of(self.config) or any(e.data != self.digest for e in known.evaluations):
            return []
        if known.baselines and not self.results.value.baselines:
            self.results.set_baselines(known.baselines)
        return known.evaluations

    def score_iterations(self) -> Path:
        """Evaluate the encoder of every finished iteration that the results do not hold yet; returns their path."""
        config = self.config
        for path in self.ends:
            loaded = load_checkpoint(path)
            iteration, phase = int(loaded.state["iteration"]), str(loaded.state["phase"])
            if self.results.value.at(iteration) is not None:
                continue
            self.progress.note(f"probing {path.name}")
            nets = restore_nets(self.trained, loaded)
            for module in nets.modules().values():
                module.to(self.evaluator.machine.device).eval()
            same_inputs = config.geometry == self.trained.geometry and config.data.mean == self.trained.data.mean
            fitted_to(nets.encoder, config, self.progress)
            # Codebooks are examined on what their tokenizer was trained on.
            if self.evaluator.classifier == "linear" and same_inputs:
                self.results.add(self.evaluator(nets, iteration, phase))
            else:
                scores = self.evaluator.scores_of(nets.encoder)
                self.results.add(Evaluation(iteration=iteration, phase=phase, probe=scores))
        return self.results.path

    def score_checkpoints(self) -> Path:
        """The same with every checkpoint of encoder phases, and the CPU time of training up to it."""
        known = {entry.key for entry in self.results.value.evaluations}
        self.evaluator.measure_baselines()
        for path in self.run.encoder_checkpoints():
            loaded = load_checkpoint(path)
            iteration, step = int(loaded.state["iteration"]), step_of(loaded)
            # Step 0 is the untrained encoder or the end of the iteration before, unless weights were brought along.
            is_known = step == 0 and (iteration > 1 or self.trained.encoder.weights is None)
            if is_known or (iteration, step) in known:
                continue
            self.progress.note(f"probing {path.name}")
            encoder = restore_frozen(self.trained, loaded)[0].to(self.evaluator.machine.device).eval()
            seconds = self.run.cpu_seconds_at(phase_index=int(loaded.state["phase_index"]), step=step)
            phase, scores = str(loaded.state["phase"]), self.evaluator.scores_of(encoder)
            self.results.add(Evaluation(iteration=iteration, phase=phase, step=step, cpu_seconds=seconds, probe=scores))
        return self.results.path


def data_protocol(config: Config, on: str | None = None) -> Protocol:
    """Which items are scored, and how much of each; on another data set, how they are seen."""
    data = {key: getattr(config.data, key) for key in DATA_KEYS}
    other = {} if on is None else {"on": config.name, "inputs": other_inputs(config)}
    return Protocol(**data, **other, seed=config.seed)
