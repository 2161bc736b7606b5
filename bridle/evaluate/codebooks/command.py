"""`bridle codebooks`: the health of every tokenizer of a run over its data, written to codebooks.json.

The tokenizer of an iteration is the one its last finished phase holds: that of the encoder phase, where it is frozen,
or of the tokenizer phase, where the encoder phase is still to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bridle.config import Config
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.loading.loader import Batch, Loader
from bridle.data.sources import Source, Splits
from bridle.errors import CheckpointError, UsageError, quoted
from bridle.evaluate.codebooks.diagnosis import verdicts
from bridle.evaluate.codebooks.health import code_agreement, codebook_health, with_start_norms
from bridle.evaluate.codebooks.shift import shift_verdicts
from bridle.evaluate.reconstruction.rate import rate_run
from bridle.evaluate.transfer import require_unchanged
from bridle.machine import Machine
from bridle.models.build import require_tokenizer
from bridle.models.tokenizer import Tokenizer
from bridle.runs.checkpoint import Loaded
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RESULT
from bridle.runs.results import Evaluation, results_header, write_record
from bridle.seeding import generator
from bridle.train.algorithm1 import restore_frozen
from bridle.train.engine import move
from bridle.train.run import open_machine

MAY_CHANGE = ("data.root", "data.manifest", "data.workers", "data.cache_mb", "runtime.", "seed")
BATCH = 256
STEADY_ITEMS = 1024  # samples on which small changes are tried: each costs another pass for every change


def examine_run(
    folder: Path, overrides: Sequence[str] = (), *, iteration: int | None = None, items: int | None = None
) -> Path:
    """Examine the codebooks of every iteration, or of one, on at most `items` samples; the path of codebooks.json."""
    run = RunFolder(folder)
    config = run.config(overrides)
    require_unchanged(run.config(), config, MAY_CHANGE, reason="this cannot be changed here")
    ends = ended_iterations(folder, iteration)
    splits = open_data(config)
    machine, progress = open_machine(config.runtime, precision="fp32"), ProgressLine()
    found = []
    for path in ends.values():
        progress.note(f"examining {path.name}")
        try:
            loaded = load_checkpoint(path)
            tokenizer = restore_frozen(config, loaded)[1]
        except CheckpointError as error:
            progress.note(f"left out: {error}")
            continue
        found.append(examine(loaded, require_tokenizer(tokenizer), config, splits, machine, items=items))
    if not found:
        raise CheckpointError(f"{run.checkpoints}: none of the finished phases can be read.")
    header = results_header(config, folder)
    write_record(run.results("codebooks"), header.model_copy(update={"evaluations": tuple(found)}))
    return run.results("codebooks")


def reconstruct_run(
    folder: Path, overrides: Sequence[str] = (), *, iteration: int | None = None, items: int | None = None
) -> list[Path]:
    """Measure what decoding loses, for every iteration with a detokenizer, or for one; the paths of rate.json."""
    run = RunFolder(folder)
    config = run.config(overrides)
    require_unchanged(run.config(), config, MAY_CHANGE, reason="this cannot be changed here")
    ends, progress, written = ended_iterations(folder, iteration), ProgressLine(), []
    trained = {number: path for number, path in ends.items() if (run.detokenizer(number).path / RESULT).is_file()}
    if not trained:
        raise UsageError(f"{folder}: no detokenizer is trained; train one with `bridle detokenizer {quoted(folder)}`.")
    for number, path in trained.items():
        progress.note(f"decoding held-out items from the codes of iteration {number}")
        tokenizer = require_tokenizer(restore_frozen(config, load_checkpoint(path))[1])
        written.append(rate_run(folder, config, tokenizer, iteration=number, items=items))
    return written


def ended_iterations(folder: Path, iteration: int | None = None) -> dict[int, Path]:
    """For each iteration (or the one asked for) the checkpoint of its last finished phase."""
    last = RunFolder(folder).last_ends()
    if not last:
        raise UsageError(f"{folder}: no finished phase yet; run `bridle pretrain` with the same arguments to go on.")
    if iteration is not None and iteration not in last:
        have = ", ".join(map(str, sorted(last)))
        raise UsageError(f"--iteration {iteration}: {folder} has no finished phase of it; it has iteration {have}.")
    return {number: path for number, path in sorted(last.items()) if iteration in (None, number)}


def examine(
    loaded: Loaded, tokenizer: Tokenizer, config: Config, splits: Splits, machine: Machine, *, items: int | None
) -> Evaluation:
    """One entry of codebooks.json: everything that is known of each stage, and the verdicts."""
    tokenizer.to(machine.device).eval()
    (mean, std), workers = config.data.statistics, config.data.workers
    source, bad = splits.train, set[int]()

    def batches(samples: int, source: Source = source) -> Iterator[Batch]:
        loader = Loader(
            source=source, seed=config.seed, phase="codebooks", batch=BATCH, mean=mean, std=std, workers=workers
        )
        for batch in loader.first(samples, rows=BATCH):
            bad.update(sample.index for sample in batch.bad if source is splits.train)
            yield move(batch, machine.device)

    count = min(items or len(source), len(source))
    classes = None if source.classes is None else len(source.classes)
    stages = codebook_health(tokenizer, batches(count), classes=classes)
    draws = generator(config.seed, "codebooks", "noise")
    steady = code_agreement(tokenizer, batches(min(count, STEADY_ITEMS)), generator=draws)
    stages = [
        stage.model_copy(update={"agreement": kept})
        for stage, kept in zip(with_start_norms(stages, loaded.state["norms_start"]), steady, strict=True)
    ]
    judged = verdicts(stages, config, is_trained=tokenizer.is_trained)
    if (test := splits.test) is not None:
        seen, held_out = batches(min(count, STEADY_ITEMS)), batches(min(len(test), STEADY_ITEMS), test)
        judged = [*judged, *shift_verdicts(tokenizer, seen, held_out)]
    return Evaluation(
        iteration=int(loaded.state["iteration"]),
        checkpoint=loaded.path.name,
        samples=count,
        unusable=len(bad),
        codebooks=tuple(stages),
        verdicts=tuple(judged),
    )
