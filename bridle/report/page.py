"""One self-contained, inert HTML page about one or several runs.

The page has no script, loads nothing, and says so in its content security policy; text from runs is always escaped.
It follows the reader's light or dark setting, prints, and fits a phone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridle.errors import CheckpointError, UsageError, quoted
from bridle.evaluate.verdict import Verdict as FeatureVerdict
from bridle.evaluate.verdict import judge_results
from bridle.files import replacing
from bridle.report.plots import (
    Bar,
    bar_of,
    code_norm_histograms,
    code_usage_bars,
    code_usage_curves,
    loss_curves,
    probe_bars,
    token_accuracy_curves,
)
from bridle.report.runs import RunSummary, decimal, number, percent, read_run, thousands, whole
from bridle.report.score_tables import Labelled, further_rows
from bridle.report.svg import DARK, LIGHT, css_variables
from bridle.report.tables import best_of, further_scores, score_text
from bridle.runs.results import BASELINES, Evaluation, Results, Scores, StageHealth, Verdict

__all__ = ["RunSummary", "probes_by_title", "read_run", "write_report"]

INTRO = (
    "What the frozen features are worth to a linear classifier, how the encoder and its tokenizer learned, "
    "and whether the codes are in use."
)

LABELS = ("method", "name", "folder")  # what a run may be called, the shortest first


class Figure(NamedTuple):
    """A drawing with its caption."""

    caption: str
    svg: str
    score: str = "accuracy"  # what a probe figure shows


class SummaryRow(NamedTuple):
    """One line of the summary table: a baseline, or one evaluation of a run."""

    title: str
    method: str
    iteration: str
    bar: Bar | None  # probe accuracy and interval
    chance: float | None
    stages: Sequence[StageHealth]
    level: str | None  # the worst verdict on the codebooks; None where there is none
    flags: str
    anchor: str | None = None  # of the run's section; None for a baseline
    detail: str = ""  # what belongs to the probe beside its bar
    span: int = 0  # lines that share this title; 0 on all but the first of them
    best: bool = False  # of this title


class EvaluationView(NamedTuple):
    """One evaluation in a run's section."""

    name: str
    stages: Sequence[StageHealth]
    verdicts: Sequence[Verdict]
    examined: bool  # by `bridle codebooks`, which measures more


class RunView(NamedTuple):
    """A run's section."""

    anchor: str
    label: str
    run: RunSummary
    facts: list[str]
    unfinished: str
    figures: list[Figure]
    evaluations: list[EvaluationView]
    judged: FeatureVerdict | None = None  # whether the features beat the baselines, by the run's own probe


def write_report(
    runs: Sequence[RunSummary], path: Path | str, *, title: str = "bridle report", intro: str = INTRO
) -> Path:
    """Write the page about `runs` to `path`, all of it or nothing, and return the path."""
    if not runs:
        raise UsageError("a report needs at least one run; give one or more run directories.")
    target = Path(path)
    shown = {
        "title": title,
        "intro": intro,
        "probes": _probe_figures(runs),
        "summary": _summary(runs),
        "further": further_rows(_labelled(runs)),
        "runs": [_run_view(one.run, one.label, one.anchor) for one in _labelled(runs)],
    }
    publish_page(render_page("page.html", shown), target)
    return target


def probes_by_title(runs: Sequence[RunSummary]) -> dict[str, dict[str, Scores]]:
    """{title: {"raw input": scores, "untrained encoder": scores, "VQ iter 1": scores, …}}."""
    found: dict[str, dict[str, Scores]] = {}
    for run in runs:
        mine = found.setdefault(run.title, {})
        for key, words in BASELINES.items():
            if key in run.results.baselines:
                mine.setdefault(words, run.results.baselines[key])
    for run, label in zip(runs, _labels(runs), strict=True):
        for entry in run.evaluations:
            if entry.probe is not None:
                found[run.title][f"{label} iter {entry.iteration}"] = entry.probe
    return found


def _labels(runs: Sequence[RunSummary]) -> list[str]:
    """What to call each run among those with its title: its method, name or folder, if no other has that too."""
    labels = []
    for place, run in enumerate(runs, start=1):
        beside = [other for other in runs if other.title == run.title]
        own = next((key for key in LABELS if getattr(run, key) and _alone(run, beside, key)), None)
        labels.append(f"{run.folder or run.name} ({place})" if own is None else str(getattr(run, own)))
    return labels


