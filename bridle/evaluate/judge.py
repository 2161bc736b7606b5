"""The evaluation that follows an encoder phase: probe, codebook health, and the baselines beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, Literal

from torch import Tensor

from bridle.config import Config
from bridle.data.build import is_labelled
from bridle.data.loader import Batch, Loader, sequential
from bridle.data.part import part_of, spread
from bridle.data.sources import Source, Splits, Views
from bridle.errors import DataError
from bridle.evaluate.attentive import fit_attentive
from bridle.evaluate.codebooks import codebook_health, verdicts
from bridle.evaluate.features import Features, collect_features, collect_tokens, raw_features, split_features
from bridle.evaluate.logistic import fit_logistic
from bridle.evaluate.neighbours import fit_neighbours
from bridle.evaluate.transfer import Method, ProbeResult, Result, score_folds, score_split
from bridle.models.build import Nets, build_encoder
from bridle.models.encoder import Encoded, Encoder
from bridle.nn.pooling import axis_pool, mean_pool
from bridle.train.engine import move
from bridle.train.log import ProgressLine
from bridle.train.run import Results
from bridle.train.runtime import Machine

MOST_ROWS = 256  # samples that go through a network at once
MOST_NUMBERS = 2**24  # of their inputs together; of large inputs fewer go at once

Collect = Callable[[Source], Features]


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
        classifier: Literal["linear", "neighbours"] = "linear",
    ) -> None:
        self.strict, self.classifier = strict, classifier
        self.config, self.machine, self.results, self.progress = config, machine, results, progress
        limit = config.probe.items
        kept = spread(len(splits.train), limit)
        self.train = part_of(splits.train, kept)
        self.test = None if splits.test is None else part_of(splits.test, spread(len(splits.test), limit))
        # Where there is a test split the folds of the others do not matter.
        self.folds = [splits.folds[i] for i in kept] if splits.folds is not None and splits.test is None else None
        self.everything = splits.train  # codebook health is about the whole set, however few items are probed
        self.labelled = is_labelled(splits.train)
        self.rows = max(1, min(MOST_ROWS, MOST_NUMBERS // prod(config.geometry.build().shape)))

    def __call__(self, nets: Nets) -> dict[str, Any]:
        """One entry of results.json."""
        found = self.probed(nets.encoder) if self.labelled else None
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

    def probed(self, encoder: Encoder) -> dict[str, Any] | None:
        """The probe's result. In training, labelled data that is not whole costs the probe and not the run."""
        try:
            if not self.results.value["baselines"]:
                self.results.set_baselines(self.baselines())
            found = self.probe_encoder(encoder)
        except DataError as error:
            if self.strict:
                raise
            self.progress.note(f"no probe, because the labelled data is not whole: {error}")
            return None
        self.progress.note(f"{'linear probe' if self.classifier == 'linear' else 'k-NN'}: {in_words(found)}")
        return found.as_dict()

    def baselines(self) -> dict[str, Any]:
        """The same on raw inputs, which have no tokens to attend to, and on the encoder before training."""
        self.progress.note("probing the baselines: raw features, untrained encoder")
        grid = self.config.geometry.build().grid
        untrained = build_encoder(self.config).to(self.machine.device).eval()
        raw = self.probe(self.vectors(lambda x, valid: raw_features(x, valid, grid=grid)), self.vector_method())
        return {"raw": raw.as_dict(), "untrained": self.probe_encoder(untrained).as_dict()}

    def probe_encoder(self, encoder: Encoder) -> Result:
        """A classifier on the pooled features of a frozen encoder."""
        settings, grid = self.config.probe, self.config.geometry.build().grid
        encoder.eval()

        def pooled(x: Tensor, valid: Tensor | None) -> Tensor:
            encoded: Encoded = encoder(x, valid=valid)
            if settings.pool == "class":
                assert encoded.class_token is not None  # the config is refused without one
                return encoded.class_token
            if settings.pool == "axis":
                return axis_pool(encoded.z, grid, settings.axis, valid)
            return mean_pool(encoded.z, valid)

        if settings.pool == "attentive" and self.classifier == "linear":
            tokens = self.tokens(lambda x, valid: encoder(x, valid=valid).z)
            return self.probe(tokens, partial(fit_attentive, seed=self.config.seed))
        return self.probe(self.vectors(pooled), self.vector_method())

    def vector_method(self) -> Method:
        return fit_logistic if self.classifier == "linear" else fit_neighbours

    def probe(self, collect: Collect, method: Method) -> Result:
        train, seed = collect(self.train), self.config.seed
        if self.folds is not None:
            return score_folds(method, train, self.folds, seed=seed)
        train, test = split_features(train, seed=seed) if self.test is None else (train, collect(self.test))
        return score_split(method, train, test, seed=seed)

    def vectors(self, features: Callable[[Tensor, Tensor | None], Tensor]) -> Collect:
        def collect(source: Source) -> Features:
            views = Views(source)
            return collect_features(self.batches(views), features, views=views.views)

        return collect

    def tokens(self, tokens: Callable[[Tensor, Tensor | None], Tensor]) -> Collect:
        items = len(self.train) + (0 if self.test is None else len(self.test))

        def collect(source: Source) -> Features:
            views = Views(source)
            return collect_tokens(self.batches(views), tokens, views=views.views, items=items)

        return collect

    def codebooks(self, nets: Nets) -> list[Any]:
        """Codebook health over a full pass of the training data."""
        data = self.config.data
        assert data.mean is not None  # a run's config always has them
        assert data.std is not None
        # A loader, because a file that cannot be read must not end a pretraining run here: it is replaced.
        loader = Loader(
            source=self.everything, seed=self.config.seed, phase="codebooks", batch=self.rows, mean=data.mean,
            std=data.std, workers=data.workers,
        )  # fmt: skip
        batches = loader.first(len(self.everything), rows=self.rows)
        return codebook_health(nets.tokenizer, (move(batch, self.machine.device) for batch in batches))

    def batches(self, source: Views) -> Iterator[Batch]:
        """All views of all items, those of an item in one batch."""
        data = self.config.data
        assert data.mean is not None  # a run's config always has them
        assert data.std is not None
        rows = max(1, self.rows // source.views) * source.views
        for batch in sequential(source, batch=rows, mean=data.mean, std=data.std, workers=data.workers):
            yield move(batch, self.machine.device)


def in_words(found: Result) -> str:
    """The main scores of a result for a line of text."""
    low, high = found.interval
    folds = "" if found.sd is None else f", sd {found.sd:.3f} over {len(found.folds or [])} folds"
    if isinstance(found, ProbeResult):
        return f"accuracy {found.accuracy:.3f} (95 % interval {low:.3f}–{high:.3f}{folds})"
    precision, area, apart = found.mean_average_precision, found.mean_auc, found.d_prime
    return f"mAP {precision:.3f} (95 % interval {low:.3f}–{high:.3f}{folds}), AUC {area:.3f}, d′ {apart:.2f}"
