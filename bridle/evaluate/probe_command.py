"""`bridle probe` and `bridle knn`: evaluate the encoders of a run, on its own data or on other, and write JSON beside.

The result files have one form: a header with the protocol, the baselines, and one entry per finished iteration whose
`probe` holds the scores. The protocol names the data by its files, so that what was measured before they changed is
measured again. Results of another protocol are kept beside, as probe-3f9c21.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

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
from bridle.train.algorithm1 import restore_nets, step_of
from bridle.train.run import open_machine

# Which items are seen, and how much of each.
DATA_KEYS = ("root", "manifest", "layout", "segments", "test_fold", "views", "trim")
MAY_CHANGE = (
    *("probe.", *(f"data.{key}" for key in DATA_KEYS), "data.workers", "data.cache_mb"),
    *("video.crops", "runtime.", "seed"),
)


class Opened(NamedTuple):
    """What is evaluated, and on what."""

    ends: list[Path]  # checkpoints
    splits: Splits
    data: str | None  # digest of the data as it is now, where it has one
    progress: ProgressLine


def probe_run(folder: Path, overrides: Sequence[str], *, on: str | None = None) -> Path:
    """Probe the encoder after each finished iteration. Asking again with the same settings computes nothing anew.

    With `on` the data, input size and probe settings are those of that recipe.
    """
    trained, config = _configs(folder, overrides, on)
    with distributed.process_group(device=config.runtime.device, timeout_minutes=config.runtime.timeout_minutes):
        config = with_measured_statistics(config)
        opened = _open(folder, config)
        header = _header(config, folder, opened.data, on)
        results = _results(folder / results_name("probe.json", on), header, opened.progress)
        if on is None:
            take_over(folder, trained, config, results, data=opened.data)
        return _evaluate(folder, trained, config, results, opened, "linear")


def curve_run(folder: Path, overrides: Sequence[str]) -> Path:
    """Probe every checkpoint inside encoder phases that was kept, and their ends: RUN/curve.json, a point an entry."""
    trained, config = _configs(folder, overrides)
    if RunFolder(folder).is_exported():
        raise UsageError(f"{folder}: an exported model is one checkpoint; a curve needs the run it comes from.")
    with distributed.process_group(device=config.runtime.device, timeout_minutes=config.runtime.timeout_minutes):
        opened = _open(folder, config)
        results = _results(RunFolder(folder).results("curve"), _header(config, folder, opened.data), opened.progress)
        take_over_baselines(folder, trained, config, results, data=opened.data)
        evaluator = _evaluator(folder, config, results, opened, "linear")
        known = {entry.key for entry in results.value.evaluations}
        evaluator.measure_baselines()
        for path in RunFolder(folder).encoder_checkpoints():
            loaded = load_checkpoint(path)
            iteration, step = int(loaded.state["iteration"]), step_of(loaded)
            # Step 0 is the untrained encoder or the end of the iteration before, unless weights were brought along.
            is_known = step == 0 and (iteration > 1 or trained.encoder.weights is None)
            if is_known or (iteration, step) in known:
                continue
            opened.progress.note(f"probing {path.name}")
            encoder = restore_nets(trained, loaded).encoder.to(evaluator.machine.device).eval()
            seconds = RunFolder(folder).cpu_seconds_at(phase_index=int(loaded.state["phase_index"]), step=step)
            phase, scores = str(loaded.state["phase"]), evaluator.scores_of(encoder)
            point = Evaluation(iteration=iteration, phase=phase, step=step, cpu_seconds=seconds, probe=scores)
            results.add(point)
        return results.path


def knn_run(folder: Path, overrides: Sequence[str], *, on: str | None = None) -> Path:
    """The same with weighted k-nearest neighbours in place of the linear classifier; codebooks are left out."""
    trained, config = _configs(folder, overrides, on)
    if config.probe.pool == "attentive":
        raise ConfigError("probe.pool: 'attentive' learns with a linear classifier; use mean, axis or class for k-NN.")
    with distributed.process_group(device=config.runtime.device, timeout_minutes=config.runtime.timeout_minutes):
        config = with_measured_statistics(config)
        opened = _open(folder, config)
        header = _header(config, folder, opened.data, on).model_copy(update={"evaluation": "k-NN"})
        results = _results(folder / results_name("knn.json", on), header, opened.progress)
        return _evaluate(folder, trained, config, results, opened, "neighbours")


def take_over(folder: Path, trained: Config, config: Config, results: ResultsFile, *, data: str | None) -> None:
    """Use what the run itself has already measured by the same protocol, if all of it was on this data."""
    if not results.value.evaluations:
        known = take_over_baselines(folder, trained, config, results, data=data)
        if measured := [entry for entry in known if entry.probe is not None]:
            results.add(*measured)


def take_over_baselines(
    folder: Path, trained: Config, config: Config, results: ResultsFile, *, data: str | None
) -> Sequence[Evaluation]:
    """The same with the baselines alone; returns the evaluations that stand beside them."""
    path, same_probe = RunFolder(folder).results(), trained.model_copy(update={"probe": config.probe})
    if not path.is_file() or _header(config, folder, data) != _header(same_probe, folder, data):
        return []
    known = read_results(path)
    if known.protocol != protocol_of(config):
        return []  # an older version, or a run that was continued with other settings
    if any(entry.data != data for entry in known.evaluations):
        return []  # the baselines then are of other data too
    if known.baselines and not results.value.baselines:
        results.set_baselines(known.baselines)
    return known.evaluations


def _open(folder: Path, config: Config) -> Opened:
    """The finished encoders and the labelled data, or an error that says what is missing."""
    ends = RunFolder(folder).encoder_ends()
    splits, progress = open_data(config), ProgressLine()
    for note in splits.notes:
        progress.note(note)
    if not is_labelled(splits.train):
        raise DataError(
            f"{config.data.manifest or config.data.root or config.data.source}: a probe needs labels, one folder per "
            "class; point data.root=… to a labelled folder."
        )
    return Opened(ends, splits, splits_digest(splits), progress)


def _evaluate(
    folder: Path,
    trained: Config,
    config: Config,
    results: ResultsFile,
    opened: Opened,
    classifier: Literal["linear", "neighbours"],
) -> Path:
    """Evaluate the encoder of every finished iteration that the results do not hold yet."""
    evaluator = _evaluator(folder, config, results, opened, classifier)
    for path in opened.ends:
        loaded = load_checkpoint(path)
        iteration, phase = int(loaded.state["iteration"]), str(loaded.state["phase"])
        if results.value.at(iteration) is not None:
            continue
        opened.progress.note(f"probing {path.name}")
        nets = restore_nets(trained, loaded)
        for module in nets.modules().values():
            module.to(evaluator.machine.device).eval()
        same_inputs = config.geometry == trained.geometry and config.data.mean == trained.data.mean
        fitted_to(nets.encoder, config, opened.progress)
        # Codebooks are examined on what their tokenizer was trained on.
        if classifier == "linear" and same_inputs:
            results.add(evaluator(nets, iteration, phase))
        else:
            results.add(Evaluation(iteration=iteration, phase=phase, probe=evaluator.scores_of(nets.encoder)))
    return results.path


def _evaluator(
    folder: Path, config: Config, results: ResultsFile, opened: Opened, classifier: Literal["linear", "neighbours"]
) -> Evaluator:
    # A probe computes in fp32, whatever the run was trained in.
    machine = open_machine(config.runtime, precision="fp32")
    kept = FeatureCache(RunFolder(folder).cache, limit=config.probe.cache_mb * MEGABYTE, tell=opened.progress.note)
    cache = kept if config.probe.cache_mb else None
    return Evaluator(
        config, opened.splits, machine, results, opened.progress, strict=True, classifier=classifier, cache=cache
    )


def _configs(folder: Path, overrides: Sequence[str], on: str | None = None) -> tuple[Config, Config]:
    """The run's config, and the same with overrides that an evaluation may make, or on the data of another recipe."""
    run = RunFolder(folder)
    trained = run.config()
    if on is not None:
        return trained, on_other_data(trained, on, overrides, may_change=MAY_CHANGE)
    config = with_absolute_paths(run.config(overrides))
    # An exported folder keeps only the name of the file its encoder began with.
    require_unchanged(trained, config, MAY_CHANGE, reason="a probe cannot change this")
    return trained, config


def _results(path: Path, header: Results, progress: ProgressLine) -> ResultsFile:
    """What was measured by the same protocol on the same data; other protocols are kept in files beside."""
    before, wanted = read_results(path).protocol if path.is_file() else None, header.protocol
    if before is not None and wanted is not None and before != wanted and before.digits == wanted.digits:
        progress.note(f"{path.name}: files or labels of the data have changed since; measuring again.")
    return ResultsFile.of_protocol(path, header)


def data_protocol(config: Config, on: str | None = None) -> Protocol:
    """Which items are scored, and how much of each; on another data set, how they are seen."""
    data = {key: getattr(config.data, key) for key in DATA_KEYS}
    other = {} if on is None else {"on": config.name, "inputs": other_inputs(config)}
    return Protocol(**data, **other, seed=config.seed)


def _header(config: Config, folder: Path, digest: str | None, on: str | None = None) -> Results:
    head = probe_header(config, folder)
    assert head.protocol is not None
    own = {"probe": head.protocol.probe, "classifier": head.protocol.classifier}
    protocol = data_protocol(config, on).model_copy(update={**own, "data": digest, "crops": config.video.crops})
    return head.model_copy(update={"protocol": protocol})