def _alone(run: RunSummary, beside: Sequence[RunSummary], key: str) -> bool:
    return [getattr(other, key) for other in beside].count(getattr(run, key)) == 1


def _labelled(runs: Sequence[RunSummary]) -> list[Labelled]:
    """The runs with what they are called and where their sections are."""
    named = enumerate(zip(runs, _labels(runs), strict=True), start=1)
    return [Labelled(run, label, f"run-{n}") for n, (run, label) in named]


def render_page(template: str, values: Mapping[str, Any]) -> str:
    """One of this room's templates, with its style; every value is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("bridle.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "decimal": decimal, "thousands": thousands, "drawn": Markup}
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    palettes = {"LIGHT": css_variables(LIGHT), "DARK": css_variables(DARK)}
    for name, variables in palettes.items():
        css = css.replace(f"/* {name} FIGURES */", " ".join(f"{key}: {value};" for key, value in variables.items()))
    return environment.get_template(template).render({"css": Markup(css), **values})


def publish_page(text: str, target: Path) -> None:
    """Write a page, all of it or nothing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, unique=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"cannot write the page to {quoted(target)}: {error.strerror}; choose another path."
        ) from error


# what the sections show


def _probe_figures(runs: Sequence[RunSummary]) -> list[Figure]:
    figures = []
    for title, probes in probes_by_title(runs).items():
        bars = [bar for bar in (bar_of(label, scores) for label, scores in probes.items()) if bar is not None]
        if bars:
            first = next(iter(probes.values()))
            figures.append(Figure(title, probe_bars(bars, chance=first.chance), first.name))
    return figures


def _summary(runs: Sequence[RunSummary]) -> list[SummaryRow]:
    rows: list[SummaryRow] = []
    for title in dict.fromkeys(run.title for run in runs):
        mine = [one for one in _labelled(runs) if one.run.title == title]
        found: list[tuple[SummaryRow, Scores | None]] = []
        for key, words in BASELINES.items():
            # Other seeds, items or poolings have other baselines: each is shown, and whose it is.
            known: dict[float | None, tuple[str, Scores]] = {}
            for run, label, _ in mine:
                if (baseline := run.results.baselines.get(key)) is not None:
                    known.setdefault(baseline.main, (label, baseline))
            for label, baseline in known.values():
                called = words if len(known) == 1 else f"{words}, {label}"
                found.append((_baseline_row(title, called, baseline), baseline))
        for run, label, anchor in mine:
            found += [(_summary_row(entry, title, label, anchor), entry.probe) for entry in run.evaluations]
            if not run.evaluations:
                empty = SummaryRow(title, label, "", None, None, [], None, "not evaluated yet", anchor)
                found.append((empty, None))
        best = best_of([scores for _, scores in found])
        shown = [row._replace(best=place == best) for place, (row, _) in enumerate(found)]
        rows += [shown[0]._replace(span=len(shown)), *shown[1:]]
    return rows


def _baseline_row(title: str, called: str, scores: Scores) -> SummaryRow:
    bar = bar_of(called, scores)
    return SummaryRow(title, called, "", bar, scores.chance, [], None, "", detail=_detail(scores))


def _summary_row(entry: Evaluation, title: str, label: str, anchor: str) -> SummaryRow:
    levels = [verdict.level for verdict in entry.verdicts]
    bad, warn = levels.count("bad"), levels.count("warn")
    flags = ", ".join(f"{n} {word}" for n, word in ((bad, "bad"), (warn, "to watch")) if n)
    return SummaryRow(
        title=title,
        method=label,
        iteration=str(entry.iteration),
        bar=bar_of(label, entry.probe),
        chance=None if entry.probe is None else entry.probe.chance,
        stages=entry.codebooks,
        level="bad" if bad else "warn" if warn else "ok" if levels else None,
        flags=flags or ("in use" if levels else ""),
        anchor=anchor,
        detail="" if entry.probe is None else _detail(entry.probe),
    )


