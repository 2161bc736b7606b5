"""What `bridle data` says about files and data sets, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from rich.markup import escape
from rich.table import Table

from bridle.console import clock, plain_table
from bridle.data.inspect.check import Lengths, Report
from bridle.data.inspect.findings import UNUSABLE
from bridle.data.inspect.statistics import ClassSizes, Statistics, numbers

MOST = 5  # rates and sizes that are named


def findings_table(report: Report) -> Table | None:
    """Files by finding, the fatal ones first, each with its first examples; None if all is well."""
    if not report.findings:
        return None
    table = plain_table()
    table.add_column("finding", no_wrap=True)
    table.add_column("files", justify="right", no_wrap=True)
    table.add_column("for example", overflow="fold")
    for name in sorted(report.findings, key=lambda name: (name not in UNUSABLE, -report.findings[name])):
        colour = "red" if name in UNUSABLE else "yellow"
        for row, (path, detail) in enumerate(report.examples[name]):
            count = f"{report.findings[name]:,}"
            first = (f"[{colour}]{name}[/]", count) if row == 0 else ("", "")
            table.add_row(*first, f"{escape(path)}  [dim]{escape(detail)}[/]")
    return table


def check_lines(report: Report) -> Iterator[str]:
    """What was looked at, and the verdict."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.files.items())
    yield f"files     {len(report.paths):,} ({kinds})"
    if report.lengths is not None:
        yield f"lengths   {lengths_text(report.lengths)}"
    if report.rates:
        yield f"rates     {commonest({f'{rate:,} Hz': count for rate, count in report.rates.items()})}"
    if report.sizes:
        yield f"sizes     {commonest(dict(report.sizes.most_common()))}"
    if not report.flagged:
        yield "verdict   nothing wrong was found"
        return
    verdict = f"{len(report.flagged):,} of {len(report.paths):,} files have findings"
    if report.unusable:
        verdict += f"; {len(report.unusable):,} cannot be used and would be left out of pretraining"
    yield f"verdict   {verdict}"


def lengths_text(lengths: Lengths) -> str:
    hours = lengths.total / 3600
    total = f"{hours:,.1f} h" if hours >= 1 else clock(lengths.total) + " min"
    return f"{lengths.shortest:.2f} to {lengths.longest:,.2f} s (median {lengths.median:.2f}), {total} in all"


def commonest(counts: Mapping[str, int]) -> str:
    """The most frequent things and how often they occur."""
    shown = " · ".join(f"{name} {count:,}×" for name, count in list(counts.items())[:MOST])
    return shown + (f" · {len(counts) - MOST:,} more" if len(counts) > MOST else "")


def statistics_lines(found: Statistics) -> Iterator[str]:
    """A data set in numbers, and what to paste."""
    yield f"train     {found.train:,} items" + ("" if found.folds is None else f" in {found.folds} folds")
    yield f"test      {'none' if found.test is None else f'{found.test:,} items'}"
    yield f"classes   {'none' if found.classes is None else classes_text(found.classes)}"
    if found.lengths is not None:
        yield f"lengths   {lengths_text(found.lengths)}"
    yield f"sample    {'×'.join(map(str, found.shape))} = {prod(found.shape):,} numbers"
    skipped = found.tried - found.moments.count
    yield f"measured  {found.moments.count:,} items" + (f"; {skipped:,} cannot be used" if skipped else "")
    yield f"mean      {numbers(found.moments.mean)}"
    yield f"std       {numbers(found.moments.std)}"
    spreads = "" if found.std == found.moments.std else "; for log-mel features data.std is 2·std, as usual there"
    yield f"paste     {' '.join(found.overrides())}{spreads}"
    for channel in found.moments.constant:
        yield f"note: channel {channel} never changes; its std is given as 1."
    yield from (f"note: {note}" for note in found.notes)


def classes_text(sizes: ClassSizes) -> str:
    text = f"{sizes.classes:,}, with {sizes.smallest:,} to {sizes.largest:,} items (median {sizes.median:,.0f})"
    return text + (f"; {sizes.without:,} have none" if sizes.without else "")


def availability_table(found: Statistics) -> Table | None:
    """Which share of AudioSet's lists is on disk; None for other data."""
    if found.available is None:
        return None
    table = plain_table("segments")
    for heading in ("listed", "found", "share"):
        table.add_column(heading, justify="right")
    for entry in found.available.segments:
        table.add_row(escape(entry.name), f"{entry.listed:,}", f"{entry.found:,}", f"{100 * entry.share:.1f} %")
    missing = [entry for entry in found.available.classes if entry.listed and not entry.found]
    if missing:
        names = ", ".join(entry.name for entry in missing[:MOST])
        more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
        table.caption = f"classes without a clip: {escape(names)}{more}"
        table.caption_justify = "left"
    return table
