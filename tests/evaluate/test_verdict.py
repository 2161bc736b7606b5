"""The verdict on features: what it compares, what it says, and which advice follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bridle.config import Config
from bridle.evaluate.significance import make_hits
from bridle.evaluate.verdict import advice, judge_results
from bridle.runs.results import Evaluation, Results, Score, Scores
from bridle.runs.results import Verdict as CodebookVerdict

TRUTH = [np.arange(400) % 4]


def scored(right: int, *, draws: tuple[float, ...] = (), items: int = 100_000) -> Scores:
    """The first `right` of 400 test items are answered rightly; `draws` with five labels per class."""
    hits = make_hits(np.arange(400) < right, TRUTH)
    few = {"5 per class": Score(value=float(np.mean(draws)), shots=5, draws=draws)} if draws else {}
    return Scores(accuracy=right / 400, hits=hits, further=few, train_items=items)


def results(own: Scores, **baselines: Scores) -> Results:
    return Results(method="RQ", baselines=baselines, evaluations=(Evaluation(iteration=2, probe=own),))


def test_features_that_beat_every_baseline_are_said_to() -> None:
    found = judge_results(results(scored(360), raw=scored(320), untrained=scored(300)))
    assert found is not None and found.level == "ok"
    assert found.text.startswith("RQ iter2 with all labels beats raw input by 10.0 ±2.")
    assert " and untrained encoder by 15.0 ±3." in found.text


def test_a_loss_with_few_labels_is_told_though_all_labels_look_fine() -> None:
    own, raw = scored(360, draws=(0.30, 0.31, 0.32)), scored(320, draws=(0.40, 0.42, 0.42))
    found = judge_results(results(own, raw=raw))
    assert found is not None and found.level == "bad"
    assert "with all labels beats raw input by 10.0" in found.text
    assert "with 5 labels per class loses to raw input by 10.3" in found.text


def test_fewer_draws_are_compared_with_the_first_of_more() -> None:
    own, raw = scored(360, draws=(0.50, 0.52, 0.51, 0.0, 0.0)), scored(320, draws=(0.40, 0.41, 0.42))
    found = judge_results(results(own, raw=raw))
    assert found is not None
    assert "with 5 labels per class beats raw input by 10.0" in found.text


def test_a_difference_that_may_be_chance_is_no_win() -> None:
    found = judge_results(results(scored(322), raw=scored(320)))
    assert found is not None and found.level == "warn"
    assert "is not clearly different from raw input (+0.5 ±" in found.text


def test_scores_that_are_not_paired_are_compared_by_their_intervals() -> None:
    own = Scores(mean_average_precision=0.50, interval=(0.47, 0.53))
    other = Scores(mean_average_precision=0.40, interval=(0.36, 0.44))
    found = judge_results(results(own, classical=other))
    assert found is not None and "beats classical by 10.0 ±5.0" in found.text


def test_fine_tuning_is_compared_with_training_from_scratch() -> None:
    entries = (
        Evaluation(iteration=0, start="scratch", finetune=scored(200)),
        Evaluation(iteration=2, start="iter2", finetune=scored(300)),
    )
    found = judge_results(Results(method="RQ", evaluations=entries))
    assert found is not None and "beats training from scratch by 25.0" in found.text
    assert judge_results(Results(method="RQ", evaluations=entries[1:])) is None  # nothing to compare it with


def test_nothing_is_said_of_a_run_without_scores() -> None:
    assert judge_results(Results(evaluations=(Evaluation(iteration=1),))) is None


@pytest.mark.parametrize(
    ("changes", "changed", "told"),
    [
        (["encoder_phase.steps=3"], {}, "train longer"),
        ([], {"verdicts": (CodebookVerdict(stage=1, level="bad", text="collapsed"),)}, "mend the codebooks"),
        (["probe.deviation=false", "probe.pool=mean"], {}, "probe.deviation=true"),
        (["encoder.depth=6", "probe.layer=null"], {}, "probe.layer=all"),
        (["geometry.patch=[8, 8]"], {}, "4 tokens of [8, 8]"),
        ([], {"probe": scored(100, items=300)}, "300 items are few"),
    ],
)
def test_each_rule_of_advice_fires_on_its_own_ground(
    small: Callable[..., Config], changes: list[str], changed: dict[str, Any], told: str
) -> None:
    clean = ["probe.deviation=true", "probe.layer=1", "encoder_phase.steps=1000000", "max_steps=1000000"]
    plain = Evaluation(iteration=1, probe=scored(100))
    assert list(advice(small(*clean), plain, Results())) == []
    found = list(advice(small(*clean, *changes), plain.model_copy(update=changed), Results()))
    assert len(found) == 1 and told in found[0]


def test_an_untrained_encoder_far_below_raw_input_points_at_the_patches(small: Callable[..., Config]) -> None:
    baselines = {"raw": scored(300), "untrained": scored(200)}
    config = small("probe.deviation=true", "probe.layer=1", "encoder_phase.steps=1000000", "max_steps=1000000")
    (tip,) = advice(config, Evaluation(iteration=1, probe=scored(250)), Results(baselines=baselines))
    assert "use smaller patches" in tip


def test_a_loss_to_the_untrained_encoder_points_at_what_the_codes_hold(small: Callable[..., Config]) -> None:
    lost = results(scored(300), untrained=scored(360))
    assert any("tokenizer.standardise=item" in text for text in advice(small(), lost.evaluations[-1], lost))
    item = small("tokenizer.standardise=item")
    assert not any("standardise" in text for text in advice(item, lost.evaluations[-1], lost))
    won = results(scored(360), untrained=scored(300))
    assert not any("standardise" in text for text in advice(small(), won.evaluations[-1], won))


def test_a_loss_to_the_stem_alone_points_at_reading_it(small: Callable[..., Config]) -> None:
    lost, won = (results(scored(300), stem=scored(n)) for n in (360, 240))
    assert any("probe.layer=stem" in text for text in advice(small(), lost.evaluations[-1], lost))
    assert not any("probe.layer=stem" in text for text in advice(small(), won.evaluations[-1], won))


def test_advice_is_given_only_where_training_did_not_clearly_help(small: Callable[..., Config]) -> None:
    config = small("encoder_phase.steps=3")
    good, bad = (judge_results(results(scored(n), raw=scored(300)), config) for n in (380, 200))
    assert good is not None and good.advice == ()
    assert bad is not None and bad.advice[0].startswith("train longer")
