from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from stored_results import results as stored

from bridle.errors import CheckpointError, UsageError
from bridle.report.page import RunSummary, probes_by_title, write_report
from bridle.report.token_maps import CodeStrip, Gallery, Neighbours, Shown, TokenMap
from bridle.runs.results import Results

PROBE = {"accuracy": 0.912, "interval": [0.88, 0.94], "chance": 0.1}
STAGE = {
    "stage": 1,
    "codes": 256,
    "usage_rate": 0.97,
    "entropy": 5.1,
    "effective_usage": 0.89,
    "perplexity": 164.0,
    "top_share": 0.02,
    "energy": 0.31,
    "position_information": None,
    "norms": [0.9, 1.0],
    "norms_start": [0.5, 0.6],
}


def run(**changes: Any) -> RunSummary:
    metrics = [
        {"iteration": 1, "phase": "encoder", "step": s, "steps": 20, "loss": 5.0 - s / 10, "token_accuracy": [s / 100]}
        for s in (10, 20)
    ]
    evaluation = {
        "iteration": 1,
        "probe": PROBE,
        "codebooks": [STAGE],
        "verdicts": [{"stage": 1, "level": "ok", "text": "healthy."}],
    }
    results = {"evaluations": [evaluation], "baselines": {"raw": {"accuracy": 0.7}, "untrained": {"accuracy": 0.6}}}
    whole = RunSummary("digits-rq", "digits", "RQ", metrics, stored(results), "seed: 0\n", {"torch": "2.13"})
    return whole._replace(**changes)


