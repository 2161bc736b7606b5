"""What all figures share: colours, an empty figure, and a finished one as inline SVG.

An SVG for the page has CSS variables in place of colours, so that it follows the page into dark mode, text instead of
outlines, in the page's own font, and ids that no other drawing on the page has.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

FONT_SIZE = 9.5


class Theme(NamedTuple):
    """The colours a drawing may use."""

    paper: str
    ink: str
    muted: str
    line: str
    plain: str  # what others are compared with: baselines, before
    plain_soft: str
    first: str  # VQ
    first_soft: str
    second: str  # RQ; the main curve; after
    second_soft: str
    stage_1: str  # from the first stage to the last
    stage_2: str
    stage_3: str
    stage_4: str

    @property
    def stages(self) -> tuple[str, ...]:
        return (self.stage_1, self.stage_2, self.stage_3, self.stage_4)


LIGHT = Theme(
    paper="#ffffff",
    ink="#1d2129",
    muted="#68707d",
    line="#e3e5e9",
    plain="#a9b0bb",
    plain_soft="#ced3da",
    first="#b9772a",
    first_soft="#e2bd8c",
    second="#2a6fb0",
    second_soft="#97bfe3",
    stage_1="#123f6b",
    stage_2="#2a6fb0",
    stage_3="#5b9bd3",
    stage_4="#97bfe3",
)
DARK = Theme(
    paper="#0d1117",
    ink="#e6e9ee",
    muted="#98a1ae",
    line="#2b313a",
    plain="#707985",
    plain_soft="#4a525d",
    first="#dca15c",
    first_soft="#8a6435",
    second="#6aaae6",
    second_soft="#33618f",
    stage_1="#d6e9fb",
    stage_2="#9cc9f2",
    stage_3="#6aa5dc",
    stage_4="#4680b8",
)
# Stand-ins that no drawing would pick by itself; the finished SVG has `var(--fig-ink)` and so on in their place.
PAGE = Theme(*(f"#fe00{n:02x}" for n in range(len(Theme._fields))))


def css_variables(theme: Theme) -> dict[str, str]:
    """{"--fig-ink": "#1d2129", …}: what a page must define for its drawings."""
    return {f"--fig-{name.replace('_', '-')}": color for name, color in theme._asdict().items()}


@contextmanager
def drawing(size: tuple[float, float], theme: Theme = PAGE, *, margin: float = 0.02) -> Iterator[Any]:
    """An empty figure of (width, height) inches. Settings hold only inside: a user's own matplotlib is left alone."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    settings: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib, so that a drawing is the same on every machine
        "font.size": FONT_SIZE,
        "svg.fonttype": "none",
        "svg.hashsalt": "bridle",
        "text.parse_math": False,  # a dollar sign in a label is a dollar sign
        "text.color": theme.ink,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=margin, h_pad=margin))
        FigureCanvasAgg(figure)
        yield figure


def inline_svg(figure: Any, label: str) -> str:
    """The figure as an <svg> element to put into the page; `label` says aloud what it shows."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # A style element inside an inline SVG would apply to the whole page; page.css has its rule for figures.
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)
    opening = rf'<svg \1 role="img" aria-label="{escape(label)}">'
    text = re.sub(r"<svg\b[^>]*?(viewBox=\"[^\"]*\")[^>]*>", opening, text, count=1)
    # Older matplotlib writes the shorthand, newer the longhand.
    text = re.sub(r"(font: (?:bold |\d+ )?[\d.]+px|font-family:) [^;\"]*", r"\1 var(--font)", text)
    for variable, color in css_variables(PAGE).items():
        text = text.replace(color, f"var({variable})")
    prefix = f"f{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", text)


def svg(figure: Any, theme: Theme) -> bytes:
    """The figure as an SVG file of its own, in fixed colours."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", facecolor=theme.paper, metadata={"Date": None, "Creator": None})
    return out.getvalue()


def png(figure: Any, theme: Theme) -> bytes:
    """The figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=200, facecolor=theme.paper)
    return out.getvalue()


def quiet(ax: Any, theme: Theme = PAGE, *, grid: bool = True) -> None:
    """Axes that stay behind the data: no frame, a faint grid, small grey numbers."""
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(theme.line)
    ax.tick_params(length=0, labelcolor=theme.muted, labelsize=FONT_SIZE - 0.5)
    ax.locator_params(axis="both", nbins=5)
    ax.set_axisbelow(True)
    ax.set_facecolor("none")
    if grid:
        ax.grid(axis="y", color=theme.line, lw=0.8)


def legend(ax: Any, theme: Theme = PAGE, *, columns: int, entries: int) -> None:
    """The first `entries` names in rows above the axes."""
    handles, labels = ax.get_legend_handles_labels()
    # Matplotlib fills columns first; people read rows first.
    order = [i for column in range(columns) for i in range(column, entries, columns)]
    ax.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.02),
        frameon=False,
        borderaxespad=0.0,
        borderpad=0.2,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.2,
        labelcolor=theme.muted,
    )
