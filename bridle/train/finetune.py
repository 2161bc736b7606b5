"""Fine-tuning as a phase: encoder and head learn from labels, by the engine that pretrains.

Shapes: x (B, C, *input), labels (B,) or shares (B, K), logits (B, K). Layer l of an encoder of depth L learns at

    rate · layer_decay^(L + 1 − l)        l = 0 the embedding, l = 1 … L the blocks, L + 1 the final norm and the head
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bridle.data.loading.loader import Batch
from bridle.errors import DataError
from bridle.models.build import Networks
from bridle.models.classifier import Classifier, classification_loss
from bridle.models.measure import measure_inputs
from bridle.seeding import generator
from bridle.train.algorithm1 import fit_only_phase
from bridle.train.draws import Draws
from bridle.train.engine import Phase, StepResult, move, phase_key
from bridle.train.run import Run

Loss = Literal["ce", "bce"]

START_ITEMS = 512  # from which centre and scale of the pooled features are measured


@dataclass
class Tuned(Networks):
    """The networks of a fine-tuning run."""

    classifier: Classifier

    def record(self) -> dict[str, Any]:
        """The size of the head, so that a checkpoint can be read without the data."""
        return {"classes": self.classifier.classes}


def finetune(run: Run[Tuned], *, iteration: int, loss: Loss) -> Classifier:
    """Fine-tune to the end, from the beginning or from the last checkpoint, and return the classifier."""
    fit_only_phase(run, lambda: finetune_phase(run, iteration=iteration, loss=loss))
    return run.nets.classifier


def finetune_phase(run: Run[Tuned], *, iteration: int, loss: Loss) -> Phase:
    """All weights learn; tokens may be hidden, branches dropped. `iteration` 0 is from scratch."""
    nets, settings, samples = run.nets, run.config.finetune, len(run.source)
    steps = settings.step_count(samples)
    warmup = min(settings.warmup_count(samples), steps)
    if 2 * warmup > steps:
        run.progress.note(
            f"the learning rate rises for {warmup} of {steps} steps; "
            "for a shorter warm-up set finetune.warmup_steps or finetune.warmup_epochs."
        )

    def start() -> None:
        key = phase_key(iteration, "finetune")
        loader = run.loader(phase=key, batch=settings.batch, micro_batch=None, whole=True)  # every rank measures all
        batches = [move(batch, run.machine.device) for batch in loader.first(START_ITEMS, rows=64)]
        if iteration == 0:
            seen = ((batch.x, batch.valid) for batch in batches)  # what pretraining would have measured
            measure_inputs(nets.classifier.encoder.embed, seen, generator(run.config.seed, key, "stem"))
        nets.classifier.standardise((batch.x, batch.valid) for batch in batches)

    def step(batch: Batch, draws: Draws) -> StepResult:
        if batch.label is None:
            raise DataError(f"samples {batch.index.tolist()} include some without a label; fine-tuning needs them all.")
        mask = None if settings.mask is None else draws.mask(batch, settings.mask)
        drop = draws.drop_path(batch, settings.drop_path)
        logits = nets.classifier(batch.x, valid=batch.valid, mask=mask, drop=drop)  # (B, K)
        found = classification_loss(logits, batch.label, kind=loss, label_smoothing=settings.label_smoothing)
        return StepResult(found, None, {"accuracy": hit_rate(logits, batch.label)} if loss == "ce" else {})

    return Phase(
        index=0,
        iteration=iteration,
        name="finetune",
        steps=steps,
        warmup=warmup,
        settings=settings,
        trained={"classifier": nets.classifier},
        step=step,
        start=start,
        rate_scale=partial(layer_scale, depth=nets.classifier.encoder.depth, decay=settings.layer_decay),
        has_codes=False,
    )


def layer_scale(name: str, *, depth: int, decay: float) -> float:
    """decay^(depth + 1 − layer) for a parameter of the classifier."""
    return float(decay ** (depth + 1 - layer_of(name, depth)))


def layer_of(name: str, depth: int) -> int:
    """0 for what makes the tokens, 1 … depth for the blocks, depth + 1 for what comes after them."""
    inside = name.removeprefix("classifier.encoder.")
    if inside.startswith(("embed.", "class_token")):
        return 0
    if inside.startswith("trunk.blocks."):
        return int(inside.split(".")[2]) + 1
    return depth + 1


@torch.no_grad()
def hit_rate(logits: Tensor, target: Tensor) -> Tensor:
    """Share of samples whose best class is the target's, or its larger share's."""
    wanted = target if target.dim() == 1 else target.argmax(1)
    return (logits.argmax(1) == wanted).float().mean()
