"""A trained model before it is put to use: encoder and tokenizer, config, and what is known of them.

It is read from a run directory or from an exported folder; `folder` writes the latter. Reading runs no code.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from torch import nn

from bridle.config import Config, read_config
from bridle.errors import CheckpointError, ConfigError, UsageError, quoted
from bridle.models.build import build_encoder, build_first_tokenizer, build_later_tokenizer
from bridle.models.encoder import Encoder
from bridle.models.tokenizer import Tokenizer
from bridle.report.runs import mapping, read_run
from bridle.runs.checkpoint import EXPORTED, Loaded
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.train.algorithm1 import Turn, finished_phases, has_later_tokenizer, load_modules

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

    def modules(self) -> dict[str, nn.Module]:
        """The networks by name."""
        named: dict[str, nn.Module | None] = {"encoder": self.encoder, "tokenizer": self.own_tokenizer}
        return {name: module for name, module in named.items() if module is not None}


def restore_trained(config: Config, loaded: Loaded, facts: Facts) -> Trained:
    """Encoder and tokenizer as a checkpoint or an exported folder holds them; nothing else is built."""
    turn, tokenizer = Turn(facts.iteration, facts.phase), None
    if "tokenizer" in facts.parts:
        later = has_later_tokenizer(config, turn)
        tokenizer = build_later_tokenizer(config, iteration=turn.iteration) if later else build_first_tokenizer(config)
    trained = Trained(build_encoder(config), tokenizer, config, facts)
    load_modules(trained.modules(), loaded)
    return trained


def facts_of_run(folder: Path, loaded: Loaded, config: Config) -> Facts:
    """What a run directory tells of one of its checkpoints."""
    iteration, run = int(loaded.state["iteration"]), read_run(folder)
    evaluation = next((entry for entry in run.evaluations if entry.get("iteration") == iteration), None)
    named = config.data.manifest or config.data.root
    held = {name.partition(".")[0] for name in loaded.tensors["model"]}
    return Facts(
        iteration=iteration,
        phase=str(loaded.state["phase"]),
        parts=tuple(part for part in ("encoder", "tokenizer") if part in held),
        norms_start=loaded.state["norms_start"],
        baselines=mapping(run.results.get("baselines")),
        evaluation=evaluation,
        probed_on=str(mapping(mapping(run.results.get("protocol")).get("probe")).get("on", "test")),
        data=None if named is None else PurePath(named).name,
        made_with={key: str(run.environment[key]) for key in ("bridle", "torch") if key in run.environment},
    )


def facts_of_nets(tokenizer: Tokenizer | None) -> Facts:
    """What can be said of networks that come from no folder: a cold start belongs to iteration 1."""
    parts = ("encoder",) if tokenizer is None else ("encoder", "tokenizer")
    return Facts(iteration=2 if tokenizer is not None and tokenizer.is_trained else 1, phase="encoder", parts=parts)


def read_facts(state: Mapping[str, Any], folder: Path) -> Facts:
    """Facts from a folder's config.json; keys that a later version of bridle may add are left alone."""
    known = {key: value for key, value in state.items() if key in Facts._fields}
    try:
        facts = Facts(**known)
        return facts._replace(parts=tuple(facts.parts), iteration=int(facts.iteration), phase=str(facts.phase))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / EXPORTED}: not written by bridle ({error}); export the model again."
        ) from error


def read_trained(folder: Path, *, iteration: int | None = None) -> Trained:
    """Encoder and tokenizer of an exported folder, or of a run's last finished encoder phase that is whole."""
    if (folder / EXPORTED).is_file():
        return _read_exported(folder, iteration)
    if not (folder / "config.yaml").is_file():
        raise UsageError(
            f"{folder}: not a run directory (no config.yaml) and not an exported model (no {EXPORTED}); give the "
            "folder that --out named."
        )
    config = read_config(folder / "config.yaml")
    ends = finished_phases(folder)
    if iteration is not None:
        ends = [path for path in ends if f"-iter{iteration}-" in path.name]
    problems = []
    for path in reversed(ends):
        try:
            loaded = load_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            warnings.warn(f"{error} Using an earlier checkpoint if there is one.", stacklevel=3)
            continue
        return restore_trained(config, loaded, facts_of_run(folder, loaded, config))
    if problems:
        raise CheckpointError(" ".join(problems))
    which = "" if iteration is None else f" of iteration {iteration}"
    raise UsageError(
        f"{folder}: no finished encoder phase{which} yet; run `bridle pretrain` with the same arguments to go on."
    )


def _read_exported(folder: Path, iteration: int | None) -> Trained:
    require_format(folder)
    loaded = load_checkpoint(folder)
    facts = read_facts(loaded.state, folder)
    if iteration not in (None, facts.iteration):
        raise UsageError(
            f"{folder}: an exported model of iteration {facts.iteration}; it has no iteration {iteration}."
        )
    try:
        config = read_config(folder / "config.yaml")
    except ConfigError as error:
        raise CheckpointError(
            f"{quoted(folder)} was written by bridle {quoted(loaded.state.get('bridle'))} and this is bridle "
            f"{version('bridle')}, which cannot use its settings ({error}); install that version or a newer one."
        ) from error
    return restore_trained(config, loaded, facts)


def require_format(folder: Path) -> None:
    """CheckpointError if an exported folder is of a format that this version does not know."""
    try:
        stored = json.loads((folder / EXPORTED).read_text(encoding="utf-8"))
        found = stored["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / EXPORTED}: damaged or not written by bridle ({type(error).__name__}); get the folder again."
        ) from error
    if found != FORMAT:
        raise CheckpointError(
            f"{quoted(folder)} has format {quoted(found)}, this bridle {version('bridle')} reads format {FORMAT}; "
            f"it was written by bridle {quoted(stored.get('bridle'))}: install that version or a newer one."
        )
