"""The evaluation that follows an encoder phase: linear probe, codebook health, and the baselines beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bridle.config import Config
from bridle.data.build import is_labelled
from bridle.data.loader import Batch, Loader, sequential
from bridle.data.sources import Labels, Sample, Source, Splits
from bridle.errors import DataError
from bridle.evaluate.codebooks import codebook_health, verdicts
from bridle.evaluate.transfer import (
    Features,
    ProbeResult,
    axis_pool,
    collect_features,
    linear_probe,
    mean_pool,
    raw_features,
    split_features,
)
from bridle.models.build import Nets, build_encoder
from bridle.models.encoder import Encoder
from bridle.train.engine import move
from bridle.train.log import ProgressLine
from bridle.train.run import Results
from bridle.train.runtime import Machine

BATCH = 256


class Some:
    """At most `limit` samples of a source, evenly spread."""

    def __init__(self, source: Source, limit: int) -> None:
        count = len(source)
        self.source = source
        self.kept = [i * count // limit for i in range(limit)] if limit < count else list(range(count))
        self.classes = source.classes
        self.labels: Labels | None = None if source.labels is None else [source.labels[i] for i in self.kept]

    def __len__(self) -> int:
        return len(self.kept)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        return self.source.load(self.kept[index], generator)

    def describe(self, index: int) -> str:
        return self.source.describe(self.kept[index])


class Judge:
    """Evaluates networks of one run; baselines are computed once and kept in results.json."""

    def __init__(
        self,
        config: Config,
        splits: Splits,
        machine: Machine,
        results: Results,
        progress: ProgressLine,
        *,
        strict: bool = False,
    ) -> None:
        self.strict = strict
        self.config, self.machine, self.results, self.progress = config, machine, results, progress
        limit = config.probe.items
        self.train = splits.train if limit is None else Some(splits.train, limit)
        self.test = splits.test if limit is None or splits.test is None else Some(splits.test, limit)
        self.everything = splits.train  # codebook health is about the whole set, however few items are probed
        self.labelled = is_labelled(splits.train)

    def __call__(self, nets: Nets) -> dict[str, Any]:
        """One entry of results.json."""
        found = self.probed(nets) if self.labelled else None
        stages = self.codebooks(nets)
        judged = verdicts(stages)
        for verdict in judged:
            if verdict.level != "ok":
                self.progress.note(f"codebook warning, stage {verdict.stage}: {verdict.text}")
        return {
            "probe": found,
            "codebooks": [
                {**stage._asdict(), "norms_start": norms} for stage, norms in zip(stages, nets.norms_start, strict=True)
            ],
            "verdicts": [verdict._asdict() for verdict in judged],
        }

    def probed(self, nets: Nets) -> dict[str, Any] | None:
        """The probe's result. In training, labelled data that is not whole costs the probe and not the run."""
        try:
            if not self.results.value["baselines"]:
                self.results.set_baselines(self.baselines())
            found = self.probe_encoder(nets.encoder).as_dict()
        except DataError as error:
            if self.strict:
                raise
            self.progress.note(f"no probe, because the labelled data is not whole: {error}")
            return None
        low, high = found["interval"]
        self.progress.note(f"linear probe: accuracy {found['accuracy']:.3f} (95 % interval {low:.3f}–{high:.3f})")
        return found

    def baselines(self) -> dict[str, Any]:
        """The same classifier on raw inputs and on the encoder before training."""
        self.progress.note("probing the baselines: raw features, untrained encoder")
        grid = self.config.geometry.build().grid
        untrained = build_encoder(self.config).to(self.machine.device).eval()
        raw = self.probe(lambda x, valid: raw_features(x, valid, grid=grid))
        return {"raw": raw.as_dict(), "untrained": self.probe_encoder(untrained).as_dict()}

    def probe_encoder(self, encoder: Encoder) -> ProbeResult:
        """Linear probe on pooled features of a frozen encoder."""
        settings, grid = self.config.probe, self.config.geometry.build().grid
        encoder.eval()

        def features(x: Tensor, valid: Tensor | None) -> Tensor:
            z: Tensor = encoder(x, valid=valid).z
            return mean_pool(z, valid) if settings.pool == "mean" else axis_pool(z, grid, settings.axis, valid)

        return self.probe(features)

    def probe(self, features: Callable[[Tensor, Tensor | None], Tensor]) -> ProbeResult:
        train = collect_features(self.batches(self.train), features)
        test: Features
        if self.test is None:
            train, test = split_features(train, seed=self.config.seed)
        else:
            test = collect_features(self.batches(self.test), features)
        return linear_probe(train, test, seed=self.config.seed)

    def codebooks(self, nets: Nets) -> list[Any]:
        """Codebook health over a full pass of the training data."""
        data = self.config.data
        assert data.mean is not None  # a run's config always has them
        assert data.std is not None
        # A loader, because a file that cannot be read must not end a pretraining run here: it is replaced.
        loader = Loader(
            source=self.everything, seed=self.config.seed, phase="codebooks", batch=BATCH, mean=data.mean, std=data.std,
            workers=data.workers,
        )  # fmt: skip
        batches = loader.first(len(self.everything), rows=BATCH)
        return codebook_health(nets.tokenizer, (move(batch, self.machine.device) for batch in batches))

    def batches(self, source: Source) -> Iterator[Batch]:
        data = self.config.data
        assert data.mean is not None  # a run's config always has them
        assert data.std is not None
        for batch in sequential(source, batch=BATCH, mean=data.mean, std=data.std, workers=data.workers):
            yield move(batch, self.machine.device)
