"""A trained model before it is put to use: encoder and tokenizer, config, and what is known of them.

It is read from a run directory or from an exported folder; `folder` writes the latter. Reading runs no code.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from torch import nn

from bridle.config import Config
from bridle.errors import CheckpointError, ConfigError, UsageError, quoted
from bridle.files import read_json
from bridle.models.encoder import Encoder
from bridle.models.tokenizer import Tokenizer
from bridle.runs.checkpoint import EXPORTED, Loaded
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RESULT
from bridle.runs.results import Results, read_results
from bridle.train.algorithm1 import restore_frozen

FORMAT = 1  # of an exported folder


class Facts(NamedTuple):
    """What is known of a model beside its weights, as JSON."""

    iteration: int
    phase: str
    parts: tuple[str, ...] = ("encoder", "tokenizer")  # networks the weights are of; others are untrained
    norms_start: Sequence[Sequence[float]] = ()  # code norms right after the codebooks' start
    baselines: Mapping[str, Any] = {}  # of results.json
    evaluation: Mapping[str, Any] | None = None  # of results.json, after this iteration
    probed_on: str = "test"  # which items these are scores of
    data: str | None = None  # what the data was called
    data_licence: str | None = None
    made_with: Mapping[str, str] = {}  # versions
    imported: Mapping[str, Any] | None = None  # what an encoder from elsewhere was made of
    graphs: Mapping[str, Any] = {}  # files of graphs and how they were checked
    half: bool = False  # are the weights stored in float16?


class Trained(NamedTuple):
    """The networks of a model, its config, and what is known of it."""

    encoder: Encoder
    own_tokenizer: Tokenizer | None
    config: Config
    facts: Facts
    run: Path | None = None  # the run directory it was read from
    detokenizer: Path | None = None  # folder of the detokenizer for its codes, where one is trained

    def modules(self) -> dict[str, nn.Module]:
        """The networks by name."""
        named: dict[str, nn.Module | None] = {"encoder": self.encoder, "tokenizer": self.own_tokenizer}
        return {name: module for name, module in named.items() if module is not None}

    def parameter_counts(self) -> dict[str, int]:
        """Numbers of parameters by network."""
        return {name: sum(p.numel() for p in module.parameters()) for name, module in self.modules().items()}


def facts_of_run(loaded: Loaded, config: Config) -> Facts:
    """What a checkpoint of a run and its config say of the model."""
    named = config.data.manifest or config.data.root
    held = {name.partition(".")[0] for name in loaded.tensors["model"]}
    return Facts(
        iteration=int(loaded.state["iteration"]),
        phase=str(loaded.state["phase"]),
        parts=tuple(part for part in ("encoder", "tokenizer") if part in held),
        norms_start=loaded.state["norms_start"],
        data=None if named is None else PurePath(named).name,
    )


def with_scores(trained: Trained) -> Trained:
    """Add what the run's files say of the model: scores after its iteration, baselines, versions."""
    if trained.run is None:
        return trained
    run, facts = RunFolder(trained.run), trained.facts
    results, made_with = Results(), run.environment()
    with suppress(CheckpointError):  # a model can be exported without scores
        results = read_results(run.results())
    evaluation, protocol = results.at(facts.iteration), results.protocol
    found = facts._replace(
        baselines={name: scores.model_dump(mode="json") for name, scores in results.baselines.items()},
        evaluation=None if evaluation is None else evaluation.model_dump(mode="json"),
        probed_on="test" if protocol is None or protocol.probe is None else protocol.probe.on,
        made_with={key: str(made_with[key]) for key in ("bridle", "torch") if key in made_with},
    )
    return trained._replace(facts=found)


def facts_of_nets(tokenizer: Tokenizer | None) -> Facts:
    """What can be said of networks that come from no folder: a cold start belongs to iteration 1."""
    parts = ("encoder",) if tokenizer is None else ("encoder", "tokenizer")
    return Facts(iteration=2 if tokenizer is not None and tokenizer.is_trained else 1, phase="encoder", parts=parts)


def read_trained(folder: Path, *, iteration: int | None = None) -> Trained:
    """Encoder and tokenizer of an exported folder, or of a run's last finished encoder phase that is whole.

    Reads the config, the manifest and the tensors, and nothing else of a run.
    """
    run = RunFolder(folder)
    if (folder / EXPORTED).is_file():
        return _read_exported(run, iteration)
    if not run.exists():
        raise UsageError(
            f"{folder}: not a run directory (no config.yaml) and not an exported model (no {EXPORTED}); give the "
            "folder that --out named."
        )
    config, problems = run.config(), []
    for path in reversed(run.encoder_ends(iteration)):
        try:
            loaded = load_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            warnings.warn(f"{error} Using an earlier checkpoint if there is one.", stacklevel=3)
            continue
        facts = facts_of_run(loaded, config)
        return Trained(*restore_frozen(config, loaded), config, facts, folder, find_detokenizer(run, facts.iteration))
    raise CheckpointError(" ".join(problems))


def _read_exported(run: RunFolder, iteration: int | None) -> Trained:
    """The model of an exported folder; keys of config.json that a later bridle may add are left alone."""
    stored = read_json(run.path / EXPORTED, remedy="damaged or not written by bridle: get the folder again")
    by, this = quoted(stored.get("bridle")), version("bridle")
    if stored.get("format") != FORMAT:
        raise CheckpointError(
            f"{quoted(run.path)} has format {quoted(stored.get('format'))}, this bridle {this} reads format {FORMAT}; "
            f"it was written by bridle {by}: install that version or a newer one."
        )
    loaded = load_checkpoint(run.path)
    try:
        facts = Facts(**{key: value for key, value in loaded.state.items() if key in Facts._fields})
        facts = facts._replace(parts=tuple(facts.parts), iteration=int(facts.iteration), phase=str(facts.phase))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{run.path / EXPORTED}: not written by bridle ({error}); export the model again."
        ) from error
    run.encoder_ends(iteration)
    try:
        config = run.config()
    except ConfigError as error:
        raise CheckpointError(
            f"{quoted(run)} was written by bridle {by} and this is bridle {this}, which cannot use its settings "
            f"({error}); install that version or a newer one."
        ) from error
    found = find_detokenizer(run, facts.iteration)
    return Trained(*restore_frozen(config, loaded), config, facts, detokenizer=found)


def find_detokenizer(run: RunFolder, iteration: int) -> Path | None:
    """The folder of the trained detokenizer for the codes of an iteration; None where there is none."""
    folder = run.detokenizer(iteration).path
    return folder if (folder / RESULT).is_file() else None
