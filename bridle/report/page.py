"""One self-contained, inert HTML page about one or several runs.

The page has no script, loads nothing, and says so in its content security policy; text from runs is always escaped.
It follows the reader's light or dark setting, prints, and fits a phone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridle.errors import CheckpointError, UsageError, needs, quoted
from bridle.evaluate.verdict import Verdict, judge_results
from bridle.files import replacing
from bridle.report.plots import code_norm_histograms, code_usage_bars, loss_curves, probe_bars, stage_curves
from bridle.report.reconstruction import RateView, rate_curves, rate_view
from bridle.report.runs import RunSummary, decimal, number, percent, thousands, whole
from bridle.report.score_tables import further_tables, score_words, summary_tables
from bridle.report.svg import DARK, LIGHT, Plot, css_variables
from bridle.report.tables import best_of
from bridle.runs.reconstruction import RateDistortion
from bridle.runs.results import Evaluation, Results, Scores

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


class RateSection(NamedTuple):
    """Rate and distortion of the runs of one title."""

    title: str
    table: RateView
    svg: str  # empty where there is nothing to draw


class RunView(NamedTuple):
    """A run's section."""

    run: RunSummary
    facts: list[str]
    unfinished: str
    figures: list[Figure]
    evaluations: list[Evaluation]
    judged: Verdict | None  # whether the features beat the baselines, by the run's own probe


def write_report(
    runs: Sequence[RunSummary], path: Path | str, *, title: str = "bridle report", intro: str = INTRO
) -> Path:
    """Write the page about `runs` to `path`, all of it or nothing, and return the path."""
    if not runs:
        raise UsageError("a report needs at least one run; give one or more run directories.")
    target, named = Path(path), with_labels(runs)
    shown = {
        "title": title,
        "intro": intro,
        "probes": _probe_figures(named),
        "summary": summary_tables(named),
        "further": further_tables(named),
        "rates": _rates(named),
        "runs": [_run_view(run) for run in named],
    }
    publish_page(render_page("page.html", shown), target)
    return target


def with_labels(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """The runs with their label and anchor: method, name or folder, if no other run of the same title has that too."""
    named = []
    for place, run in enumerate(runs, start=1):
        beside = [other for other in runs if other.title == run.title]
        unique = (
            str(getattr(run, key))
            for key in LABELS
            if getattr(run, key) and [getattr(other, key) for other in beside].count(getattr(run, key)) == 1
        )
        label = next(unique, f"{run.folder or run.name} ({place})")
        named.append(run._replace(label=label, anchor=f"run-{place}"))
    return named


def probes_by_title(runs: Sequence[RunSummary]) -> dict[str, dict[str, Scores]]:
    """{title: {"raw input": scores, "untrained encoder": scores, "VQ iter 1": scores, …}}."""
    found: dict[str, dict[str, Scores]] = {}
    for run in runs:
        mine = found.setdefault(run.title, {})
        found[run.title] = run.results.named_baselines | mine
    for run in with_labels(runs):
        scored = {f"{run.label} iter {entry.iteration}": entry.probe for entry in run.evaluations}
        found[run.title] |= {name: scores for name, scores in scored.items() if scores is not None}
    return found


def render_page(template: str, values: Mapping[str, Any]) -> str:
    """One of this room's templates, with its style; every value is escaped."""
    with needs("report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("bridle.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"percent": percent, "decimal": decimal, "thousands": thousands, "drawn": Markup}
    environment.filters |= {"best_of": best_of, "words": score_words}
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    for name, theme in {"LIGHT": LIGHT, "DARK": DARK}.items():
        variables = " ".join(f"{key}: {value};" for key, value in css_variables(theme).items())
        css = css.replace(f"/* {name} FIGURES */", variables)
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


def _probe_figures(runs: Sequence[RunSummary]) -> list[Figure]:
    """One for each title that has scores."""
    found = {title: (probes, probe_bars(probes)) for title, probes in probes_by_title(runs).items()}
    return [
        Figure(title, plot.inline(), next(iter(probes.values())).name)
        for title, (probes, plot) in found.items()
        if plot is not None
    ]


def _rates(runs: Sequence[RunSummary]) -> list[RateSection]:
    """Rate and distortion of all runs of a title in one table and one figure."""
    found: dict[str, list[tuple[str, RateDistortion]]] = {}
    for run in runs:
        for one in run.rates:
            name = f"{run.label} iter {one.iteration}," if len(run.rates) > 1 else f"{run.label},"
            found.setdefault(run.title, []).append((name, one))
    # Rates in different units cannot share a table.
    same = {title: [pair for pair in pairs if pair[1].unit == pairs[0][1].unit] for title, pairs in found.items()}
    sections = []
    for title, pairs in same.items():
        plot = rate_curves(pairs)
        sections.append(RateSection(title, rate_view(pairs), "" if plot is None else plot.inline()))
    return sections


def _run_view(run: RunSummary) -> RunView:
    later = {entry.iteration: entry for entry in run.examined.evaluations if entry.codebooks}
    # What `bridle codebooks` found of an iteration stands in place of what the run measured.
    evaluations = [later.get(entry.iteration, entry) for entry in run.evaluations]
    judged = judge_results(_fullest(run), run.settings)
    return RunView(run, _facts(run), _unfinished(run), _figures(run, evaluations), evaluations, judged)


def _fullest(run: RunSummary) -> Results:
    """The probe that also knows few labels, if there is one, else the run's own."""
    probes = [one.results for one in run.further if one.kind == "probe"]
    few = (found for found in probes if any(e.probe is not None and e.probe.few_shot for e in found.evaluations))
    return next(few, run.results)


def _figures(run: RunSummary, evaluations: Sequence[Evaluation]) -> list[Figure]:
    """All figures that there is something to draw of."""
    rows, drawn = run.metrics, list[tuple[str, Plot | None]]()
    for phase in ("encoder", "joint"):
        drawn.append((f"{phase.capitalize()} loss", loss_curves(rows, phase=phase)))
        drawn.append(("Token accuracy at masked positions", stage_curves(rows, "token_accuracy", phase=phase)))
    drawn.append(("Tokenizer loss", loss_curves(rows, phase="tokenizer")))
    for phase in ("encoder", "tokenizer", "joint"):
        drawn.append((f"Codes in use, {phase} phase", stage_curves(rows, "code_usage", phase=phase)))
    usage = [(f"iteration {entry.iteration}", entry.codebooks) for entry in evaluations]
    drawn.append(("Code usage per stage", code_usage_bars(usage)))
    for name, stages in usage:
        caption = "Code vectors" if len(usage) == 1 else f"Code vectors, {name}"
        drawn.append((caption, code_norm_histograms(stages)))
    return [Figure(caption, plot.inline()) for caption, plot in drawn if plot is not None]


def _facts(run: RunSummary) -> list[str]:
    """What was run, in a few words each."""
    facts = []
    iterations = {whole(row.get("iteration")) for row in run.metrics}
    if iterations:
        facts.append(f"{len(iterations)} iteration{'s' if len(iterations) > 1 else ''}")
    for phase in ("encoder", "tokenizer", "joint"):
        steps = dict.fromkeys(iterations, 0)
        for row in run.metrics:
            if row.get("phase") == phase:
                iteration = whole(row.get("iteration"))
                steps[iteration] = max(steps[iteration], whole(row.get("step")))
        if total := sum(steps.values()):
            facts.append(f"{thousands(total)} {phase} steps")
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
