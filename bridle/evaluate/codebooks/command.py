"""`bridle codebooks`: the health of every tokenizer of a run over its data, written to codebooks.json.

The tokenizer of an iteration is the one its last finished phase holds: that of the encoder phase, where it is frozen,
or of the tokenizer phase, where the encoder phase is still to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridle.config import Config, differences
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.loading.loader import Batch, Loader
from bridle.data.sources import Source
from bridle.errors import CheckpointError, ConfigError, UsageError
from bridle.evaluate.codebooks.advice import in_force
from bridle.evaluate.codebooks.health import code_agreement, codebook_health, verdicts, with_start_norms
from bridle.machine import Machine
from bridle.models.build import Nets
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.results import Evaluation, results_header, write_record
from bridle.seeding import generator
from bridle.train.algorithm1 import restore_nets
from bridle.train.engine import move
from bridle.train.run import open_machine

MAY_CHANGE = ("data.root", "data.manifest", "data.workers", "data.cache_mb", "runtime.", "seed")
BATCH = 256
STEADY_ITEMS = 1024  # samples on which small changes are tried: each costs another pass for every change


class Ended(NamedTuple):
    """The checkpoint that holds an iteration's tokenizer."""

    iteration: int
    path: Path


def examine_run(
    folder: Path, overrides: Sequence[str] = (), *, iteration: int | None = None, items: int | None = None
) -> Path:
    """Examine the codebooks of every iteration, or of one, on at most `items` samples; the path of codebooks.json."""
    run = RunFolder(folder)
    trained, config = run.config(), run.config(overrides)
    for line in differences(trained, config):
        if not line.startswith(MAY_CHANGE):
            raise ConfigError(f"{line}: this cannot be changed here; it may change {', '.join(MAY_CHANGE)}.")
    ends = ended_iterations(folder, iteration)
    source = open_data(config).train
    machine, progress = open_machine(config.runtime, precision="fp32"), ProgressLine()
    found = []
    for ended in ends:
        progress.note(f"examining {ended.path.name}")
        try:
            nets = restore_nets(trained, load_checkpoint(ended.path))
        except CheckpointError as error:
            progress.note(f"left out: {error}")
            continue
        found.append(examine(nets, config, source, machine, ended=ended, items=items))
    if not found:
        raise CheckpointError(f"{run.checkpoints}: none of the finished phases can be read.")
    write_record(
        run.results("codebooks"), results_header(config, folder).model_copy(update={"evaluations": tuple(found)})
    )
    return run.results("codebooks")


def ended_iterations(folder: Path, iteration: int | None = None) -> list[Ended]:
    """For each iteration (or the one asked for) its last finished phase."""
    last = RunFolder(folder).last_ends()
    if not last:
        raise UsageError(f"{folder}: no finished phase yet; run `bridle pretrain` with the same arguments to go on.")
    if iteration is not None and iteration not in last:
        have = ", ".join(map(str, sorted(last)))
        raise UsageError(f"--iteration {iteration}: {folder} has no finished phase of it; it has iteration {have}.")
    return [Ended(r, path) for r, path in sorted(last.items()) if iteration in (None, r)]


def examine(
    nets: Nets, config: Config, source: Source, machine: Machine, *, ended: Ended, items: int | None
) -> Evaluation:
    """One entry of codebooks.json: everything that is known of each stage, and the verdicts."""
    for module in nets.modules().values():
        module.to(machine.device).eval()
    loader = _loader(config, source)
    count = min(items or len(source), len(source))
    classes = None if source.classes is None else len(source.classes)
    bad: dict[int, str] = {}

    def batches(samples: int) -> Iterator[Batch]:
        for batch in loader.first(samples, rows=BATCH):
            bad.update({sample.index: sample.name for sample in batch.bad})
            yield move(batch, machine.device)

    stages = codebook_health(nets.tokenizer, batches(count), classes=classes)
    draws = generator(config.seed, "codebooks", "noise")
    steady = code_agreement(nets.tokenizer, batches(min(count, STEADY_ITEMS)), generator=draws)
    stages = [
        stage.model_copy(update={"agreement": kept})
        for stage, kept in zip(with_start_norms(stages, nets.norms_start), steady, strict=True)
    ]
    return Evaluation(
        iteration=ended.iteration,
        checkpoint=ended.path.name,
        samples=count,
        unusable=len(bad),
        codebooks=tuple(stages),
        verdicts=tuple(verdicts(stages, in_force(config, nets.tokenizer))),
    )


def _loader(config: Config, source: Source) -> Loader:
    data = config.data
    assert data.mean is not None  # a run's config always has them
    assert data.std is not None
    return Loader(
        source=source,
        seed=config.seed,
        phase="codebooks",
        batch=BATCH,
        mean=data.mean,
        std=data.std,
        workers=data.workers,
    )
