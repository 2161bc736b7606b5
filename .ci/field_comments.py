"""For the API pages: the comment beside a field, or directly above it, is its description."""

import re
from typing import Any

import griffe

COMMENT = re.compile(r"\s{2}# (.+)$")


class FieldComments(griffe.Extension):
    """Gives fields of classes a docstring out of their comment."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for every field and module variable that griffe finds."""
        if attr.docstring is not None or attr.lineno is None or not attr.parent or not attr.parent.is_class:
            return
        lines = attr.lines_collection[attr.filepath]
        beside = COMMENT.search(lines[(attr.endlineno or attr.lineno) - 1])
        text = beside[1] if beside else comment_above(lines, attr.lineno - 1)
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr)


def comment_above(lines: list[str], index: int) -> str:
    """The lines of comment directly above line `index`, joined."""
    found: list[str] = []
    while index > 0 and lines[index - 1].lstrip().startswith("# "):
        index -= 1
        found.insert(0, lines[index].strip().removeprefix("# "))
    return " ".join(found)
