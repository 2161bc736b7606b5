"""RunFolder: the names of all files of a run, and the only code that reads and writes them.

    RUN/config.yaml            the resolved config
    RUN/environment.json       versions and the command
    RUN/metrics.jsonl          a row of figures every few steps
    RUN/costs.jsonl            CPU seconds at every checkpoint
    RUN/trackers.json          the id of the run in each tracker
    RUN/quarantine.jsonl       samples that could not be used
    RUN/encoder_start.json     what was taken from encoder.weights
    RUN/checkpoints/           see `runs.checkpoint`
    RUN/results.json           evaluations while training; likewise probe, knn, finetune, codebooks and curve
    RUN/finetune/START-DIGITS/ runs of `bridle finetune`, which have the same files
    RUN/detokenizer/iterR/     runs of `bridle detokenizer`, likewise
    RUN/cache                  features that can be computed again
    RUN/run.lock               held by the command that writes

An exported folder has config.yaml, results files and one checkpoint, which is the folder itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bridle import files
from bridle.config import Config, differences, dump_config, read_config
from bridle.config.editor import HEADER
from bridle.data.loading.loader import BadSample
from bridle.errors import CheckpointError, ConfigError, UsageError
from bridle.machine import environment
from bridle.runs import checkpoint
from bridle.runs.callbacks import Row, append_row, is_up_to

Kind = Literal["results", "probe", "knn", "finetune", "codebooks", "curve"]
CONFIG = "config.yaml"
# Keys that may differ between the command that began a run and the one that continues it.
FREE_KEYS = (
    *("summary", "log:", "runtime.", "data.workers", "data.root", "data.manifest", "data.views"),
    *("probe.", "finetune.", "detokenizer."),
    "data.bad_share",  # the message about too many bad files asks to raise it
)
# Keys that lengthen a finished run.
LENGTH_KEYS = ("encoder_phase.steps:", "encoder_phase.epochs:", "max_steps:")


@dataclass(frozen=True)
class RunFolder:
    """A run directory or, where that makes sense, an exported folder."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    # --- what it is ---------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Is there a config.yaml, as every run and every exported folder has?"""
        return (self.path / CONFIG).is_file()

    def is_exported(self) -> bool:
        """Is this the folder of an exported model, which is one checkpoint of some networks?"""
        return (self.path / checkpoint.EXPORTED).is_file() and (self.path / checkpoint.MANIFEST).is_file()

    def export_facts(self) -> dict[str, Any]:
        """Facts about the model of an exported folder, from its config.json; empty for a run."""
        return checkpoint.read_state_file(self.path / checkpoint.EXPORTED) if self.is_exported() else {}

    def prepare(self, config: Config) -> None:
        """Create the directory, or check that it holds the run of this config. Changes nothing in it."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self}: exists and is not a directory; choose another --out.")
        if self.is_exported():
            raise UsageError(f"{self}: holds an exported model and no run; choose another --out.")
        if (self.path / CONFIG).exists():
            self.require_same(config)
        elif self.path.exists() and any(not _is_ours(path.name) for path in self.path.iterdir()):
            raise UsageError(f"{self}: not empty and not a run of bridle; choose another --out.")
        with files.writing(self.path, remedy="Choose another --out."):
            self.path.mkdir(parents=True, exist_ok=True)

    def lock(self) -> AbstractContextManager[None]:
        """Hold the directory for this command; UsageError if another one does."""
        return files.locked_folder(self.path)

    # --- settings -----------------------------------------------------------------------------------------------------

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's config, with overrides; UsageError where there is no run."""
        if not self.exists():
            raise UsageError(f"{self}: not a run directory (no {CONFIG}); give the folder that --out named.")
        return read_config(self.path / CONFIG, overrides)

    def config_text(self) -> str:
        """config.yaml as it is; empty where there is none."""
        return (self.path / CONFIG).read_text(encoding="utf-8", errors="replace") if self.exists() else ""

    def write_settings(self, config: Config, *, command: str | None = None) -> None:
        """Write config.yaml and environment.json; the caller holds the lock."""
        with files.writing(self.path, remedy="Choose another --out."):
            files.write_text(self.path / CONFIG, HEADER + dump_config(config))
            self.write_json("environment.json", environment(command))

    def environment(self) -> dict[str, Any]:
        """Versions the run was made with; empty where they are not known."""
        try:
            return files.read_json(self.path / "environment.json")
        except CheckpointError:
            return {}

    def lengthens(self, wanted: Config) -> bool:
        """Does `wanted` differ from the finished run in this directory by nothing but a longer last encoder phase?"""
        if not self.exists() or not self.is_trained((own := self.config()).schedule.iterations):
            return False
        changed = [line for line in differences(own, wanted) if not line.startswith(FREE_KEYS)]
        if not changed or not all(line.startswith(LENGTH_KEYS) for line in changed):
            return False
        before, after = own.encoder_phase, wanted.encoder_phase
        if after.steps is not None:
            return min(after.steps, wanted.max_steps or after.steps) > self.steps_done()
        grows = before.epochs is not None and after.epochs is not None and after.epochs > before.epochs
        return grows or (own.max_steps is not None and (wanted.max_steps or own.max_steps + 1) > own.max_steps)

    def steps_done(self) -> int:
        """Steps of the last encoder phase that has ended; 0 if none has."""
        ends = [] if self.is_exported() else self.encoder_checkpoints(ends=True)
        return checkpoint.CheckpointName.of(ends[-1]).step if ends else 0

    def set_aside_results(self) -> str:
        """Move what was measured of a run that is lengthened to RUN/earlier/steps-N; returns that folder."""
        earlier = self.path / "earlier" / f"steps-{self.steps_done()}"
        earlier.mkdir(parents=True, exist_ok=True)
        measured = ("results*.json", "probe*.json", "knn*.json", "finetune*", "codebooks*.json", "detokenizer")
        for path in [path for pattern in measured for path in self.path.glob(pattern)]:
            shutil.move(path, earlier / path.name)
        return str(earlier)

    def require_same(self, wanted: Config) -> None:
        """ConfigError if `wanted` is another experiment than the one in this directory, or than a longer one."""
        changed = [line for line in differences(self.config(), wanted) if not line.startswith(FREE_KEYS)]
        if changed and not self.lengthens(wanted):
            shown = "; ".join(changed[:4]) + ("; …" if len(changed) > 4 else "")
            raise ConfigError(
                f"{self} holds a run with another config ({shown}); use another --out, or the config it began with."
            )

    # --- logs ---------------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl."""
        return files.read_lines(self.path / "metrics.jsonl")

    def add_metrics(self, row: Row) -> None:
        """Append a row to metrics.jsonl."""
        append_row(self.path / "metrics.jsonl", row, failpoint="metrics.append")

    def rewind_metrics(self, *, phase_index: int, step: int) -> None:
        """Drop rows after `step` of phase `phase_index`, so that a resumed run has neither gaps nor repeats."""
        kept = [row for row in self.metrics() if is_up_to(row, phase_index, step)]
        path = self.path / "metrics.jsonl"
        with files.writing(path):
            files.write_text(path, "".join(map(files.json_line, kept)))

    def sync_metrics(self) -> None:
        """Make metrics.jsonl safe on the disk: after a power cut a checkpoint must not find fewer rows than it had."""
        path = self.path / "metrics.jsonl"
        with files.writing(path):
            if path.exists():
                files.sync(path)

    def costs(self) -> list[dict[str, Any]]:
        """Rows of costs.jsonl."""
        return files.read_lines(self.path / "costs.jsonl")

    def add_cost(self, row: Row) -> None:
        """Append the CPU seconds at a checkpoint; not in it, whose bits only the experiment decides."""
        append_row(self.path / "costs.jsonl", row)

    def cpu_seconds_at(self, *, phase_index: int, step: int) -> float | None:
        """CPU seconds of training up to a step: as noted with its checkpoint, or else with the last row before it."""
        noted = [row for row in self.costs() if (row.get("phase_index"), row.get("step")) == (phase_index, step)]
        before = [row for row in self.metrics() if is_up_to(row, phase_index, step)]
        for row in (*noted[-1:], *before[-1:]):
            if isinstance(found := row.get("cpu_seconds"), int | float):
                return float(found)
        return None

    @property
    def quarantine(self) -> Path:
        """The list of samples that could not be used."""
        return self.path / "quarantine.jsonl"

    def quarantined(self) -> list[BadSample]:
        """Samples listed in quarantine.jsonl; rows of another form are left out."""
        kinds = {"index": int, "path": str, "reason": str}
        rows = files.read_lines(self.quarantine)
        sound = [row for row in rows if all(isinstance(row.get(key), kind) for key, kind in kinds.items())]
        return [BadSample(*(row[key] for key in kinds)) for row in sound]

    def add_quarantined(self, sample: BadSample, *, phase: str) -> None:
        """List a sample that could not be used."""
        row = {"index": sample.index, "path": sample.name, "reason": sample.reason, "phase": phase}
        append_row(self.quarantine, row, failpoint="quarantine.append")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def checkpoint_paths(self) -> list[Path]:
        """All checkpoints, oldest first; an exported folder is one itself."""
        return [self.path] if self.is_exported() else checkpoint.checkpoint_folders(self.checkpoints)

    def encoder_checkpoints(self, *, ends: bool = False) -> list[Path]:
        """Checkpoints of encoder (or joint) phases, oldest first; with `ends` only those at the end of one."""
        if self.is_exported():
            return [self.path]
        named = self._named_checkpoints()
        return [path for path, name in named.items() if name.phase != "tokenizer" and (name.is_end or not ends)]

    def _named_checkpoints(self) -> dict[Path, checkpoint.CheckpointName]:
        return {path: checkpoint.CheckpointName.of(path) for path in checkpoint.checkpoint_folders(self.checkpoints)}

    def encoder_ends(self, iteration: int | None = None) -> list[Path]:
        """Checkpoints at the ends of encoder phases (of one iteration), oldest first; UsageError if there are none."""
        ends = self.encoder_checkpoints(ends=True)
        if iteration is not None and self.is_exported():
            if (held := self.export_facts()["iteration"]) != iteration:
                raise UsageError(f"{self}: an exported model of iteration {held}; it has no iteration {iteration}.")
        elif iteration is not None:
            ends = [path for path in ends if checkpoint.CheckpointName.of(path).iteration == iteration]
        if not ends:
            which = "" if iteration is None else f" of iteration {iteration}"
            raise UsageError(
                f"{self}: no finished encoder phase{which} yet; run `bridle pretrain` with the same arguments to go on."
            )
        # Of an iteration that was lengthened, the last one counts.
        if self.is_exported():
            return ends
        return list({checkpoint.CheckpointName.of(path).iteration: path for path in ends}.values())

    def last_ends(self) -> dict[int, Path]:
        """For each iteration the checkpoint at the end of its last finished phase."""
        if self.is_exported():
            return {int(self.export_facts()["iteration"]): self.path}
        return {name.iteration: path for path, name in self._named_checkpoints().items() if name.is_end}  # oldest first

    def is_trained(self, iterations: int) -> bool:
        """Has the last of so many iterations ended with a checkpoint that is whole? Reads no tensor into memory."""
        if not self.exists() or self.is_exported():
            return False
        ends = self.encoder_checkpoints(ends=True)
        last = [path for path in ends if checkpoint.CheckpointName.of(path).iteration == iterations]
        return bool(last) and checkpoint.find_damage(last[-1]) is None

    # --- other files --------------------------------------------------------------------------------------------------

    def results(self, kind: Kind = "results") -> Path:
        """The file with the evaluations of one kind."""
        return self.path / f"{kind}.json"

    def write_json(self, name: str, value: object) -> Path:
        """Write a JSON file of the run, whole or not at all; returns its path."""
        checkpoint.write_json(self.path / name, value)
        return self.path / name

    @property
    def encoder_start(self) -> Path:
        """What was taken from encoder.weights."""
        return self.path / "encoder_start.json"

    def finetune(self, name: str = "") -> RunFolder:
        """The folder of one fine-tuning, or of all of them."""
        return RunFolder(self.path / "finetune" / name)

    def detokenizers(self) -> Path:
        """The folder of all detokenizers."""
        return self.path / "detokenizer"

    def detokenizer(self, iteration: int) -> RunFolder:
        """The folder of the detokenizer for the codes of one iteration."""
        return RunFolder(self.detokenizers() / f"iter{iteration}")

    @property
    def cache(self) -> Path:
        """Features that can be computed again."""
        return self.path / "cache"


def _is_ours(name: str) -> bool:
    """Files that a command leaves which is killed before it writes config.yaml."""
    return name in (files.LOCK, f".{CONFIG}.tmp")
