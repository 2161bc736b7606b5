"""A run of a recipe is compared with the recipe's expected curves; anything else is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridle import api
from bridle.config import Config, dump_config, load_config, recipe_names, with_statistics
from bridle.grid.demo import MODALITIES, demo_arguments
from bridle.runs import reference_curves
from bridle.runs.reference_curves import Band, Curves, CurveWatch, curve_names, method_key, parse_curves
from bridle.train import step_metrics
from bridle.train.algorithm1 import schedule
from bridle.train.engine import phase_key

HOW = "make it anew: benchmarks/expected_curves.py says how"
POINTS = {
    100: {
        "loss": [Band(2.0, 0.1)],
        "token_accuracy": [Band(0.3, 0.001)],
        "code_usage": [Band(0.9, 0.01), Band(0.8, 0.01)],
    }
}
INSIDE = {"step": 100, "loss": 2.39, "token_accuracy": [0.34, 0.9], "code_usage": [0.99, 0.71]}


def watch() -> CurveWatch:
    return CurveWatch("iter1-encoder", POINTS)


def test_a_row_inside_the_band_is_silent() -> None:
    assert watch().look(INSIDE) == []  # |2.39 - 2| < 4 * 0.1, |0.34 - 0.3| < 0.05, |0.99 - 0.9| and |0.71 - 0.8| < 0.1


def test_a_row_outside_the_band_is_told_once() -> None:
    looking = watch()
    (text,) = looking.look({**INSIDE, "loss": 2.41})
    assert text.startswith(
        "iter1-encoder step 100: loss 2.41, expected 2 ± 0.4 (docs/evaluating.md#expected-curves); check that the data"
    )
    assert looking.look({**INSIDE, "loss": 9.0}) == []


def test_each_quantity_has_a_note_of_its_own() -> None:
    texts = watch().look({"step": 100, "loss": 1.0, "token_accuracy": [0.9], "code_usage": [0.5, 0.1]})
    assert [text.split(": ", 1)[1].split(",")[0] for text in texts] == [
        "loss 1",
        "token accuracy 0.9",
        "code usage of stage 2 0.1",  # 0.7 away from its mean, stage 1 only 0.4
    ]


@pytest.mark.parametrize(
    ("band", "floor", "allowed"),
    [(Band(2.0, 0.1), 0.0, 0.4), (Band(2.0, 0.01), 0.0, 0.2), (Band(0.1, 0.001), 0.05, 0.05), (Band(-3.0, 0), 0, 0.3)],
)
def test_allowance_is_four_spreads_or_a_tenth_or_the_floor(band: Band, floor: float, allowed: float) -> None:
    assert band.allowance(floor) == pytest.approx(allowed)


@pytest.mark.parametrize(
    "row",
    [
        {"step": 90, "loss": 99.0},
        {"step": 100, "loss": None, "token_accuracy": None, "code_usage": [0.9, 0.8]},  # a skipped step
        {"step": 100},
    ],
)
def test_rows_without_an_expected_figure_are_silent(row: dict[str, Any]) -> None:
    assert watch().look(row) == []


def test_methods_are_named_by_their_codebooks() -> None:
    assert [method_key(sizes) for sizes in ((256,) * 4, (1024,), (64, 32))] == ["4x256", "1x1024", "64+32"]


# Which runs are compared.


def measured(*overrides: str) -> Config:
    return with_statistics(load_config("digits-tiny", overrides), [0.31], [0.35])


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = Curves((0.31,), (0.35,), {"iter1-encoder": POINTS})
    monkeypatch.setattr(
        reference_curves, "read_curves", lambda recipe, method: curves if recipe == "digits-tiny" else None
    )


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    "override",
    ["seed=7", "runtime.threads=2", "probe.items=60", "finetune.epochs=3", "data.workers=1", "quantizer.codes=32"],
)
def test_what_moves_no_curve_may_change(override: str) -> None:
    assert CurveWatch.of(measured(override), "iter1-encoder").points == POINTS


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    "override",
    [
        *("encoder_phase.learning_rate=1e-2", "max_steps=50", "mask.ratio=0.7", "quantizer.decay=0.9", "name=mine"),
        *("augment.flip=false", "schedule.iterations=3", "name=../digits-tiny"),
    ],
)
def test_a_changed_recipe_expects_nothing(override: str) -> None:
    assert CurveWatch.of(measured(override), "iter1-encoder").points == {}


@pytest.mark.usefixtures("reference")
def test_data_with_other_statistics_expects_nothing() -> None:
    other = with_statistics(load_config("digits-tiny"), [0.41], [0.35])
    assert CurveWatch.of(other, "iter1-encoder").points == {}


@pytest.mark.usefixtures("reference")
def test_a_phase_without_reference_expects_nothing() -> None:
    assert CurveWatch.of(measured(), "iter1-finetune").points == {}


def test_statistics_that_a_recipe_gives_may_not_be_changed() -> None:
    config = load_config("cifar10-tiny", ["data.mean=[0.0]", "data.std=[1.0]"])
    recipe = load_config("cifar10-tiny")
    assert reference_curves.changes(recipe, recipe) == []
    assert [line.split(":")[0] for line in reference_curves.changes(config, recipe)] == ["data.mean", "data.std"]


def test_a_reference_that_cannot_be_read_is_told_once_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(recipe: str, method: str) -> Curves:
        return parse_curves({"format": 1}, method)  # type: ignore[return-value]

    monkeypatch.setattr(reference_curves, "read_curves", broken)
    looking = CurveWatch.of(measured(), "iter1-encoder")
    (text,) = looking.look(INSIDE)
    assert "expected curves of digits-tiny cannot be read" in text
    assert looking.look(INSIDE) == []


def test_training_says_when_it_leaves_the_band(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Alien(CurveWatch):
        @classmethod
        def of(cls, config: Config, key: str) -> CurveWatch:
            return CurveWatch(key, {config.max_steps or 0: {"loss": [Band(1000.0, 0.0)]}})

    monkeypatch.setattr(step_metrics, "CurveWatch", Alien)
    api.pretrain(small("max_steps=2", "schedule.iterations=1", "probe.enabled=false"), out=tmp_path / "run")
    told = [line for line in capsys.readouterr().err.splitlines() if "expected 1e+03 ± 1e+02" in line]
    assert len(told) == 1
    assert told[0].startswith("iter1-encoder step 2: loss")


# The files that are shipped.


def document(recipe: str) -> dict[str, Any]:
    return dict(
        json.loads((Path(reference_curves.__file__).parents[1] / f"config/reference_curves/{recipe}.json").read_text())
    )


@pytest.mark.parametrize("recipe", curve_names())
def test_a_shipped_reference_was_made_with_the_recipe_as_it_is(recipe: str, maker: Any) -> None:
    config, found = load_config(recipe), document(recipe)
    now, then = maker.settings_of(config), found["settings"]
    changed = {key: (value, now.get(key)) for key, value in then.items() if now.get(key) != value}
    assert not changed, f"{recipe} was changed since its expected curves were measured; {HOW}"
    assert found["recipe"] == recipe
    assert method_key(config.quantizer.sizes) in found["methods"]


def test_both_methods_of_the_demo_know_what_to_expect() -> None:
    for modality, recipe in MODALITIES.items():
        statistics = document(recipe)["statistics"]
        for arguments in demo_arguments(modality, seed=0).values():
            config = with_statistics(load_config(recipe, arguments[1:]), statistics["mean"], statistics["std"])
            assert CurveWatch.of(config, f"iter{config.schedule.iterations}-encoder").points


def test_every_tiny_recipe_ships_its_curves() -> None:
    tiny = {name for name in recipe_names() if name.endswith("-tiny")}
    assert set(curve_names()) == tiny


@pytest.mark.parametrize("recipe", curve_names())
def test_a_shipped_reference_covers_every_phase(recipe: str) -> None:
    config, found = load_config(recipe), document(recipe)
    for method, content in found["methods"].items():
        assert len(content["seeds"]) >= 2
        curves = parse_curves(found, method)
        assert curves is not None
        assert list(curves.phases) == [phase_key(turn.iteration, turn.name) for turn in schedule(config)]
        for key, points in curves.phases.items():
            steps = (config.tokenizer_phase if "tokenizer" in key else config.encoder_phase).steps
            assert max(points) == steps
            bands = np.array([band for point in points.values() for bands in point.values() for band in bands])
            assert np.isfinite(bands).all()
            assert (bands[:, 1] >= 0).all()


# Making them.


@pytest.fixture(scope="module")
def maker(benchmark_script: Callable[[str], Any]) -> Any:
    return benchmark_script("expected_curves")


def write_run(folder: Path, config: Config, losses: Callable[[int], float]) -> Path:
    """A finished run's config and log, with the loss a function of the step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for turn in schedule(config):
            steps = (config.tokenizer_phase if turn.name == "tokenizer" else config.encoder_phase).steps or 0
            for step in range(10, steps + 1, 10):
                row = {"iteration": turn.iteration, "phase": turn.name, "step": step, "steps": steps}
                row |= {"loss": losses(step), "code_usage": [0.5] * config.quantizer.codebooks}
                if turn.name == "encoder":
                    row["token_accuracy"] = [0.25] * config.quantizer.codebooks
                file.write(json.dumps(row) + "\n")
    return folder


