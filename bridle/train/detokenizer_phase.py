"""Training a detokenizer: the tokenizer is frozen, every sample is decoded from a random number of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bridle.config import Config
from bridle.data.loading.loader import Batch
from bridle.errors import UsageError, quoted
from bridle.models.build import Networks, build_detokenizer
from bridle.models.detokenizer import Detokenizer, prefix_vectors, reconstruction_loss
from bridle.models.tokenizer import Tokenizer
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RESULT
from bridle.seeding import generator
from bridle.train.algorithm1 import fit_only_phase, load_modules
from bridle.train.draws import Draws
from bridle.train.engine import Phase, StepResult
from bridle.train.run import Run


@dataclass
class DetokenizerNets(Networks):
    """The networks of a detokenizer's training; the tokenizer is only read and not saved again."""

    detokenizer: Detokenizer
    tokenizer: Tokenizer

    def modules(self) -> dict[str, nn.Module]:
        """The detokenizer alone."""
        return {"detokenizer": self.detokenizer}


def train_detokenizer(run: Run[DetokenizerNets], *, iteration: int, scales: int) -> Detokenizer:
    """Train to the end, from the beginning or from the last checkpoint, and return the detokenizer."""
    run.nets.tokenizer.requires_grad_(False).eval().to(run.machine.device)
    fit_only_phase(run, lambda: detokenizer_phase(run, iteration=iteration, scales=scales))
    return run.nets.detokenizer.requires_grad_(False).eval()


def detokenizer_phase(run: Run[DetokenizerNets], *, iteration: int, scales: int) -> Phase:
    """Minimise the reconstruction loss of the normalised input from the first m of M stages, m drawn per sample."""
    nets, settings, samples = run.nets, run.config.detokenizer, len(run.source)
    geometry, quantizer = run.config.geometry.build(), nets.tokenizer.quantizer
    steps = min(settings.step_count(samples), run.config.max_steps or settings.step_count(samples))

    def step(batch: Batch, draws: Draws) -> StepResult:
        stages = draw_stages(run, draws).to(batch.x.device)[batch.rows]
        with torch.no_grad(), torch.autocast(batch.x.device.type, enabled=False):
            codes = nets.tokenizer.tokenize(batch.x, valid=batch.valid)  # (B, T, M)
            q = prefix_vectors(quantizer, codes, stages)  # (B, T, Dq)
        guess = nets.detokenizer(q, stages=stages, valid=batch.valid)  # (B, C, *input)
        loss = reconstruction_loss(guess, batch.x, geometry=geometry, valid=batch.valid, scales=scales)
        return StepResult(loss, None, {})

    def draw_stages(run: Run[DetokenizerNets], draws: Draws) -> Tensor:
        """(batch,) numbers of stages for the whole global batch, 1 to M, all equally likely."""
        random = generator(run.config.seed, draws.phase.key, draws.step, "stages")
        return torch.randint(1, quantizer.codebooks + 1, (settings.batch,), generator=random)

    return Phase(
        index=0,
        iteration=iteration,
        name="detokenizer",
        steps=steps,
        warmup=min(settings.warmup_count(samples), steps),
        settings=settings,
        trained=nets.modules(),
        step=step,
        has_codes=False,
    )


def read_detokenizer(
    folder: Path, config: Config, iteration: int, *, device: torch.device, name: str | Path | None = None
) -> Detokenizer:
    """The trained detokenizer of a run's iteration; UsageError names the command that trains one.

    `name` is that of the model, where it was not given by its folder.
    """
    name = name or folder
    run = RunFolder(folder).detokenizer(iteration)
    ends = run.encoder_checkpoints(ends=True) if (run.path / RESULT).is_file() else []
    if not ends:
        raise UsageError(
            f"{quoted(name)}: no detokenizer for the codes of iteration {iteration}; train one with "
            f"`bridle detokenizer {quoted(name)}`."
        )
    own = run.config()
    detokenizer = build_detokenizer(config.model_copy(update={"detokenizer": own.detokenizer}), iteration=iteration)
    load_modules({"detokenizer": detokenizer}, load_checkpoint(ends[-1]))
    return detokenizer.requires_grad_(False).eval().to(device)
