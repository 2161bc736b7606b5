"""Runs of a grid that begin alike: their first iteration is trained once and copied.

A phase is a function of config and seed (docs/design.md, "Randomness and order"), so two runs whose settings differ
only in what comes after iteration 1 are the same, bit for bit, up to its end. The second of them may go on from there,
as it would after an interruption.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bridle.config import Config, differences, with_absolute_paths
from bridle.errors import BridleError
from bridle.files import read_json, replacing_folder
from bridle.runs.folder import RunFolder
from bridle.runs.results import Results, read_results
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
            own = _same_beginning(config, RunFolder(lender))
            if own is not None:
                _copy(own, RunFolder(lender), folder)
                return lender
    return None


def lender_of(folder: Path) -> str | None:
    """The name of the run whose first iteration this one has."""
    path = folder / LENDER
    return str(read_json(path)["run"]) if path.is_file() else None


def _same_beginning(config: Config, lender: RunFolder) -> Config | None:
    """The config with the lender's measured normalisation, if the lender's first iteration is over and also ours."""
    stored = lender.config()
    if config.data.mean is None and stored.data.mean is not None and stored.data.std is not None:
        config = with_statistics(config, stored.data.mean, stored.data.std)
    # A longer lender may be a borrower itself, and its cost is not that of its first iteration.
    same = stored.schedule.iterations == 1 and all(line.startswith(LATER) for line in differences(stored, config))
    if config.runtime.keep_finished:  # then the checkpoints on the way are wanted too
        same = same and not any(line.startswith(KEPT) for line in differences(stored, config))
    return config if same and _first_results(lender).evaluations and lender.encoder_checkpoints(ends=True) else None


def _first_results(lender: RunFolder) -> Results:
    """The results of a run with nothing but its first iteration."""
    found = read_results(lender.results())
    return found.model_copy(update={"evaluations": tuple(entry for entry in found.evaluations if entry.iteration == 1)})


def _copy(config: Config, lender: RunFolder, folder: Path) -> None:
    """Make `folder` a run whose first iteration and the evaluation after it are done."""
    ends = lender.encoder_checkpoints(ends=True)
    paths = lender.checkpoint_paths() if config.runtime.keep_finished else ends[:1]
    with replacing_folder(folder) as temporary:
        target = RunFolder(temporary)
        lender.copy_first_phase(target, config, paths, _first_results(lender).model_dump(mode="json"))
        target.write_json(LENDER, {"run": lender.path.name})
