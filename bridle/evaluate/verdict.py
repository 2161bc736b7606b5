"""Did training help? Scores beside the baselines, in words, and what to try where it did not.

Differences are paired: over test items (McNemar), over folds, or over the draws of a few-shot probe (Student's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import hypot
from typing import Literal, NamedTuple

from bridle.config import Config
from bridle.evaluate.significance import NO_SPREAD, Change, compare, compare_hits
from bridle.runs.results import Evaluation, Results, Scores
from bridle.seeding import generator

FEW_EPOCHS = 20  # passes over the data; with fewer, training longer is the first thing to try
FEW_ITEMS = 5000  # training items; with fewer, start from an existing model
FEW_TOKENS = 16  # per input


class Comparison(NamedTuple):
    """A score beside that of one baseline."""

    baseline: str  # in words
    shots: int | None  # labels per class; None: all labels
    change: Change


class Verdict(NamedTuple):
    """Whether features are worth having, in words."""

    level: Literal["ok", "warn", "bad"]  # ok: clearly better than every baseline; bad: clearly worse than one
    text: str
    advice: tuple[str, ...] = ()  # what to try, the first thing first


def judge_results(results: Results, config: Config | None = None) -> Verdict | None:
    """The verdict on the last model of a results file; None where it cannot be compared with anything.

    With the run's config there is advice where the features do not clearly help.
    """
    scored = [entry for entry in results.evaluations if entry.scores is not None and entry.start != "scratch"]
    if not scored:
        return None
    last = scored[-1]
    baselines = results.named_baselines
    for entry in results.evaluations:
        if entry.start == "scratch" and entry.scores is not None:
            baselines["training from scratch"] = entry.scores
    assert last.scores is not None
    found = list(comparisons(last.scores, baselines))
    if not found:
        return None
    level = _level(found)
    text = f"{results.model_name(last)} {sentence(found)}."
    tips = () if level == "ok" or config is None or last.finetune is not None else tuple(advice(config, last, results))
    return Verdict(level, text, tips)


def comparisons(scores: Scores, baselines: Mapping[str, Scores]) -> Iterator[Comparison]:
    """With all labels, then with few, beside every baseline that was measured alike."""
    for words, other in baselines.items():
        if (change := _main_change(scores, other)) is not None:
            yield Comparison(words, None, change)
    for shots, own in sorted(scores.few_shot.items()):
        for words, other in baselines.items():
            beside = other.few_shot.get(shots)
            shared = 0 if beside is None else min(len(own.draws), len(beside.draws))  # the first ones are the same
            if beside is None or shared < 2:
                continue
            change = compare(own.draws[:shared], beside.draws[:shared])
            if (change.half or 0.0) > NO_SPREAD:  # draws that all took the same items tell nothing of chance
                yield Comparison(words, shots, change)


def _main_change(own: Scores, other: Scores) -> Change | None:
    if own.main is None or other.main is None or own.name != other.name:
        return None
    paired = compare_hits(own.hits, other.hits, generator=generator(0, "verdict"))
    if paired is not None:
        return paired
    if 1 < len(own.values) == len(other.values):
        return compare(own.values, other.values)
    halves = [one.interval.half for one in (own, other) if one.interval is not None]
    return Change(own.main - other.main, hypot(*halves) if len(halves) == 2 else None, 1)


def _level(found: Sequence[Comparison]) -> Literal["ok", "warn", "bad"]:
    if any(one.change.is_clear and one.change.change < 0 for one in found):
        return "bad"
    return "ok" if all(one.change.is_clear for one in found) else "warn"


def sentence(found: Sequence[Comparison]) -> str:
    """What beats what, for each number of labels."""
    parts = []
    for shots in dict.fromkeys(one.shots for one in found):
        mine = [one for one in found if one.shots == shots]
        labels = "with all labels" if shots is None else f"with {shots} label{'s' if shots > 1 else ''} per class"
        parts.append(f"{labels} {_words(mine)}")
    return "; ".join(parts)


def _words(found: Sequence[Comparison]) -> str:
    """Wins, then losses, then what may be chance; each verb once."""
    said: dict[str, list[str]] = {"beats": [], "loses to": [], "is not clearly different from": []}
    for baseline, _, change in found:
        half = "" if change.half is None else f" ±{100 * change.half:.1f}"
        if not change.is_clear:
            said["is not clearly different from"].append(f"{baseline} ({100 * change.change:+.1f}{half})")
            continue
        verb = "beats" if change.change > 0 else "loses to"
        said[verb].append(f"{baseline} by {abs(100 * change.change):.1f}{half}")
    return ", ".join(f"{verb} {' and '.join(others)}" for verb, others in said.items() if others)


def advice(config: Config, last: Evaluation, results: Results) -> Iterator[str]:
    """What to try, by rules, the most likely first."""
    scores, phase = last.scores or Scores(), config.encoder_phase
    measured = None if results.protocol is None else results.protocol.probe
    probe = measured or config.probe
    steps = min(phase.step_count(max(scores.train_items, 1)), config.max_steps or 10**9)
    epochs = steps * phase.batch / max(scores.train_items, 1)
    if epochs < FEW_EPOCHS:
        yield f"train longer: an iteration saw every item {epochs:.1f} times (encoder_phase.steps={4 * steps})"
    if any(verdict.level != "ok" for verdict in last.verdicts):
        yield "mend the codebooks: `bridle codebooks RUN` says which and how"
    if probe.pool == "mean" and not probe.deviation:
        yield "read the features another way: `bridle probe RUN probe.deviation=true`, or probe.pool=axis"
    if probe.layer is None and config.encoder.depth > 2:
        yield "read every block, not the last alone: `bridle probe RUN probe.on=validation probe.layer=all`"
    if _loses(scores, results, "stem"):
        yield "read the stem alone, which the blocks do not improve yet: `bridle probe RUN probe.layer=stem`"
    raw, untrained = results.baselines.get("raw"), results.baselines.get("untrained")
    lost = None if raw is None or untrained is None else _main_change(untrained, raw)
    worse = _loses(scores, results, "untrained")
    if worse and config.loss.target == "codes" and config.tokenizer.standardise == "dataset":
        yield (
            "leave out of the codes what all patches of an item share, such as level, voice or lighting: "
            "tokenizer.standardise=item (recordings: with tokenizer.item_axes=[0])"
        )
    tokens = config.geometry.build().tokens
    if tokens < FEW_TOKENS or (lost is not None and lost.is_clear and lost.change < 0):
        yield f"use smaller patches or another input size: {tokens} tokens of {list(config.geometry.patch)} lose detail"
    if scores.train_items < FEW_ITEMS and config.encoder.weights is None:
        yield f"start from an existing model (encoder.weights=FILE): {scores.train_items:,} items are few to learn from"


def _loses(scores: Scores, results: Results, baseline: str) -> bool:
    """Is a score clearly below that of a baseline, with all labels or with few?"""
    beside = {baseline: results.baselines[baseline]} if baseline in results.baselines else {}
    return any(one.change.is_clear and one.change.change < 0 for one in comparisons(scores, beside))
