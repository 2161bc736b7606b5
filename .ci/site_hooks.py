"""For the documentation site: read Markdown as GitHub does."""

import re
from typing import Any

FENCE = re.compile(r"\s*```")
STARTS = {"list": re.compile(r"(- |1\. )"), "table": re.compile(r"\|")}
INSIDE = {"list": re.compile(r"(- |\d+\. |\s)"), "table": re.compile(r"\|")}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put an empty line before every list and table: Python-Markdown would otherwise read them as text."""
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        begins = [kind for kind, start in STARTS.items() if start.match(line)]
        if begins and not is_code and lines and lines[-1] and not INSIDE[begins[0]].match(lines[-1]):
            lines.append("")
        is_code ^= bool(FENCE.match(line))
        lines.append(line)
    return "\n".join(lines)