class Tags(HTMLParser):
    """Tags with their attributes, and the text outside of style sheets."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def page(tmp_path: Path, *runs: RunSummary, **options: Any) -> str:
    return write_report(runs, tmp_path / "report.html", **options).read_text(encoding="utf-8")


def test_the_page_shows_the_results_and_the_sections(tmp_path: Path) -> None:
    shown = Tags(page(tmp_path, run(), title="My run"))
    for text in ("My run", "digits", "RQ", "91.2", "88.0–94.0", "raw input", "70.0", "0.97", "healthy.", "seed: 0"):
        assert text in shown.text, text
    headings = ("Encoder loss", "Token accuracy", "Code usage", "Code vectors", "Codebooks after iteration 1")
    assert all(heading in shown.text for heading in headings)


def test_the_page_is_inert(tmp_path: Path) -> None:
    shown = Tags(page(tmp_path, run(), run(method="VQ")))
    names = {name for name, _ in shown.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "img", "form", "base", "audio", "video"}
    policy = next(a["content"] for name, a in shown.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    for _, attributes in shown.tags:
        assert not any(key.startswith("on") for key in attributes)
        for key in ("href", "src", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#")


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onload=x {{ 7*7 }} $x$ </svg></style>"


def test_hostile_text_stays_text_wherever_it_comes_from(tmp_path: Path) -> None:
    text = HOSTILE
    evaluation = {
        "iteration": 1,
        "probe": PROBE,
        "codebooks": [STAGE, {**STAGE, "stage": text, "usage_rate": text, "norms": [text]}],
        "verdicts": [{"stage": 1, "level": "ok", "text": text}, {"stage": text, "level": text, "text": text}],
    }
    hostile = run(
        name=text,
        title=text,
        method=text,
        config=text,
        environment={text: text},
        notes=(text,),
        results=stored({"evaluations": [evaluation], "baselines": {}}),
        metrics=[{"iteration": text, "phase": text, "step": 1, "steps": 2, "loss": text}],
    )
    shown = Tags(page(tmp_path, hostile, hostile, title=text, intro=text))
    names = {name for name, _ in shown.tags}
    assert not names & {"script", "img"}
    assert all(not key.startswith("on") for _, attributes in shown.tags for key in attributes)
    assert shown.text.count(text) >= 10
    assert "49" not in shown.text.replace(text, "")


def test_an_address_that_would_run_is_never_made(tmp_path: Path) -> None:
    text = page(tmp_path, run(name="javascript:alert(1)", title="javascript:alert(1)"))
    assert not re.search(r'href="(?!#)', text)


def test_a_run_without_labels_has_no_probe_but_all_the_rest(tmp_path: Path) -> None:
    evaluation = {"iteration": 1, "probe": None, "codebooks": [STAGE], "verdicts": []}
    shown = Tags(page(tmp_path, run(results=stored({"evaluations": [evaluation], "baselines": {}}))))
    assert "no labels" in shown.text and "Code usage" in shown.text and "0.97" in shown.text


def test_a_run_that_has_only_begun_is_shown_as_such(tmp_path: Path) -> None:
    shown = Tags(page(tmp_path, RunSummary("new", "new", "", [], Results(), "", {})))
    assert "Nothing has been logged yet." in shown.text and "not evaluated yet" in shown.text


def test_an_interrupted_run_says_where_it_stands(tmp_path: Path) -> None:
    shown = Tags(page(tmp_path, run(metrics=run().metrics[:1])))
    assert "encoder phase of iteration 1, step 10 of 20" in shown.text


def test_what_could_not_be_read_is_named(tmp_path: Path) -> None:
    assert "results.json could not be read" in page(tmp_path, run(notes=("results.json could not be read",)))


@pytest.mark.parametrize("value", [None, [], {}, "x", 3, [None], [3], [{}], {"interval": [1]}, {"interval": 3}])
def test_results_of_an_unknown_form_never_break_the_page(tmp_path: Path, value: Any) -> None:
    evaluation = {"iteration": value, "probe": value, "codebooks": value, "verdicts": value}
    results = {"evaluations": [evaluation, value], "baselines": {"raw": value, "untrained": value}}
    assert "</html>" in page(tmp_path, run(results=stored(results), metrics=[]))
    assert "</html>" in page(
        tmp_path, run(results=stored({"evaluations": value, "baselines": value}), metrics=[{"loss": value}])
    )


def test_the_worst_verdict_decides_the_flag(tmp_path: Path) -> None:
    levels = ["ok", "warn", "bad"]
    evaluation = {"iteration": 1, "verdicts": [{"stage": 1, "level": lv, "text": "t"} for lv in levels]}
    assert "1 bad, 1 to watch" in page(tmp_path, run(results=stored({"evaluations": [evaluation]})))


def test_runs_of_one_method_on_the_same_data_are_told_apart_by_name() -> None:
    probes = probes_by_title([run(name="seed-0"), run(name="seed-1"), run(name="other", method="VQ")])
    assert list(probes["digits"]) == ["raw input", "untrained encoder", "seed-0 iter 1", "seed-1 iter 1", "VQ iter 1"]


def test_runs_of_one_recipe_are_told_apart_by_their_folders() -> None:
    runs = [run(folder="a"), run(folder="b"), run(folder="c"), run(folder="c")]
    names = [name for name in probes_by_title(runs)["digits"] if "iter" in name]
    assert names == ["a iter 1", "b iter 1", "c (3) iter 1", "c (4) iter 1"]


def test_baselines_that_differ_are_all_shown_with_their_run(tmp_path: Path) -> None:
    other = stored({"baselines": {"raw": {"accuracy": 0.7}, "untrained": {"accuracy": 0.65}}})
    text = Tags(page(tmp_path, run(folder="a"), run(folder="b", results=other))).text
    assert "untrained encoder, a" in text and "untrained encoder, b" in text
    assert "raw input, a" not in text and text.count("raw input") == 3  # in the figure, the table and the verdict


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    assert page(tmp_path, run()) == page(tmp_path, run())


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_no_stump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = page(tmp_path, run())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_report([run(title="new")], tmp_path / "report.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == old


def test_missing_folders_are_made_and_the_file_is_readable_like_any_other(tmp_path: Path) -> None:
    path = write_report([run()], tmp_path / "a" / "b" / "report.html")
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def gallery(text: str, **changes: Any) -> Gallery:
    dot = "data:image/png;base64,iVBORw0KGgo="
    shown = Shown(text, text, dot, "data:audio/wav;base64,UklGRg==")
    hit = Shown(text, text, dot, score=0.5, same=True)
    strips = [[CodeStrip(7, 0.125, "#aabbcc", dot)], []]
    return Gallery("", text, False, True, [TokenMap(shown, [dot, dot])], strips, [Neighbours(shown, [hit])])._replace(
        **changes
    )


def test_the_gallery_shows_maps_codes_neighbours_and_sounds(tmp_path: Path) -> None:
    shown = Tags(page(tmp_path, run(gallery=gallery("a dog"))))
    for text in ("Token maps", "Dictionary of codes", "Nearest neighbours", "a dog", "stage 2", "12.5 %", "0.50"):
        assert text in shown.text, text
    sources = [attributes["src"] for name, attributes in shown.tags if name in ("img", "audio")]
    assert len(sources) == 3 + 1 + 1 + 2
    assert all(source is not None and source.startswith("data:") for source in sources)


def test_hostile_names_and_labels_of_samples_stay_text(tmp_path: Path) -> None:
    row = {"path": HOSTILE, "reason": HOSTILE, "phase": HOSTILE}
    hostile = run(gallery=gallery(HOSTILE), quarantine=(row,))
    shown = Tags(page(tmp_path, hostile, run(gallery=Gallery(note=HOSTILE))))
    assert "script" not in {name for name, _ in shown.tags}
    assert all(not key.startswith("on") for _, attributes in shown.tags for key in attributes)
    assert all((a.get("src") or "data:").startswith("data:") for _, a in shown.tags)
    assert shown.text.count(HOSTILE) >= 8


def test_without_samples_the_page_says_why_or_nothing(tmp_path: Path) -> None:
    assert "the folder is gone" in page(tmp_path, run(gallery=Gallery(note="the folder is gone")))
    assert "Token maps" not in page(tmp_path, run())


def test_files_put_aside_are_listed_and_many_are_counted(tmp_path: Path) -> None:
    rows = tuple({"path": f"{i}.wav", "reason": "cannot be read", "phase": "iter1-encoder"} for i in range(103))
    shown = Tags(page(tmp_path, run(quarantine=rows)))
    assert "Files put aside (103)" in shown.text and "99.wav" in shown.text and "100.wav" not in shown.text
    assert "and 3 more in quarantine.jsonl" in shown.text


def test_what_the_codebooks_command_found_replaces_what_the_run_measured(tmp_path: Path) -> None:
    stage = {
        **STAGE,
        "usage_rate": 0.3125,
        "label_information": 0.77,
        "agreement": {"noise 1 %": 0.981},
        "latent_dimension": 21.3,
        "code_dimension": 3.5,
        "code_first": 0.527,
    }
    verdict = {"stage": 1, "level": "warn", "text": "examined closely."}
    examined = {"evaluations": [{"iteration": 1, "codebooks": [stage], "verdicts": [verdict]}]}
    shown = Tags(page(tmp_path, run(examined=stored(examined))))
    for text in ("0.31", "0.77", "98.1", "21.3", "3.5", "52.7", "examined closely."):
        assert text in shown.text, text
    assert "Label" not in Tags(page(tmp_path, run())).text.split("Codebooks after")[1]


def test_curves_of_code_usage_are_drawn_where_they_were_logged(tmp_path: Path) -> None:
    rows = [
        {"iteration": 2, "phase": "tokenizer", "step": s, "steps": 20, "loss": 1.0, "code_usage": [0.9]}
        for s in (10, 20)
    ]
    assert "Codes in use, tokenizer phase" in page(tmp_path, run(metrics=rows))
    assert "Codes in use, tokenizer phase" not in page(tmp_path, run())


@pytest.mark.parametrize("value", [None, [], "x", 3, [None], [{}], {"evaluations": [{"iteration": 1, "codebooks": 3}]}])
def test_an_unknown_form_of_codebooks_json_never_breaks_the_page(tmp_path: Path, value: Any) -> None:
    examined = value if isinstance(value, dict) else {"evaluations": value}
    assert "</html>" in page(tmp_path, run(examined=stored(examined)))
    odd = {"evaluations": [{"iteration": 1, "codebooks": [{"agreement": value}], "verdicts": value}]}
    assert "</html>" in page(tmp_path, run(examined=stored(odd)))


def test_several_labels_or_folds_are_told_beside_the_score(tmp_path: Path) -> None:
    labels = {"mean_average_precision": 0.312, "interval": [0.3, 0.33], "mean_auc": 0.941, "d_prime": 2.214}
    folds = {**PROBE, "sd": 0.011, "folds": [{"fold": n} for n in range(5)]}
    results = [
        {"evaluations": [{"iteration": 1, "probe": probe}], "baselines": {"raw": probe}} for probe in (labels, folds)
    ]
    runs = [run(title=title, results=stored(found)) for title, found in zip(("tagged", "folded"), results, strict=True)]
    shown = Tags(page(tmp_path, *runs)).text
    assert "mAP, AUC 0.941, d′ 2.21" in shown and "probe mAP, %" in shown and "31.2" in shown
    assert "sd 1.1 over 5 folds" in shown and "probe accuracy, %" in shown
