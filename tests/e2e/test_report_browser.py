"""The report in a real browser: it loads without complaint, fits a phone, follows dark mode, and hostile text is inert.

The report runs no scripts, so a second page holds it in a frame of a given width, measures it, and writes down what it
found; the browser prints that page's document.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from stored_results import results as stored

from bridle.report.decoded import CodeAlone, Rebuilt, SideBySide
from bridle.report.page import RunSummary, write_report
from bridle.report.runs import Measured
from bridle.report.sample_pictures import data_uri, sound_uri
from bridle.report.token_maps import CodeStrip, Gallery, Neighbours, Shown, TokenMap
from bridle.runs.reconstruction import AnchorPoint, RateDistortion, RatePoint

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH (Debian: apt install chromium)")

HOSTILE = "<script>top.document.title='owned'</script><img src=x onerror=\"top.document.title='owned'\">" + "x" * 300

HOLDER = """<!doctype html><meta charset="utf-8"><title>holder</title><output></output><script>
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement, style = frame.contentWindow.getComputedStyle;
  const label = page.querySelector("figure svg text");
  document.querySelector("output").textContent = JSON.stringify({
    width: root.clientWidth,
    needed: root.scrollWidth,
    headings: [...page.querySelectorAll("h1, h2, h3")].map(heading => heading.textContent.trim()),
    drawings: [...page.querySelectorAll("figure svg")].map(drawing => drawing.getBoundingClientRect().height),
    pictures: [...page.querySelectorAll("img")].map(picture => picture.complete && picture.naturalWidth > 0),
    sounds: [...page.querySelectorAll("audio")].map(sound => sound.src.slice(0, 15)),
    paper: style(page.body).backgroundColor,
    ink: label && style(label).fill,
  });
}
</script><iframe style="width:%dpx;height:900px;border:0" onload="measure(this)" srcdoc="%s"></iframe>"""


class Seen(NamedTuple):
    """What the browser saw."""

    found: dict[str, Any]  # measured in the frame
    title: str  # of the holder, which a script in the report would change
    console: list[str]


def browse(folder: Path, page: str, *, width: int, dark: bool = False) -> Seen:
    """Show `page` in a frame of `width` pixels."""
    assert CHROMIUM is not None
    holder = folder / "holder.html"
    holder.write_text(HOLDER % (width, html.escape(page)), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1400,1000"]
    flags += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", holder.as_uri()]
    done = subprocess.run([CHROMIUM, *flags], capture_output=True, text=True, timeout=120, check=True)
    written = re.search(r"<output>(.*?)</output>", done.stdout, re.DOTALL)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert written and title, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(json.loads(html.unescape(written[1])), title[1], console)


def example(name: str, *, stages: int) -> RunSummary:
    rows = [
        {
            "iteration": i,
            "phase": "encoder",
            "step": s,
            "steps": 40,
            "loss": 5 - s / 20,
            "token_accuracy": [s / 100] * stages,
        }
        for i in (1, 2)
        for s in (10, 20, 30, 40)
    ]
    stage = {
        "codes": 256,
        "usage_rate": 0.97,
        "entropy": 5.1,
        "effective_usage": 0.89,
        "perplexity": 164.0,
        "top_share": 0.02,
        "norms": [0.9, 1.0],
        "norms_start": [0.5, 0.6],
    }
    evaluations = [
        {
            "iteration": i,
            "probe": {"accuracy": 0.91, "interval": [0.88, 0.94], "chance": 0.1},
            "codebooks": [{**stage, "stage": m + 1} for m in range(stages)],
            "verdicts": [{"stage": m + 1, "level": "warn", "text": f"{name} one code …"} for m in range(stages)],
        }
        for i in (1, 2)
    ]
    results = {"evaluations": evaluations, "baselines": {"raw": {"accuracy": 0.7}}}
    aside = ({"path": name, "reason": name, "phase": "iter1-encoder"},)
    summary = RunSummary(name, name, "RQ", rows, stored(results), f"name: {name}\n", {"command": name})
    shown = {"gallery": gallery(name, stages=stages), "quarantine": aside, "further": further(name)}
    return summary._replace(**shown, rates=(rates(name, stages=stages),))


def rates(name: str, *, stages: int) -> RateDistortion:
    """Rates of every stage beside a codec, with text from elsewhere."""
    points = [
        RatePoint(stages=m, bits_per_token=8 * m, rate=0.5 * m, psnr=20 + m, ssim=0.9) for m in range(1, stages + 1)
    ]
    anchor = AnchorPoint(codec="JPEG", setting=name, rate=0.4, psnr=23.0, ssim=0.9)
    return RateDistortion(
        iteration=2, items=9, held_out=name, unit="bits per pixel", by_stages=tuple(points), anchors=(anchor,),
        notes=(name,),
    )  # fmt: skip


def further(name: str) -> tuple[Measured, ...]:
    """Neighbours and fine-tuning with every score there is."""
    scores = {"accuracy": 0.9, "interval": [0.88, 0.92], "top5": 0.99, "balanced_accuracy": 0.89, "sd": 0.01}
    scores |= {
        "mean_average_precision": 0.9,
        "setting": {"neighbours": 10},
        "train_items": 1_000_000,
        "test_items": 100_000,
    }
    knn = {"protocol": {"root": name}, "evaluations": [{"iteration": 2, "probe": scores}]}
    tuned = {"protocol": {"root": name}, "evaluations": [{"iteration": 2, "finetune": scores}]}
    return Measured("knn", stored(knn)), Measured("finetune", stored(tuned))


def gallery(name: str, *, stages: int) -> Gallery:
    """A photograph-sized, a tiny and a very wide picture, and a short sound."""
    photo, tiny, wide = (
        data_uri(np.full((*size, 4), 200, np.uint8), longest=480) for size in ((224, 224), (8, 8), (8, 130))
    )
    sound = sound_uri(torch.zeros(800), rate=8000, limit=200_000)
    hits = [Shown(name, name, picture, score=0.5, same=True) for picture in (photo, tiny, wide, photo, tiny)]
    return Gallery(
        about="3 samples",
        maps=[TokenMap(Shown(name, name, picture, sound), [picture] * stages) for picture in (photo, tiny)],
        codes=[
            [CodeStrip(255, 0.123, "#336699", one, tiny, name, CodeAlone(tiny, sound)) for one in (wide, tiny)]
            for _ in range(stages)
        ],
        decoded=[SideBySide(name, name, [Rebuilt("original", photo, sound), Rebuilt("1 stage", tiny, sound)])],
        neighbours=[Neighbours(hits[0], hits)] * 2,
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    runs = [
        example("digits", stages=8),
        example(HOSTILE, stages=4),
        RunSummary("new", "new", "", [], stored({}), "", {}),
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(runs, path, title="A title").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [390, 980, 1125, 1280])
def test_the_report_loads_without_a_word_on_the_console_and_fits(tmp_path: Path, page: str, width: int) -> None:
    seen = browse(tmp_path, page, width=width)
    assert seen.console == []
    assert seen.found["needed"] <= seen.found["width"] <= width
    assert {"A title", "Summary", "digits RQ", "Codebooks after iteration 2"} <= set(seen.found["headings"])
    assert len(seen.found["drawings"]) == 2 + 2 + 2 * 5 and min(seen.found["drawings"]) > 60
    shown = {"Token maps", "Decoded from codes", "Dictionary of codes", "Nearest neighbours"}
    assert shown <= set(seen.found["headings"])
    assert "Rate and distortion: digits" in seen.found["headings"]
    assert len(seen.found["pictures"]) > 50 and all(seen.found["pictures"]), "every picture is loaded"
    assert seen.found["sounds"] == ["data:audio/wav;"] * (4 + 4 + 2 * (8 + 4))
    assert seen.title == "holder"


def test_the_report_follows_the_readers_light_or_dark_setting(tmp_path: Path, page: str) -> None:
    light, dark = (browse(tmp_path, page, width=1280, dark=choice).found for choice in (False, True))
    assert (light["paper"], dark["paper"]) == ("rgb(246, 247, 249)", "rgb(16, 19, 24)")
    assert light["ink"] != dark["ink"], "the drawings must follow too"


def test_these_checks_notice_a_page_that_runs_scripts_and_does_not_fit(tmp_path: Path) -> None:
    seen = browse(tmp_path, f"<p style='width:900px'>wide</p>{HOSTILE}<script>nothing.here</script>", width=390)
    assert seen.title == "owned"
    assert any("nothing is not defined" in line for line in seen.console)
    assert seen.found["needed"] > seen.found["width"]
