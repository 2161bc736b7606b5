"""The evaluation after an encoder phase: a list of scorers on frozen features, the baselines beside them, codebooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bridle import distributed
from bridle.config import Config
from bridle.config.training_schema import ProbeConfig
from bridle.console import ProgressLine
from bridle.data.build import is_labelled
from bridle.data.digests import splits_digest
from bridle.data.sources import Source, Splits, Views
from bridle.data.subset import subset_of
from bridle.errors import DataError
from bridle.evaluate.classical import evenly_spaced, fit_classical
from bridle.evaluate.codebooks.diagnosis import verdicts
from bridle.evaluate.codebooks.health import codebook_health, with_start_norms
from bridle.evaluate.collector import Collect, Collector, readable_rows
from bridle.evaluate.feature_cache import FeatureCache, make_key, weights_digest
from bridle.evaluate.features import (
    TRIAL_ITEMS,
    Features,
    choose_items,
    joined,
    raw_features,
    split_features,
    stratified_folds,
)
from bridle.evaluate.heads.attentive import fit_attentive
from bridle.evaluate.heads.logistic import fit_logistic
from bridle.evaluate.heads.sgd import fit_head
from bridle.evaluate.scorers import Pair, Scorer, Task, find_scorer
from bridle.evaluate.scorers.knn import fit_neighbours
from bridle.evaluate.scorers.probe import Method, classify, fold_pairs, split_pairs
from bridle.machine import Machine
from bridle.models.build import Nets, build_encoder
from bridle.models.encoder import Encoded, Encoder
from bridle.nn.pooling import pool_tokens
from bridle.runs.results import Evaluation, Protocol, Results, Scores, results_header
from bridle.runs.results_file import ResultsFile

FOLDS = 5  # of data without its own, with probe.on: folds
SCORED = {"test": "", "validation": ", validation items", "folds": ", all items in folds"}
NO_SCORE = ("enabled", "cache_mb", "training_items")  # settings of the probe that change no score
CLASSIFIER = 5  # goes up when the same settings give other scores


class Evaluator:
    """Evaluates encoders of one run; baselines are computed once and kept in the results file."""

    def __init__(
        self,
        config: Config,
        splits: Splits,
        machine: Machine,
        results: ResultsFile,
        progress: ProgressLine,
        *,
        strict: bool = False,
        classifier: Literal["linear", "neighbours"] = "linear",
        cache: FeatureCache | None = None,
    ) -> None:
        self.config, self.machine, self.results, self.progress = config, machine, results, progress
        self.strict, self.classifier = strict, classifier
        self.warned = False  # about scores on a single class
        self.left_out: tuple[str, ...] = ()  # items that cannot be read
        self.splits = splits
        self.everything = splits.train  # codebook health covers the whole set, however few items are probed,
        if config.max_steps is not None:  # unless the run is a trial
            self.everything = subset_of(splits.train, evenly_spaced(len(splits.train), TRIAL_ITEMS))
        if config.probe.on == "validation":
            splits = without_test(splits)
        folds = splits.folds if splits.test is None else None  # a test split goes before folds
        kept = self.chosen(splits.train, "train", folds)
        self.train = subset_of(splits.train, kept)
        self.test = None if splits.test is None else subset_of(splits.test, self.chosen(splits.test, "test"))
        self.folds = None if folds is None else [folds[i] for i in kept]
        self.labelled = is_labelled(splits.train)
        self.collector = Collector(config, machine, progress, cache)
        own = ["retrieval"] if classifier == "neighbours" else ["few_shot"] if config.probe.shots else []
        self.further = [find_scorer(name) for name in dict.fromkeys([*own, *config.probe.scorers])]

    def __call__(self, nets: Nets, iteration: int, phase: str) -> Evaluation:
        """Scores of the encoder and the health of the codebooks."""
        # The digest keeps the scores from being taken for those of data that has changed later.
        found = Evaluation(
            iteration=iteration,
            phase=phase,
            probe=self.scores_of(nets.encoder) if self.labelled else None,
            data=splits_digest(self.splits) if self.labelled else None,
        )
        if nets.own_tokenizer is None:
            return found
        stages = codebook_health(nets.tokenizer, self.collector.first_batches(self.everything))
        judged = verdicts(stages, self.config, is_trained=nets.tokenizer.is_trained)
        for verdict in judged:
            if verdict.level != "ok":
                self.progress.note(f"codebook warning, stage {verdict.stage}: {verdict.text}")
        stages = with_start_norms(stages, nets.norms_start)
        return found.model_copy(update={"codebooks": tuple(stages), "verdicts": tuple(judged)})

    def chosen(self, source: Source, split: str, folds: Sequence[int] | None = None) -> list[int]:
        """The items of a split that are scored."""
        limit, seed = self.config.probe.items, self.config.seed
        return choose_items(len(source), limit, labels=source.labels, folds=folds, seed=seed, split=split)

    def scores_of(self, encoder: Encoder) -> Scores | None:
        """Scores of a frozen encoder, after those of the baselines.

        In training, labelled data that cannot all be read costs the scores and not the run: None.
        """
        try:
            self.measure_baselines()
            found = self.score_encoder(encoder)
        except DataError as error:
            if self.strict:
                raise
            self.progress.note(f"no probe, because the labelled data is not whole: {error}")
            return None
        self.progress.note(f"{'linear probe' if self.classifier == 'linear' else 'k-NN'}: {in_words(found)}")
        return found

    def measure_baselines(self) -> None:
        """Score raw inputs and the untrained encoder, where the results do not have them yet.

        Runs in one folder often share both: the first of them measures for all.
        """
        if self.results.value.baselines:
            return
        # Nothing has measured its patches, so it sees them plain: whitened ones read worse before training.
        untrained = build_encoder(self.config).to(self.machine.device).eval()
        key = self.baselines_key(untrained)
        if (known := self.results.baselines_beside(key)) is not None:
            run, baselines = known
            self.progress.note(f"baselines as {run} measured them: same data, same start, same probe")
            self.results.set_baselines(baselines, key)
            return
        self.progress.note("probing the baselines: raw input, untrained encoder")
        self.results.set_baselines(self.baselines(untrained), key)

    def baselines_key(self, untrained: Encoder) -> str | None:
        """Names baselines by all they depend on; None where the data has no name."""
        data = splits_digest(self.splits)
        if data is None:
            return None
        return make_key(
            {
                **protocol_of(self.config).model_dump(mode="json"), "method": self.classifier,
                "seed": self.config.seed, "items": data, "weights": weights_digest(untrained),
                "encoder": self.config.encoder.model_dump(mode="json"),
                "device": self.machine.device.type, **self.collector.input_settings(),
            }
        )  # fmt: skip

    def baselines(self, untrained: Encoder) -> dict[str, Scores]:
        """Scores by name of the baseline. Raw and classical features have no tokens that could be attended to."""
        geometry, method, collector = self.config.geometry.build(), self.vector_method(), self.collector
        raw = collector.features(lambda x, valid: raw_features(x, valid, grid=geometry.grid), {"features": "raw"})
        found = {"raw": self.score(raw, method), "untrained": self.score_encoder(untrained)}
        if self.config.probe.classical:
            some = collector.batches(Views(subset_of(self.train, evenly_spaced(len(self.train)))))
            found["classical"] = self.score(collector.features(fit_classical(some, geometry, self.config.seed)), method)
        return found

    def score_encoder(self, encoder: Encoder) -> Scores:
        """All scores of a frozen encoder's features."""
        settings, grid = self.config.probe, self.config.geometry.build().grid
        kept = settings.axis if settings.pool == "axis" else None
        encoder.eval()

        def encode(x: Tensor, valid: Tensor | None) -> list[Encoded]:
            if settings.layer is None:
                return [encoder(x, valid=valid)]
            return encoder.layers(x, wanted=encoder.blocks(settings.layer), valid=valid)

        def pool(encoded: Encoded, valid: Tensor | None) -> Tensor:
            if settings.pool == "class" and encoded.class_token is not None:  # a stem has none
                return encoded.class_token
            return pool_tokens(encoded.z, grid, kept, valid, deviation=settings.deviation)

        def pooled(x: Tensor, valid: Tensor | None) -> Tensor:
            return torch.cat([pool(encoded, valid) for encoded in encode(x, valid)], dim=1)

        what: dict[str, Any] = {
            "features": settings.pool, "axis": kept, "deviation": settings.deviation, "layer": settings.layer,
        }  # fmt: skip
        if self.collector.cache is not None:
            what |= {"weights": weights_digest(encoder), "encoder": self.config.encoder.model_dump(mode="json")}
        if settings.pool == "attentive" and self.classifier == "linear":
            items = len(self.train) + (0 if self.test is None else len(self.test))
            tokens = self.collector.features(lambda x, valid: encode(x, valid)[-1].z, what, items=items)
            return self.score(tokens, partial(fit_attentive, seed=self.config.seed))
        collect = self.collector.features(pooled, what)
        stem = encoder.embed.stem
        if settings.layer != "all" or stem is None or not stem.is_measured:
            return self.score(collect, self.vector_method())
        train, test = self.collected(collect)
        self.score_stem(train, test, numbers=len(stem.centres) * (1 if kept is None else grid[kept]))
        return self.score_features(train, test, self.vector_method())

    def score_stem(self, train: Features, test: Features | None, *, numbers: int) -> None:
        """Score the stem alone, unless that is known; in features of every block its numbers come first."""
        if "stem" in self.results.value.baselines:
            return
        width = numbers * (2 if self.config.probe.deviation else 1)
        parts = [None if part is None else part._replace(x=part.x[:, :width]) for part in (train, test)]
        assert parts[0] is not None
        self.results.add_baseline("stem", self.score_features(parts[0], parts[1], self.vector_method()))

    def vector_method(self) -> Method:
        """The classifier of pooled features."""
        settings = self.config.probe
        if self.classifier == "neighbours":
            return fit_neighbours
        if settings.head == "logistic":
            return fit_logistic
        return partial(fit_head, settings=settings, seed=self.config.seed, device=self.machine.device)

    def score(self, collect: Collect, method: Method) -> Scores:
        """Collect features and score them."""
        return self.score_features(*self.collected(collect), method)

    def score_features(self, train: Features, test: Features | None, method: Method) -> Scores:
        """Call every scorer, the classifier of the main score first."""

        def solve() -> dict[str, Any]:  # on rank 0, which has the features of all
            began = time.monotonic()
            task = Task(
                self.pairs(train, test), self.config.probe, self.config.seed,
                lambda what, total, done: self.collector.show_progress(what, total, done, began),
            )  # fmt: skip
            scorers: list[Scorer] = [classify(method), *self.further]
            found = Scores(left_out=self.left_out)
            for scorer in scorers:
                found = found.joined(scorer(task))
            return found.model_dump()

        return Scores.model_validate(distributed.done_once(solve))

    def collected(self, collect: Collect) -> tuple[Features, Features | None]:
        """Features of the train and the test items, without those that cannot be read."""
        try:
            return collect(self.train), None if self.test is None else collect(self.test)
        except DataError:
            if not self.leave_out_bad():
                raise
            return collect(self.train), None if self.test is None else collect(self.test)

    def leave_out_bad(self) -> bool:
        """Drop the items that cannot be read from the splits; False if there are none, DataError if there are many."""
        parts = [part for part in (self.train, self.test) if part is not None]
        kept, names = readable_rows(parts, self.config.data, self.progress)
        if not names:
            return False
        self.train = subset_of(self.train, kept[0])
        self.test = None if self.test is None else subset_of(self.test, kept[1])
        self.folds = None if self.folds is None else [self.folds[i] for i in kept[0]]
        self.left_out = (*self.left_out, *names)
        return True

    def pairs(self, train: Features, test: Features | None) -> Callable[[], Iterator[Pair]]:
        """Training and test items, as often as they are asked for."""
        seed = self.config.seed
        if self.folds is not None:
            return partial(fold_pairs, train, self.folds, seed=seed)
        if self.config.probe.on == "folds":
            items = train if test is None else joined(train, test)
            return partial(fold_pairs, items, stratified_folds(items.y, FOLDS, seed=seed), seed=seed)
        if test is None:
            train, test = split_features(train, seed=seed)
        if not (self.warned or test.multilabel) and len(np.unique(test.y)) == 1:
            self.warned = True
            self.progress.note(f"all {len(test.y)} items that are scored are of one class: the scores say nothing.")
        return partial(split_pairs, train, test, seed=seed)