def _detail(scores: Scores) -> str:
    """The spread over folds, what else is reported where items have several labels, and further scores."""
    words = []
    if scores.sd is not None:
        words.append(f"sd {percent(scores.sd)} over {len(scores.folds)} folds")
    if scores.name == "mAP":
        words.append(f"mAP; AUC {decimal(scores.mean_auc, 3)}, d′ {decimal(scores.d_prime)}")
    words += [f"{name} {score_text(score)}" for name, score in further_scores([scores]).items()]
    return ", ".join(words)


def _run_view(run: RunSummary, label: str, anchor: str) -> RunView:
    evaluations = [_evaluation_view(run, entry) for entry in run.evaluations]
    figures, judged = list(_figures(run, evaluations)), judge_results(_fullest(run), run.settings)
    return RunView(anchor, label, run, _facts(run), _unfinished(run), figures, evaluations, judged)


def _fullest(run: RunSummary) -> Results:
    """The probe that also knows few labels, if there is one, else the run's own."""
    probes = [one.results for one in run.further if one.kind == "probe"]
    few = [found for found in probes if any(e.probe is not None and e.probe.few_shot for e in found.evaluations)]
    return few[0] if few else run.results


def _evaluation_view(run: RunSummary, entry: Evaluation) -> EvaluationView:
    """What the run measured, and in its place what `bridle codebooks` found of the same iteration."""
    later = run.examined.at(entry.iteration)
    if later is not None and later.codebooks:
        return EvaluationView(f"Iteration {entry.iteration}", later.codebooks, later.verdicts, True)
    return EvaluationView(f"Iteration {entry.iteration}", entry.codebooks, entry.verdicts, False)


def _figures(run: RunSummary, evaluations: Sequence[EvaluationView]) -> Iterable[Figure]:
    drawn = []
    for phase in ("encoder", "joint"):
        drawn.append(Figure(f"{phase.capitalize()} loss", loss_curves(run.metrics, phase=phase)))
        drawn.append(Figure("Token accuracy at masked positions", token_accuracy_curves(run.metrics, phase=phase)))
    drawn.append(Figure("Tokenizer loss", loss_curves(run.metrics, phase="tokenizer")))
    for phase in ("encoder", "tokenizer", "joint"):
        caption = f"Codes in use, {phase} phase"
        drawn.append(Figure(caption, code_usage_curves(run.metrics, phase=phase)))
    usage = [(view.name.lower(), view.stages) for view in evaluations]
    drawn.append(Figure("Code usage per stage", code_usage_bars(usage)))
    for view in evaluations:
        caption = "Code vectors" if len(evaluations) == 1 else f"Code vectors, {view.name.lower()}"
        drawn.append(Figure(caption, code_norm_histograms(view.stages)))
    return (figure for figure in drawn if figure.svg)


def _facts(run: RunSummary) -> list[str]:
    """What was run, in a few words each."""
    facts = []
    iterations = {whole(row.get("iteration")) for row in run.metrics}
    if iterations:
        facts.append(f"{len(iterations)} iteration{'s' if len(iterations) > 1 else ''}")
    for phase in ("encoder", "tokenizer", "joint"):
        last: dict[int, int] = {}
        for row in run.metrics:
            if row.get("phase") == phase:
                place = whole(row.get("iteration"))
                last[place] = max(last.get(place, 0), whole(row.get("step")))
        if last:
            facts.append(f"{thousands(sum(last.values()))} {phase} steps")
    rates = sorted(rate for rate in (number(row.get("samples_per_second")) for row in run.metrics) if rate is not None)
    if rates:
        facts.append(f"{thousands(rates[len(rates) // 2])} samples a second")
    worlds = {whole(row.get("world_size")) for row in run.metrics} - {0}
    if worlds - {1}:
        facts.append(f"{' and '.join(map(str, sorted(worlds)))} processes")
    return facts


def _unfinished(run: RunSummary) -> str:
    """Where the run stands if its last row is not the end of a phase, or nothing was logged yet."""
    if not run.metrics:
        return "Nothing has been logged yet." if not run.evaluations else ""
    row = run.metrics[-1]
    step, steps = whole(row.get("step")), whole(row.get("steps"))
    if step >= steps:
        return ""
    where = f"{row.get('phase')} phase of iteration {whole(row.get('iteration'))}"
    return f"This run had not finished when the report was made: {where}, step {thousands(step)} of {thousands(steps)}."
