"""Encoder and tokenizer at once (paper §5): L = L_encoder + α·L_tokenizer, the second every n steps.

The encoder that teaches also learns, so the mean of its features moves. A mean measured once would soon leave most of
the target a constant, which the estimator learns without any code: the codebooks collapse, and then the encoder with
them. So the mean is measured again before every tokenizer step, on that step's global batch; a running mean lags behind
(docs/deviations.md). It is a buffer of the estimator and therefore in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bridle.config import Config
from bridle.data.loading.loader import Batch
from bridle.models.build import Nets
from bridle.quantize.usage import CodeAge
from bridle.train.draws import Draws
from bridle.train.engine import Phase, StepResult, move
from bridle.train.phases import (
    explain_encoder,
    fit_embedding,
    make_phase,
    predict_codes,
    redraw_unused,
    start_codebooks,
    targets,
    teach,
    teacher_means,
)
from bridle.train.run import Run


def joint_phase(run: Run[Nets], *, index: int, iteration: int) -> Phase:
    """L_encoder + α·L_tokenizer, the second every n steps (paper §5)."""
    nets, schedule = run.nets, run.config.schedule
    assert nets.estimator is not None  # built together with the tokenizer
    phase = make_phase(run, run.config.encoder_phase, index=index, iteration=iteration, name="joint")
    teacher = MovingTeacher(run)

    def start() -> None:
        if iteration == 1:  # later networks take over what was measured
            fit_embedding(run, phase.key, run.config.encoder_phase)
        start_codebooks(run, phase.key, run.config.encoder_phase)

    def step(batch: Batch, draws: Draws) -> StepResult:
        guess = predict_codes(run, batch, draws, targets(nets, batch.x, batch.valid))
        if (draws.step + 1) % schedule.joint_every:
            return guess
        explained = explain_encoder(run, batch, draws, z=teacher.features[batch.rows.start])
        loss = guess.loss + schedule.joint_weight * explained.loss
        return StepResult(loss, guess.codes, guess.values | explained.values, explained.statistics)

    def after_codes(done: int, batches: Sequence[Batch], ages: CodeAge) -> None:
        redraw_unused(run, phase, done, batches, ages)

    return replace(
        phase,
        trained=nets.modules(),
        step=step,
        start=start,
        before_step=teacher.look,
        after_skip=teacher.forget,
        after_update=partial(nets.tokenizer.quantizer.ema_update, summed=True),
        after_codes=after_codes,
        rate_scale=tokenizer_rate(run.config),
        some_steps_only=schedule.joint_every > 1,
    )


def tokenizer_rate(config: Config) -> Callable[[str], float]:
    """Of a parameter's name: tokenizer and estimator learn at the tokenizer phase's rate, the rest at the encoder's."""
    ratio = config.tokenizer_phase.learning_rate / config.encoder_phase.learning_rate
    return lambda name: ratio if name.startswith(("tokenizer.", "estimator.")) else 1.0


class MovingTeacher:
    """The teacher's features of one tokenizer step, and the estimator centred on their mean before the step."""

    def __init__(self, run: Run[Nets]) -> None:
        self.run = run
        self.features: dict[int, Tensor] = {}  # (B, T, D) by the first row of the micro-batch
        self.mean_before: Tensor | None = None  # the estimator's, before this step

    @torch.no_grad()
    def look(self, step: int, batches: Sequence[Batch]) -> None:
        """Before a step with a tokenizer: compute the features and centre on their mean over all ranks (collective)."""
        run, estimator, kind = self.run, self.run.nets.estimator, self.run.config.loss.centre_teacher
        self.features, self.mean_before = {}, None
        if (step + 1) % run.config.schedule.joint_every:
            return
        assert estimator is not None
        means = teacher_means(estimator)
        for batch in (move(batch, run.machine.device) for batch in batches):
            with run.machine.autocast():
                z = teach(run, batch.x, batch.valid)
            self.features[batch.rows.start] = z
            means.add(z, batch.valid)
        if kind != "none":
            self.mean_before = estimator.teacher_mean.clone()
            estimator.centre_on(means.mean(overall=kind == "mean"))

    def forget(self) -> None:
        """Give the estimator back the mean it had before the step."""
        if self.mean_before is not None and self.run.nets.estimator is not None:
            self.run.nets.estimator.centre_on(self.mean_before)
