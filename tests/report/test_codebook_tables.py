from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from rich.console import Console
from stored_results import evaluation

from bridle.report.codebook_tables import codebook_table, verdict_lines, write_codebook_figures
from bridle.runs.results import Evaluation

STAGE = {
    "stage": 1,
    "codes": 256,
    "usage_rate": 0.5,
    "entropy": 2.0,
    "effective_usage": 0.18,
    "perplexity": 7.4,
    "top_share": 0.41,
    "energy": 0.125,
    "position_information": None,
    "label_information": None,
    "dead": 128,
    "tuples": 70000,
    "tuples_exact": False,
    "agreement": {"noise 1 %": 0.975},
    "norms": [0.9, 1.0],
    "norms_start": [0.5, 0.6],
}


def printed(*entries: Evaluation) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    for entry in entries:
        console.print(codebook_table(entry))
        for line in verdict_lines(entry):
            console.print(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_a_column_per_stage_and_fits_80_columns() -> None:
    text = printed(evaluation(iteration=2, codebooks=[{**STAGE, "stage": m} for m in (1, 2, 3, 4)]))
    lines = {line.split("  ")[0]: line.split()[-4:] for line in text.splitlines()}
    assert "iteration 2" in text and max(map(len, text.splitlines())) <= 80
    assert lines["never used"] == ["128"] * 4
    assert lines["top code, % of tokens"] == ["41.0"] * 4
    assert lines["distinct tuples so far"] == ["≈70,000"] * 4
    assert lines["codes kept, noise 1 %, %"] == ["97.5"] * 4
    assert "too few" in text, "position information that cannot be trusted"
    assert "label tells" not in text, "nothing is said of labels where there are none"


def test_a_verdict_is_a_line_and_hostile_text_stays_text() -> None:
    verdict = {"stage": 2, "level": "bad", "text": "[red]collapsed[/red]"}
    assert "bad  stage 2: [red]collapsed[/red]" in printed(evaluation(verdicts=[verdict]))


def test_figures_are_written_as_svg_and_png(tmp_path: Path) -> None:
    entries = [evaluation(iteration=r, codebooks=[STAGE]) for r in (1, 2)]
    names = {path.name for path in write_codebook_figures(entries, tmp_path / "figures")}
    stems = ("code-usage", "code-norms-iteration1", "code-norms-iteration2")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")}
    assert Image.open(tmp_path / "figures" / "code-usage.png").size[0] > 500
    svg = (tmp_path / "figures" / "code-norms-iteration1.svg").read_text()
    assert "at the start" in svg and "var(--" not in svg, "a file of its own cannot use the page's colours"


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert write_codebook_figures([evaluation()], tmp_path / "figures") == []
