from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from typing import Any

import matplotlib
import pytest
from PIL import Image, ImageColor
from stored_results import scores, stage

from bridle.report.plots import (
    Bar,
    bar_of,
    code_norm_histograms,
    code_usage_bars,
    demo_summary_figure,
    loss_curves,
    probe_bars,
    token_accuracy_curves,
)
from bridle.report.svg import DARK, LIGHT, PAGE, css_variables


def rows(iterations: int = 2, phase: str = "encoder", **values: Any) -> list[dict[str, Any]]:
    return [
        {"iteration": i + 1, "phase": phase, "step": 10 * s, "steps": 40, "loss": 5.0 / s, **values}
        for i in range(iterations)
        for s in range(1, 5)
    ]


STAGES = [stage(usage_rate=0.9, effective_usage=0.8), stage(usage_rate=0.7, effective_usage=0.5)]


def words(svg: str) -> list[str]:
    return [re.sub(r"\s+", " ", "".join(node.itertext())).strip() for node in ET.fromstring(svg).iter("text")]


FIGURES = {
    "loss": lambda: loss_curves(rows()),
    "tokenizer": lambda: loss_curves(rows(phase="tokenizer", cosine=0.5, commitment=0.1), phase="tokenizer"),
    "accuracy": lambda: token_accuracy_curves(rows(token_accuracy=[0.4, 0.2])),
    "usage": lambda: code_usage_bars([("iteration 1", STAGES), ("iteration 2", STAGES)]),
    "norms": lambda: code_norm_histograms([stage(norms_start=[0.5, 0.6], norms=[0.9, 1.0])]),
    "probe": lambda: probe_bars([Bar("raw", 0.5, 0.4, 0.6), Bar("RQ iter 1", 0.7)], chance=0.1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_one_inert_svg_in_the_pages_colours(name: str) -> None:
    svg = FIGURES[name]()
    root = ET.fromstring(svg)
    assert root.tag == "svg" and root.get("role") == "img" and root.get("aria-label")
    assert "var(--fig-" in svg
    assert not set(PAGE) & set(re.findall(r"#[0-9a-f]{6}", svg)), "a stand-in colour was left"
    assert not re.search(r"http|<script|<metadata|<image|<style", svg)
    assert "var(--font)" in svg and "DejaVu" not in svg


def test_the_same_figure_is_the_same_text_each_time_and_ids_differ_between_figures() -> None:
    assert FIGURES["loss"]() == FIGURES["loss"]()
    ids = [set(re.findall(r'\bid="([^"]+)"', FIGURES[name]())) for name in FIGURES]
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_a_figure_refers_only_to_its_own_ids() -> None:
    for make in FIGURES.values():
        svg = make()
        used = set(re.findall(r"(?:url\(|href=\")#([^\")]+)", svg))
        assert used <= set(re.findall(r'\bid="([^"]+)"', svg))


def test_nothing_to_draw_gives_the_empty_string() -> None:
    assert loss_curves([]) == ""
    assert loss_curves(rows(phase="tokenizer")) == ""
    assert loss_curves([{"phase": "encoder", "iteration": 1, "step": 1, "loss": None}]) == ""
    assert token_accuracy_curves(rows()) == ""
    assert code_usage_bars([("iteration 1", [])]) == ""
    assert code_norm_histograms([]) == "" and code_norm_histograms([stage(norms=[0.0])]) == ""
    assert probe_bars([]) == ""


def test_iterations_are_named_only_if_there_are_several() -> None:
    assert "iteration 2" in words(loss_curves(rows(2)))
    assert not any("iteration" in word for word in words(loss_curves(rows(1))))


def test_every_stage_has_its_name_and_rows_are_read_first() -> None:
    found = [w for w in words(token_accuracy_curves(rows(token_accuracy=[0.1] * 6))) if w.startswith("stage")]
    # Matplotlib writes its legend column by column: 1 5 | 2 6 | 3 | 4 reads as 1 2 3 4 over 5 6.
    assert found == ["stage 1", "stage 5", "stage 2", "stage 6", "stage 3", "stage 4"]


def test_a_step_that_was_not_finite_leaves_a_gap_and_no_error() -> None:
    broken = rows(1)
    broken[1]["loss"] = float("nan")
    broken[2]["loss"] = "oops"
    assert "nan" not in loss_curves(broken).lower()


def test_of_a_step_written_twice_the_later_row_counts() -> None:
    once = rows(1)
    twice = [{**row, "loss": 99.0} for row in once] + once
    assert loss_curves(twice) == loss_curves(once)


def test_markup_and_mathematics_in_a_label_stay_text() -> None:
    label = "<b>$x$</b>&"
    assert label in words(probe_bars([Bar(label, 0.5)]))


def test_a_users_own_matplotlib_settings_are_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    FIGURES["loss"]()
    assert dict(matplotlib.rcParams) == before


def test_both_palettes_define_every_variable_the_figures_use() -> None:
    used = {variable for make in FIGURES.values() for variable in re.findall(r"var\((--fig-[a-z0-9-]+)\)", make())}
    assert used <= set(css_variables(LIGHT)) == set(css_variables(DARK))


def test_a_probe_without_a_number_has_no_bar() -> None:
    assert bar_of("raw", None) is None and bar_of("raw", scores()) is None
    assert bar_of("raw", scores(accuracy=0.5, interval=[0.4, 0.6])) == Bar("raw", 0.5, 0.4, 0.6)
    assert bar_of("raw", scores(accuracy=0.5)) == Bar("raw", 0.5)


@pytest.mark.parametrize("dark", [False, True])
def test_the_summary_is_a_picture_on_its_own_paper(dark: bool) -> None:
    probe = scores(accuracy=0.8, interval=[0.75, 0.85], chance=0.1)
    results = {"digits": {"raw": probe, "VQ iter 1": probe, "RQ iter 1": probe}, "tones": {"raw": probe}, "none": {}}
    picture = Image.open(io.BytesIO(demo_summary_figure(results, dark=dark))).convert("RGB")
    paper = (DARK if dark else LIGHT).paper
    assert picture.getpixel((1, 1)) == ImageColor.getrgb(paper)
    assert picture.width > 1000


def test_the_summary_of_nothing_is_still_a_picture() -> None:
    assert demo_summary_figure({}).startswith(b"\x89PNG")
