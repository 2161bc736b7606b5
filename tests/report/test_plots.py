from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from PIL import Image, ImageColor
from stored_results import evaluation, scores, stage

from bridle.report.plots import (
    code_norm_histograms,
    code_usage_bars,
    loss_curves,
    probe_bars,
    stage_curves,
    write_codebook_figures,
)
from bridle.report.svg import DARK, LIGHT, PAGE, Plot, css_variables


def rows(iterations: int = 2, phase: str = "encoder", **values: Any) -> list[dict[str, Any]]:
    return [
        {"iteration": i + 1, "phase": phase, "step": 10 * s, "steps": 40, "loss": 5.0 / s, **values}
        for i in range(iterations)
        for s in range(1, 5)
    ]


STAGES = [stage(usage_rate=0.9, effective_usage=0.8), stage(usage_rate=0.7, effective_usage=0.5)]


def inline(plot: Plot | None) -> str:
    assert plot is not None
    return plot.inline()


def words(svg: str) -> list[str]:
    return [re.sub(r"\s+", " ", "".join(node.itertext())).strip() for node in ET.fromstring(svg).iter("text")]


FIGURES = {
    "loss": lambda: loss_curves(rows(), phase="encoder"),
    "tokenizer": lambda: loss_curves(rows(phase="tokenizer", cosine=0.5, commitment=0.1), phase="tokenizer"),
    "accuracy": lambda: stage_curves(rows(token_accuracy=[0.4, 0.2]), "token_accuracy", phase="encoder"),
    "usage": lambda: code_usage_bars([("iteration 1", STAGES), ("iteration 2", STAGES)]),
    "norms": lambda: code_norm_histograms([stage(norms_start=[0.5, 0.6], norms=[0.9, 1.0])]),
    "probe": lambda: probe_bars(
        {"raw": scores(accuracy=0.5, interval=[0.4, 0.6], chance=0.1), "RQ iter 1": scores(accuracy=0.7)}
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_one_inert_svg_in_the_pages_colours(name: str) -> None:
    svg = inline(FIGURES[name]())
    root = ET.fromstring(svg)
    assert root.tag == "svg" and root.get("role") == "img" and root.get("aria-label")
    assert "var(--fig-" in svg
    assert not set(PAGE.values()) & set(re.findall(r"#[0-9a-f]{6}", svg)), "a stand-in colour was left"
    assert not re.search(r"http|<script|<metadata|<image|<style", svg)
    assert "var(--font)" in svg and "DejaVu" not in svg


def test_the_same_figure_is_the_same_text_each_time_and_ids_differ_between_figures() -> None:
    assert inline(FIGURES["loss"]()) == inline(FIGURES["loss"]())
    ids = [set(re.findall(r'\bid="([^"]+)"', inline(FIGURES[name]()))) for name in FIGURES]
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_a_figure_refers_only_to_its_own_ids() -> None:
    for make in FIGURES.values():
        svg = inline(make())
        used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", svg))
        assert used <= set(re.findall(r'\bid="([^"]+)"', svg))


def test_nothing_to_draw_gives_no_figure() -> None:
    assert loss_curves([], phase="encoder") is None
    assert loss_curves(rows(phase="tokenizer"), phase="encoder") is None
    assert loss_curves([{"phase": "encoder", "iteration": 1, "step": 1, "loss": None}], phase="encoder") is None
    assert stage_curves(rows(), "token_accuracy", phase="encoder") is None
    assert code_usage_bars([("iteration 1", [])]) is None
    assert code_norm_histograms([]) is None and code_norm_histograms([stage(norms=[0.0])]) is None
    assert probe_bars({}) is None and probe_bars({"raw": scores()}) is None


def test_iterations_are_named_only_if_there_are_several() -> None:
    assert "iteration 2" in words(inline(loss_curves(rows(2), phase="encoder")))
    assert not any("iteration" in word for word in words(inline(loss_curves(rows(1), phase="encoder"))))


def test_every_stage_has_its_name_and_rows_are_read_first() -> None:
    curves = stage_curves(rows(token_accuracy=[0.1] * 6), "token_accuracy", phase="encoder")
    found = [w for w in words(inline(curves)) if w.startswith("stage")]
    # Matplotlib writes its legend column by column: 1 5 | 2 6 | 3 | 4 reads as 1 2 3 4 over 5 6.
    assert found == ["stage 1", "stage 5", "stage 2", "stage 6", "stage 3", "stage 4"]


def test_a_step_that_was_not_finite_leaves_a_gap_and_no_error() -> None:
    broken = rows(1)
    broken[1]["loss"] = float("nan")
    broken[2]["loss"] = "oops"
    assert "nan" not in inline(loss_curves(broken, phase="encoder")).lower()


def test_of_a_step_written_twice_the_later_row_counts() -> None:
    once = rows(1)
    twice = [{**row, "loss": 99.0} for row in once] + once
    found = [inline(loss_curves(found, phase="encoder")) for found in (twice, once)]
    assert found[0] == found[1]


def test_markup_and_mathematics_in_a_label_stay_text() -> None:
    label = "<b>$x$</b>&"
    assert label in words(inline(probe_bars({label: scores(accuracy=0.5)})))


def test_a_users_own_matplotlib_settings_are_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    inline(FIGURES["loss"]())
    assert dict(matplotlib.rcParams) == before


def test_both_palettes_define_every_variable_the_figures_use() -> None:
    used = {
        variable for make in FIGURES.values() for variable in re.findall(r"var\((--fig-[a-z0-9-]+)\)", inline(make()))
    }
    assert used <= set(css_variables(LIGHT)) == set(css_variables(DARK))


def test_codebook_figures_are_written_as_svg_and_png(tmp_path: Path) -> None:
    known = stage(norms_start=[0.5, 0.6], norms=[0.9, 1.0])
    entries = [evaluation(iteration=r, codebooks=[known]) for r in (1, 2)]
    names = {path.name for path in write_codebook_figures(entries, tmp_path / "figures")}
    stems = ("code-usage", "code-norms-iteration1", "code-norms-iteration2")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    picture = Image.open(tmp_path / "figures" / "code-usage.png").convert("RGB")
    assert picture.width > 500 and picture.getpixel((1, 1)) == ImageColor.getrgb(LIGHT["paper"])
    svg = (tmp_path / "figures" / "code-norms-iteration1.svg").read_text()
    assert "at the start" in svg and "var(--" not in svg, "a file of its own cannot use the page's colours"


def test_no_file_is_written_of_nothing(tmp_path: Path) -> None:
    assert write_codebook_figures([evaluation()], tmp_path / "figures") == []
