"""The random draws of a training step: masks and drop-path, the same for any split into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bridle import distributed
from bridle.config.training_schema import HidingConfig
from bridle.data.loading.loader import Batch
from bridle.models.build import Networks
from bridle.models.losses import Hidden
from bridle.nn.masking import Mask, Uniform, choose_predicted, draw_mask, predicted_count
from bridle.nn.transformer import drop_path_scales
from bridle.seeding import generator
from bridle.train.run import Run

if TYPE_CHECKING:
    from bridle.train.engine import Phase


class Draws:
    """The random draws of one step, made for the whole global batch; micro-batches take their rows."""

    def __init__(self, run: Run[Networks], phase: Phase, step: int, micro_batches: Sequence[Batch] = ()) -> None:
        self.run, self.phase, self.step = run, phase, step
        self.batch = phase.settings.batch
        self.micro_batches = micro_batches

    @property
    def shown(self) -> bool:
        """Will anybody see this step's figures? What is only looked at need not be computed otherwise."""
        return is_shown(self.run, self.phase, self.step + 1)

    @cached_property
    def tokens(self) -> int | None:
        """Real tokens of the global batch, or None without padding; the first look at it is collective."""
        padded = any(batch.valid is not None for batch in self.micro_batches)
        counted = torch.tensor([int(padded), sum(self.real_tokens(batch) for batch in self.micro_batches)])
        anywhere, tokens = distributed.sum_over_ranks(counted).tolist()
        return tokens if anywhere else None

    def real_tokens(self, batch: Batch) -> int:
        if batch.valid is not None:
            return int(batch.valid.sum())
        return len(batch.x) * self.run.config.geometry.build().tokens

    def token_share(self, batch: Batch) -> float:
        """Real tokens a row of this micro-batch, relative to the whole step's; 1 without padding."""
        if self.tokens is None:
            return 1.0
        return self.real_tokens(batch) * self.batch / (len(batch.x) * max(1, self.tokens))

    @cached_property
    def predicted_tokens(self) -> int:
        """Predicted tokens of the global batch; the first look at it is collective."""
        own = sum(int(self.predicted(batch, self.mask(batch)).counted.sum()) for batch in self.micro_batches)
        return int(distributed.sum_over_ranks(torch.tensor(own)))

    def predicted_share(self, batch: Batch, counted: Tensor) -> float:
        """As `token_share`, of the predicted tokens, of which this micro-batch has those marked in `counted`."""
        if self.tokens is None:
            return 1.0
        return int(counted.sum()) * self.batch / (len(batch.x) * max(1, self.predicted_tokens))

    def mask(self, batch: Batch, settings: HidingConfig | None = None) -> Mask:
        """The mask of these rows, by the run's own mask settings unless others are given."""
        config, device = self.run.config, self.run.machine.device
        wanted = settings or config.mask
        valid = None
        if batch.valid is not None:  # rows elsewhere do not change what these rows are shown
            valid = torch.ones(self.batch, batch.valid.shape[1], dtype=torch.bool, device=device)
            valid[batch.rows] = batch.valid
        whole = draw_mask(
            wanted.kind,
            grid=config.geometry.build().grid,
            ratio=wanted.ratio,
            batch=self.batch,
            generator=self._generator("mask"),
            device=device,
            valid=valid,
        )
        return whole.rows(batch.rows.start, batch.rows.stop)

    def predicted(self, batch: Batch, mask: Mask) -> Hidden:
        """Positions of these rows to predict: of each sample's hidden tokens the share `mask.predict`, at random."""
        T = mask.masked.shape[1]
        share, count = self.run.config.mask.predict, T - mask.visible.shape[1]
        if share == 1.0:
            return Hidden.of(mask.masked, count)
        noise = Uniform(self._generator("predict"), mask.masked.device)(self.batch, T)[batch.rows]
        return Hidden.of(choose_predicted(mask.masked, share, noise), predicted_count(count, share))

    def drop_path(self, batch: Batch, rate: float | None = None) -> Tensor | None:
        """Drop-path multipliers (depth, 2, B) of these rows, at the encoder's own rate unless another is given."""
        c = self.run.config.encoder
        scales = drop_path_scales(
            depth=c.depth,
            rate=c.drop_path if rate is None else rate,
            batch=self.batch,
            generator=self._generator("drop-path"),
            device=self.run.machine.device,
        )
        return None if scales is None else scales[:, :, batch.rows]

    def _generator(self, purpose: str) -> torch.Generator:
        device = self.run.machine.device
        return generator(self.run.config.seed, self.phase.key, self.step, purpose, device=device)


def is_shown(run: Run[Networks], phase: Phase, done: int) -> bool:
    """Do the figures of the step that makes `done` go to the log?"""
    return done == phase.steps or done % run.config.runtime.log_every == 0
