"""What all figures share: colours, the style of their axes, and how a figure becomes part of the page or a file.

An SVG for the page has CSS variables in place of colours, so that it follows the page into dark mode, text instead of
outlines, in the page's own font, and ids that no other drawing on the page has.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from bridle.errors import needs

FONT_SIZE = 9.5
MARGIN = 0.1  # inches around a file of its own; on the page there is none
COLOURS = {  # name: in the light and in the dark theme
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1d2129", "#e6e9ee"),
    "muted": ("#68707d", "#98a1ae"),
    "line": ("#e3e5e9", "#2b313a"),
    "plain": ("#a9b0bb", "#707985"),  # what others are compared with: baselines, before
    "plain-soft": ("#ced3da", "#4a525d"),
    "first": ("#b9772a", "#dca15c"),  # VQ
    "first-soft": ("#e2bd8c", "#8a6435"),
    "second": ("#2a6fb0", "#6aaae6"),  # RQ; the main curve; after
    "second-soft": ("#97bfe3", "#33618f"),
    "stage-1": ("#123f6b", "#d6e9fb"),  # from the first stage to the last
    "stage-2": ("#2a6fb0", "#9cc9f2"),
    "stage-3": ("#5b9bd3", "#6aa5dc"),
    "stage-4": ("#97bfe3", "#4680b8"),
}
Theme = dict[str, str]  # a colour for every name
LIGHT: Theme = {name: light for name, (light, _) in COLOURS.items()}
DARK: Theme = {name: dark for name, (_, dark) in COLOURS.items()}
# Stand-ins that no drawing would pick by itself; the finished SVG has `var(--fig-ink)` and so on in their place.
PAGE: Theme = {name: f"#fe00{n:02x}" for n, name in enumerate(COLOURS)}


def css_variables(theme: Theme) -> dict[str, str]:
    """{"--fig-ink": "#1d2129", …}: what a page must define for its drawings."""
    return {f"--fig-{name}": color for name, color in theme.items()}


class Plot(NamedTuple):
    """A figure that is still to be drawn."""

    label: str  # what it shows, for screen readers
    size: tuple[float, float]  # width and height in inches
    draw: Callable[[Any, Theme], None]  # into an empty matplotlib figure, in a theme's colours

    def inline(self) -> str:
        """The figure as an <svg> element to put into the page."""
        text = self._saved("svg", PAGE, margin=0.02, transparent=True).decode()
        text = text[text.index("<svg") :]
        # A style element inside an inline SVG would apply to the whole page; page.css has its rule for figures.
        text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)
        opening = rf'<svg \1 role="img" aria-label="{escape(self.label)}">'
        text = re.sub(r"<svg\b[^>]*?(viewBox=\"[^\"]*\")[^>]*>", opening, text, count=1)
        # Older matplotlib writes the shorthand, newer the longhand.
        text = re.sub(r"(font: (?:bold |\d+ )?[\d.]+px|font-family:) [^;\"]*", r"\1 var(--font)", text)
        for variable, color in css_variables(PAGE).items():
            text = text.replace(color, f"var({variable})")
        prefix = f"f{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}-"
        text = re.sub(r'\bid="', f'id="{prefix}', text)
        return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", text)

    def write(self, stem: Path) -> list[Path]:
        """Write STEM.svg and STEM.png in fixed colours; returns both paths."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
        for path in paths:
            path.write_bytes(self._saved(path.suffix[1:], LIGHT, margin=MARGIN, facecolor=LIGHT["paper"], dpi=200))
        return paths

    def _saved(self, kind: str, theme: Theme, *, margin: float, **options: Any) -> bytes:
        with drawing(self.size, theme, margin=margin) as figure:
            self.draw(figure, theme)
            out = io.BytesIO()
            metadata = {"Date": None, "Creator": None} if kind == "svg" else None
            figure.savefig(out, format=kind, metadata=metadata, **options)
            return out.getvalue()


@contextmanager
def drawing(size: tuple[float, float], theme: Theme, *, margin: float) -> Iterator[Any]:
    """An empty figure of (width, height) inches. Settings hold only inside: a user's own matplotlib is left alone."""
    with needs("report"):
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
        "text.color": theme["ink"],
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=margin, h_pad=margin))
        FigureCanvasAgg(figure)
        yield figure


def quiet(ax: Any, theme: Theme, *, grid: bool = True) -> None:
    """Axes that stay behind the data: no frame, a faint grid, small grey numbers."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(theme["line"])
    ax.tick_params(which="both", length=0, pad=3, labelcolor=theme["muted"], labelsize=FONT_SIZE - 0.5)
    ax.locator_params(axis="both", nbins=5)
    ax.set_axisbelow(True)
    ax.set_facecolor("none")
    if grid:
        ax.grid(axis="y", color=theme["line"], lw=0.8)


def legend(ax: Any, theme: Theme, *, columns: int, entries: int) -> None:
    """The first `entries` names in rows above the axes."""
    # Matplotlib fills columns first; people read rows first.
    order = [i for column in range(columns) for i in range(column, entries, columns)]
    handles, labels = ([names[i] for i in order] for names in ax.get_legend_handles_labels())
    spacing = {"borderpad": 0.2, "handlelength": 1.1, "handletextpad": 0.5, "columnspacing": 1.2}
    ax.legend(
        handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(0.0, 1.02), frameon=False,
        borderaxespad=0.0, labelcolor=theme["muted"], **spacing,
    )  # fmt: skip
