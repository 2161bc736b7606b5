"""The evaluation that follows an encoder phase: probe, codebook health, and the baselines beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bridle import distributed
from bridle.config import Config
from bridle.config.training_schema import ProbeConfig
from bridle.console import ProgressLine, clock
from bridle.data.build import is_labelled
from bridle.data.digests import data_digest, splits_digest
from bridle.data.loading.loader import Batch, Loader, sequential
from bridle.data.modality import settings_of
from bridle.data.sources import Source, Splits, Views
from bridle.data.subset import part_of
from bridle.errors import DataError
from bridle.evaluate.classical import evenly_spaced, fit_classical
from bridle.evaluate.codebook_advice import in_force
from bridle.evaluate.codebooks import codebook_health, verdicts
from bridle.evaluate.feature_cache import FeatureCache, make_key, weights_digest
from bridle.evaluate.features import (
    Features,
    collect_features,
    collect_tokens,
    joined,
    raw_features,
    split_features,
    stratified_folds,
)
from bridle.evaluate.fewshot import beside, few_shots
from bridle.evaluate.heads.attentive import fit_attentive
from bridle.evaluate.heads.logistic import fit_logistic
from bridle.evaluate.heads.sgd import fit_head
from bridle.evaluate.knn import fit_neighbours
from bridle.evaluate.probe import (
    LabelsResult,
    Method,
    Pair,
    ProbeResult,
    Result,
    fold_pairs,
    in_words,
    score_pairs,
    split_pairs,
)
from bridle.evaluate.retrieval import retrieval
from bridle.evaluate.subsample import choose_items
from bridle.machine import Machine
from bridle.models.build import Nets, build_encoder
from bridle.models.encoder import Encoded, Encoder
from bridle.nn.pooling import axis_pool, deviation_pool
from bridle.train.engine import move
from bridle.train.run import Results, results_header

MOST_ROWS = 256  # samples that go through a network at once
MOST_TOKENS_CPU = 4096  # of them on a CPU, where what leaves the cache takes half as long again
MOST_NUMBERS = 2**24  # of their inputs together; of large inputs fewer go at once

FOLDS = 5  # of data without its own, with probe.on: folds
SCORED = {"test": "", "validation": ", validation items", "folds": ", all items in folds"}
CLASSIFIER = 4  # goes up when the same settings give other scores
QUIET_SECONDS = 2.0  # before progress is shown

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
        cache: FeatureCache | None = None,
    ) -> None:
        self.strict, self.classifier, self.cache = strict, classifier, cache
        self.warned = False  # of scores that say nothing
        self.config, self.machine, self.results, self.progress = config, machine, results, progress
        self.splits = splits
        self.everything = splits.train  # codebook health is about the whole set, however few items are probed
        if config.probe.on == "validation":
            splits = without_test(splits)
        # Where there is a test split the folds of the others do not matter.
        folds = splits.folds if splits.test is None else None
        kept = self.chosen(splits.train, "train", folds)
        self.train = part_of(splits.train, kept)
        self.test = None if splits.test is None else part_of(splits.test, self.chosen(splits.test, "test"))
        self.folds = None if folds is None else [folds[i] for i in kept]
        self.labelled = is_labelled(splits.train)
        geometry = config.geometry.build()
        most = [MOST_ROWS, MOST_NUMBERS // prod(geometry.shape)]
        if machine.device.type == "cpu":
            most.append(MOST_TOKENS_CPU // geometry.tokens)
        self.rows = max(1, min(most))

    def __call__(self, nets: Nets) -> dict[str, Any]:
        """One entry of results.json."""
        # With the data it was measured on, so that nobody takes it for a score on what the data becomes later.
        found = {"probe": self.probed(nets.encoder), "data": splits_digest(self.splits)} if self.labelled else None
        if nets.own_tokenizer is None:
            return {**(found or {"probe": None}), "codebooks": [], "verdicts": []}
        stages = self.codebooks(nets)
        judged = verdicts(stages, in_force(self.config, nets.tokenizer))
        for verdict in judged:
            if verdict.level != "ok":
                self.progress.note(f"codebook warning, stage {verdict.stage}: {verdict.text}")
        return {
            **(found or {"probe": None}),
            "codebooks": [
                {**stage._asdict(), "norms_start": norms} for stage, norms in zip(stages, nets.norms_start, strict=True)
            ],
            "verdicts": [verdict._asdict() for verdict in judged],
        }

    def chosen(self, source: Source, split: str, folds: Sequence[int] | None = None) -> list[int]:
        """The items of a split that are probed."""
        limit, seed = self.config.probe.items, self.config.seed
        return choose_items(len(source), limit, labels=source.labels, folds=folds, seed=seed, split=split)

    def probed(self, encoder: Encoder) -> dict[str, Any] | None:
        """The probe's result. In training, labelled data that is not whole costs the probe and not the run."""
        try:
            self.measure_baselines()
            found = self.probe_encoder(encoder)
        except DataError as error:
            if self.strict:
                raise
            self.progress.note(f"no probe, because the labelled data is not whole: {error}")
            return None
        self.progress.note(f"{'linear probe' if self.classifier == 'linear' else 'k-NN'}: {in_words(found)}")
        if found.few_shot is not None:
            found = found._replace(few_shot=beside(found.few_shot, self.results.value["baselines"]))
        return found.as_dict()

    def measure_baselines(self) -> None:
        """The same on raw inputs and on the encoder before training, where the results do not have them yet.

        Runs in one folder often share both: the first of them measures for all.
        """
        if self.results.value["baselines"]:
            return
        # Nothing has measured its patches, so it sees them plain: whitened ones read worse before training.
        untrained = build_encoder(self.config).to(self.machine.device).eval()
        key = self.baselines_key(untrained)
        if (known := self.results.baselines_beside(key)) is not None:
            run, baselines = known
            self.progress.note(f"baselines as {run} measured them: same data, same start, same probe")
            self.results.set_baselines(baselines, key)
            return
        self.progress.note("probing the baselines: raw features, untrained encoder")
        self.results.set_baselines(self.baselines(untrained), key)

    def baselines_key(self, untrained: Encoder) -> str | None:
        """Names baselines by all they depend on; None where the data has no name."""
        data = splits_digest(self.splits)
        if data is None:
            return None
        return make_key(
            {
                **protocol_of(self.config), "method": self.classifier, "seed": self.config.seed, "items": data,
                "weights": weights_digest(untrained), "encoder": self.config.encoder.model_dump(mode="json"),
                "device": self.machine.device.type, **self.inputs(),
            }
        )  # fmt: skip

    def baselines(self, untrained: Encoder) -> dict[str, Any]:
        """Raw inputs have no tokens to attend to, classical features neither."""
        geometry, method = self.config.geometry.build(), self.vector_method()
        raw = self.vectors(lambda x, valid: raw_features(x, valid, grid=geometry.grid))
        found = {"raw": self.probe(self.kept(raw, {"features": "raw"}), method)}
        found["untrained"] = self.probe_encoder(untrained)
        if self.config.probe.classical:
            some = self.batches(Views(part_of(self.train, evenly_spaced(len(self.train)))))
            found["classical"] = self.probe(self.vectors(fit_classical(some, geometry, self.config.seed)), method)
        return {name: result.as_dict() for name, result in found.items()}

    def probe_encoder(self, encoder: Encoder) -> Result:
        """A classifier on the pooled features of a frozen encoder."""
        settings, grid = self.config.probe, self.config.geometry.build().grid
        kept = settings.axis if settings.pool == "axis" else None
        encoder.eval()

        def encode(x: Tensor, valid: Tensor | None) -> Encoded:
            if settings.layer is None:
                last: Encoded = encoder(x, valid=valid)
                return last
            return encoder.layers(x, wanted=[settings.layer], valid=valid)[0]

        def pooled(x: Tensor, valid: Tensor | None) -> Tensor:
            encoded = encode(x, valid)
            if settings.pool == "class":
                assert encoded.class_token is not None  # the config is refused without one
                return encoded.class_token
            mean = axis_pool(encoded.z, grid, kept, valid)
            if not settings.deviation:
                return mean
            return torch.cat([mean, deviation_pool(encoded.z, grid, kept, valid)], dim=1)

        what: dict[str, Any] = {
            "features": settings.pool, "axis": kept, "deviation": settings.deviation, "layer": settings.layer,
        }  # fmt: skip
        if self.cache is not None:
            what |= {"weights": weights_digest(encoder), "encoder": self.config.encoder.model_dump(mode="json")}
        if settings.pool == "attentive" and self.classifier == "linear":
            tokens = self.kept(self.tokens(lambda x, valid: encode(x, valid).z), what)
            return self.probe(tokens, partial(fit_attentive, seed=self.config.seed))
        return self.probe(self.kept(self.vectors(pooled), what), self.vector_method())

    def vector_method(self) -> Method:
        settings = self.config.probe
        if self.classifier == "neighbours":
            return fit_neighbours
        if settings.head == "logistic":
            return fit_logistic
        return partial(fit_head, settings=settings, seed=self.config.seed, device=self.machine.device)

    def probe(self, collect: Collect, method: Method) -> Result:
        """The main scores, and beside them those with few labels, or of retrieval."""
        train = collect(self.train)
        test = None if self.test is None else collect(self.test)
        return solved_once(lambda: self.solve(train, test, method))

    def solve(self, train: Features, test: Features | None, method: Method) -> Result:
        """On rank 0, which has the features of all."""
        pairs, seed, settings = self.pairs(train, test), self.config.seed, self.config.probe
        found = score_pairs(method, pairs(), seed=seed)
        if self.classifier == "neighbours":
            nearest = retrieval(pairs(), seed=seed)
            return found._replace(retrieval=None if nearest is None else nearest.as_dict())
        if settings.shots:
            total = len(settings.shots) * settings.draws * sum(1 for _ in pairs())
            few = few_shots(
                pairs(), shots=settings.shots, draws=settings.draws, seed=seed,
                tell=partial(self.show_progress, "few-shot probe", time.monotonic(), total),
            )  # fmt: skip
            return found._replace(few_shot=[one.as_dict() for one in few])
        return found

    def pairs(self, train: Features, test: Features | None) -> Callable[[], Iterator[Pair]]:
        """Training and test items as often as they are asked for."""
        seed = self.config.seed
        if self.folds is not None:
            return partial(fold_pairs, train, self.folds, seed=seed)
        if self.config.probe.on == "folds":
            items = train if test is None else joined(train, test)
            return partial(fold_pairs, items, stratified_folds(items.y, FOLDS, seed=seed), seed=seed)
        if test is None:
            train, test = split_features(train, seed=seed)
        if not (self.warned or test.several) and len(np.unique(test.y)) == 1:
            self.warned = True
            self.progress.note(f"all {len(test.y)} items that are scored are of one class: the scores say nothing.")
        return partial(split_pairs, train, test, seed=seed)

    def kept(self, collect: Collect, what: Mapping[str, Any]) -> Collect:
        """The same, read from the cache where these features (`what`) of the same items were collected before."""
        cache, seen = self.cache, self.inputs()
        if cache is None or distributed.is_active():  # ranks might not agree on what is kept
            return collect

        def kept(source: Source) -> Features:
            items = data_digest(source)
            if items is None:
                return collect(source)
            device = self.machine.device.type
            return cache.get(make_key({**what, **seen, "items": items, "device": device}), lambda: collect(source))

        return kept

    def inputs(self) -> dict[str, Any]:
        """The settings that make inputs of items."""
        aside = {"root", "manifest", "workers", "cache_mb", "bad_share"}
        sections = {"data": self.config.data, "geometry": self.config.geometry, **settings_of(self.config)}
        return {name: section.model_dump(mode="json", exclude=aside) for name, section in sections.items()}

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
            source=self.everything, seed=self.config.seed, phase="codebooks",
            batch=self.rows * distributed.world_size(), mean=data.mean, std=data.std, workers=data.workers,
            rank=distributed.rank(), world_size=distributed.world_size(),
        )  # fmt: skip
        batches = loader.first(len(self.everything), rows=self.rows)
        return codebook_health(nets.tokenizer, (move(batch, self.machine.device) for batch in batches))

    def batches(self, source: Views) -> Iterator[Batch]:
        """All views of all items, those of an item in one batch."""
        data = self.config.data
        assert data.mean is not None  # a run's config always has them
        assert data.std is not None
        rows, began, done = max(1, self.rows // source.views) * source.views, time.monotonic(), 0
        for batch in sequential(
            source, batch=rows, mean=data.mean, std=data.std, workers=data.workers,
            rank=distributed.rank(), world_size=distributed.world_size(),
        ):  # fmt: skip
            yield move(batch, self.machine.device)
            done += len(batch.x) * distributed.world_size()
            self.show_progress("features of items", began, len(source), min(done, len(source)))

    def show_progress(self, what: str, began: float, total: int, done: int) -> None:
        """A line about work that takes long; what is soon done goes without."""
        if (spent := time.monotonic() - began) > QUIET_SECONDS:
            text = f"{what} {done:,}/{total:,}"
            self.progress.show(f"{text} · ETA {clock(spent / done * (total - done))}", text)


def without_test(splits: Splits) -> Splits:
    """The same data before anybody has looked at its test items: a part of the training items stands in for them.

    Of data in folds the last one is left out, and the others, if there are two, test each other.
    """
    train, folds = splits.train, splits.folds
    if splits.test is None and folds is not None:
        kept = [i for i, fold in enumerate(folds) if fold != max(folds)]
        train, folds = part_of(train, kept), [folds[i] for i in kept]
    return splits._replace(train=train, test=None, folds=folds if folds is not None and len(set(folds)) > 1 else None)


def protocol_of(config: Config) -> dict[str, Any]:
    """What the scores of a results file were found by; those of another protocol do not stand beside them."""
    settings = config.probe.model_dump(mode="json", exclude={"enabled", "cache_mb", "training_items"})
    if settings["layer"] is None:
        del settings["layer"]  # as files have it that are older than the setting
    return {"probe": settings, "classifier": CLASSIFIER}


def probe_header(config: Config, folder: Path | None = None) -> dict[str, Any]:
    """The head of a results file. Scores of other items have another title, because titles are compared."""
    header = results_header(config, folder)
    title = f"{header['title']}{SCORED[config.probe.on]}"
    return {**header, "title": title, "protocol": protocol_of(config)}


def going_on(config: Config, results: Results, progress: ProgressLine) -> Config:
    """A run that is continued with other settings of the probe goes on with those its results began with."""
    header, known = probe_header(config), results.value.get("protocol")
    if known == header["protocol"] or not (results.value["baselines"] or results.value["evaluations"]):
        results.value.update(header)
        return config
    if not isinstance(known, dict) or known.get("classifier") != CLASSIFIER:
        return config  # of an older version: there is no going on by its rules
    progress.note(
        "results.json goes on with the settings of the probe that it began with; "
        "`bridle probe` measures all iterations by others."
    )
    own = ProbeConfig.model_validate_json(json.dumps(known["probe"]))
    kept = {key: getattr(config.probe, key) for key in ("enabled", "cache_mb", "training_items")}
    return config.model_copy(update={"probe": own.model_copy(update=kept)})


def solved_once(solve: Callable[[], Result]) -> Result:
    """Rank 0 solves, all ranks get what it found."""
    if not distributed.is_active():
        return solve()
    name, fields = distributed.done_once(lambda: (type(found := solve()).__name__, found._asdict()))
    kind = ProbeResult if name == ProbeResult.__name__ else LabelsResult
    return kind(**fields)