def without_test(splits: Splits) -> Splits:
    """Drop the test split and hold out part of the training items instead.

    Of data in folds the last one is left out, and the others, if there are two, test each other.
    """
    train, folds = splits.train, splits.folds
    if splits.test is None and folds is not None:
        kept = [i for i, fold in enumerate(folds) if fold != max(folds)]
        train, folds = subset_of(train, kept), [folds[i] for i in kept]
    return splits._replace(train=train, test=None, folds=folds if folds is not None and len(set(folds)) > 1 else None)


def protocol_of(config: Config) -> Protocol:
    """How a run measures its own scores; keys that change no score have their defaults."""
    defaults = ProbeConfig()
    kept = {key: getattr(defaults, key) for key in NO_SCORE}
    return Protocol(probe=config.probe.model_copy(update=kept), classifier=CLASSIFIER)


def probe_header(config: Config, folder: Path | None = None) -> Results:
    """Results without scores. Scores of other items have another title, because titles are compared."""
    header = results_header(config, folder)
    title = f"{header.title}{SCORED[config.probe.on]}"
    return header.model_copy(update={"title": title, "protocol": protocol_of(config)})


def probe_settings_of_run(config: Config, results: ResultsFile, progress: ProgressLine) -> Config:
    """The config with the probe settings that the run's results began with, where they hold any scores."""
    header, known = probe_header(config), results.value.protocol
    if known == header.protocol or not (results.value.baselines or results.value.evaluations):
        kept = {"baselines", "baselines_key", "evaluations"}
        results.value = header.model_copy(update={key: getattr(results.value, key) for key in kept})
        return config
    if known is None or known.probe is None or known.classifier != CLASSIFIER:
        return config  # of an older version: its rules are not known here
    progress.note(
        "results.json goes on with the settings of the probe that it began with; "
        "`bridle probe` measures all iterations by others."
    )
    own = {key: getattr(config.probe, key) for key in NO_SCORE}
    return config.model_copy(update={"probe": known.probe.model_copy(update=own)})


def in_words(found: Scores) -> str:
    """The main scores for a line of text."""
    if found.main is None or found.interval is None:
        return "no score"
    low, high = found.interval
    folds = "" if found.sd is None else f", sd {found.sd:.3f} over {len(found.folds)} folds"
    text = f"{found.name} {found.main:.3f} (95 % interval {low:.3f}–{high:.3f}{folds})"
    if found.mean_auc is None:
        return text
    return f"{text}, AUC {found.mean_auc:.3f}, d′ {'∞' if found.d_prime is None else f'{found.d_prime:.2f}'}"
