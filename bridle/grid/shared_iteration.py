"""Runs of a grid that begin alike: their first iteration is trained once and copied.

A phase is a function of config and seed (docs/design.md, "Randomness and order"), so two runs whose settings differ
only in what comes after iteration 1 are the same, bit for bit, up to its end. The second of them may go on from there,
as it would after an interruption.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridle.config import Config, differences, dump_config, read_config, with_absolute_paths
from bridle.errors import BridleError
from bridle.files import read_json, read_lines, replacing_folder
from bridle.runs.checkpoint import LATEST, checkpoint_folders, write_json
from bridle.runs.metrics import COSTS, append_row
from bridle.train.algorithm1 import STARTED
from bridle.train.run import with_statistics

LENDER = "begun.json"  # in a run: whose first iteration it has
KEPT = ("runtime.checkpoint_every", "runtime.keep")  # which checkpoints are there; keep_finished too
# Settings that iteration 1 does not know of, or that change nothing in it.
LATER = (
    *("schedule.iterations", "schedule.tokenizer", "schedule.encoder_restart", "tokenizer_phase.", "estimator."),
    *("loss.commitment", "loss.cosine", "loss.centre_teacher", "loss.teacher_block", "quantizer.reset_every"),
    *("summary", "data.workers", *KEPT),
)


def borrow_beginning(config: Config, folder: Path, lenders: Iterable[Path]) -> Path | None:
    """Make `folder` the run of `config` as it stands after iteration 1, by the first lender that began so.

    Returns the lender, or None where there is none or the run has begun by itself.
    """
    if folder.exists() or config.schedule.iterations < 2 or config.schedule.mode != "interleaved":
        return None
    config = with_absolute_paths(config)  # as a run keeps them
    for lender in lenders:
        with suppress(BridleError, OSError, KeyError):  # not finished, or not a run at all: the next one may do
            own = _same_beginning(config, lender)
            if own is not None:
                _copy(own, lender, folder)
                return lender
    return None


def lender_of(folder: Path) -> str | None:
    """The name of the run whose first iteration this one has."""
    path = folder / LENDER
    return str(read_json(path)["run"]) if path.is_file() else None


def _same_beginning(config: Config, lender: Path) -> Config | None:
    """The config with the lender's measured normalisation, if the lender's first iteration is over and also ours."""
    stored = read_config(lender / "config.yaml")
    if config.data.mean is None and stored.data.mean is not None and stored.data.std is not None:
        config = with_statistics(config, stored.data.mean, stored.data.std)
    # A longer lender may be a borrower itself, and its cost is not that of its first iteration.
    same = stored.schedule.iterations == 1 and all(line.startswith(LATER) for line in differences(stored, config))
    if config.runtime.keep_finished:  # then the checkpoints on the way are wanted too
        same = same and not any(line.startswith(KEPT) for line in differences(stored, config))
    return config if same and _first_evaluation(lender) and _first_end(lender) is not None else None


def _first_evaluation(lender: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_json(lender / "results.json")["evaluations"] if entry["iteration"] == 1]


def _first_end(lender: Path) -> Path | None:
    found = [path for path in checkpoint_folders(lender / "checkpoints") if path.name.endswith("-end")]
    return found[0] if found and found[0].name.startswith("p0000-iter1-encoder-") else None


def _copy(config: Config, lender: Path, folder: Path) -> None:
    """Everything a run has when its first iteration and the evaluation after it are done; published by renaming."""
    end = _first_end(lender)
    assert end is not None  # asked before
    on_the_way = checkpoint_folders(lender / "checkpoints") if config.runtime.keep_finished else [end]
    with replacing_folder(folder) as temporary:
        for checkpoint in on_the_way:
            shutil.copytree(checkpoint, temporary / "checkpoints" / checkpoint.name)
        write_json(temporary / "checkpoints" / LATEST, {"checkpoint": end.name})
        (temporary / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        write_json(
            temporary / "results.json", read_json(lender / "results.json") | {"evaluations": _first_evaluation(lender)}
        )
        for name in ("metrics.jsonl", COSTS):
            for row in read_lines(lender / name):
                if row["phase_index"] == 0:
                    append_row(temporary / name, row, place="metrics.append")
        for row in read_lines(lender / "quarantine.jsonl"):
            append_row(temporary / "quarantine.jsonl", row, place="quarantine.append")
        if (lender / STARTED).is_file():
            shutil.copy(lender / STARTED, temporary)
        write_json(temporary / LENDER, {"run": lender.name})