def test_bands_are_mean_and_spread_of_the_rows_of_all_seeds_around_a_step(maker: Any, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(s), measured(f"seed={s}"), lambda step, s=s: 5.0 + s - step / 800) for s in (0, 1)]
    found = maker.make_document([maker.read_finished(run) for run in runs])
    curves = parse_curves(found, "4x64")
    assert curves is not None
    points = curves.phases["iter1-encoder"]
    assert list(points) == [100, 200, 300, 400, 500, 600, 700, 800]
    rows = [5.0 + s - step / 800 for s in (0, 1) for step in range(170, 231, 10)]
    assert points[200]["loss"][0] == pytest.approx((np.mean(rows), np.std(rows, ddof=1)), abs=1e-5)
    assert points[200]["token_accuracy"] == [Band(0.25, 0.0)]
    assert len(points[200]["code_usage"]) == 4
    assert "token_accuracy" not in curves.phases["iter2-tokenizer"][200]


def test_what_is_written_reads_back_the_same_and_fits_the_runs(maker: Any, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(s), measured(f"seed={s}"), lambda step: 3.0) for s in (0, 1)]
    found = maker.make_document([maker.read_finished(run) for run in runs])
    maker.write_json(found, tmp_path / "digits-tiny.json")
    assert json.loads((tmp_path / "digits-tiny.json").read_text()) == json.loads(json.dumps(found))
    curves = parse_curves(found, "4x64")
    assert curves is not None
    assert curves.fit(measured())


def test_runs_that_cannot_serve_are_refused(maker: Any, tmp_path: Path) -> None:
    changed = write_run(tmp_path / "a", measured("mask.ratio=0.7"), lambda step: 3.0)
    with pytest.raises(SystemExit, match=r"not the recipe as shipped: mask\.ratio"):
        maker.read_finished(changed)
    half = write_run(tmp_path / "b", measured(), lambda step: 3.0)
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    (half / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(SystemExit, match="iter2-encoder is not finished"):
        maker.read_finished(half)
    alone = maker.read_finished(write_run(tmp_path / "c", measured(), lambda step: 3.0))
    with pytest.raises(SystemExit, match="at least two runs with different seeds"):
        maker.make_document([alone])
