"""YAML documents as flat tables: dotted path -> value, with file and line.

YAML 1.2 through ruamel's composer, so that `5e-4` is a number; duplicate keys, tags, anchors and aliases are refused,
which also rules out code execution and alias bombs.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from bridle.errors import ConfigError, quoted

Path = tuple[str, ...]
LONGEST = 1_000_000  # characters; a recipe is a few kilobytes
DEEPEST = 12
MOST_BRACKETS = 100
COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")  # the tags of plain mappings and lists


class Entry(NamedTuple):
    """A value and the file and line it comes from."""

    value: Any
    where: str


Table = dict[Path, Entry]


def read_document(text: str, name: str) -> Table:
    """The leaves of a YAML mapping. Lists are leaves; an empty mapping is a leaf too."""
    if len(text) > LONGEST:
        raise ConfigError(f"{name}: {len(text):,} characters; a config has at most {LONGEST:,}.")
    root = _compose(text, name)
    if root is None:
        return {}
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{name}:1: expected `key: value` lines, got {_kind(root)}.")
    table: Table = {}
    _walk(root, (), name, table, set())
    return table


def read_value(text: str, name: str) -> Any:
    """One value as YAML reads it: 5e-4 is a number, [16, 16] a list, true a boolean, anything else text."""
    root = _compose(text, name)
    if root is None:
        return None
    if isinstance(root, MappingNode):
        raise ConfigError(f"{name}: {quoted(text)} is a mapping; set its keys one by one (a.b=c).")
    return _value(root, name, set(), 0)


def merge(below: Table, above: Table) -> Table:
    """`above` wins; a value replaces a mapping of the same path and the other way round."""
    kept = {
        path: entry
        for path, entry in below.items()
        if not any(_covers(path, new) or _covers(new, path) for new in above)
    }
    return kept | above


def nest(table: Table) -> dict[str, Any]:
    """The table as nested dictionaries."""
    nested: dict[str, Any] = {}
    for path, entry in table.items():
        level = nested
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = entry.value
    return nested


def _covers(a: Path, b: Path) -> bool:
    return len(a) <= len(b) and b[: len(a)] == a


def _compose(text: str, name: str) -> Node | None:
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", text):  # asked first: ruamel takes seconds over thousands of them
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MOST_BRACKETS:
            raise ConfigError(f"{name}: not valid YAML: more than {MOST_BRACKETS} brackets inside one another.")
    try:
        root: Node | None = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{name}{line}: not valid YAML: {problem}.") from error
    except (RecursionError, ValueError, AssertionError) as error:  # malformed input that ruamel does not type
        raise ConfigError(f"{name}: not valid YAML: {quoted(error)}.") from error
    return root


def _where(node: Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}"


def _kind(node: Node) -> str:
    return {MappingNode: "a mapping", SequenceNode: "a list", ScalarNode: "a single value"}[type(node)]


def _walk(node: MappingNode, path: Path, name: str, table: Table, seen: set[int]) -> None:
    _enter(node, name, seen, len(path))
    for key_node, value_node in node.value:
        if not isinstance(key_node, ScalarNode):
            raise ConfigError(f"{_where(key_node, name)}: expected a plain word as key, got {_kind(key_node)}.")
        key = str(key_node.value)
        full = (*path, *key.split("."))  # `a.b: 1` in a file means the same as the override a.b=1
        if any(_covers(full, other) or _covers(other, full) for other in table):
            raise ConfigError(
                f"{_where(key_node, name)}: key {quoted('.'.join(full))} is given twice; keep one of them."
            )
        if isinstance(value_node, MappingNode) and value_node.value:
            _walk(value_node, full, name, table, seen)
        else:
            table[full] = Entry(_value(value_node, name, seen, len(full)), _where(key_node, name))


def _enter(node: Node, name: str, seen: set[int], depth: int) -> None:
    if id(node) in seen or node.anchor is not None:
        raise ConfigError(f"{_where(node, name)}: anchors and aliases (&, *) are not allowed; write the value out.")
    if not isinstance(node, ScalarNode) and str(node.tag) not in COLLECTIONS:
        raise ConfigError(f"{_where(node, name)}: the tag {quoted(node.tag)} is not allowed; write a plain value.")
    if depth > DEEPEST:
        raise ConfigError(f"{_where(node, name)}: nested deeper than {DEEPEST} levels.")
    seen.add(id(node))


def _value(node: Node, name: str, seen: set[int], depth: int) -> Any:
    _enter(node, name, seen, depth)
    if isinstance(node, SequenceNode):
        return [_value(item, name, seen, depth + 1) for item in node.value]
    if isinstance(node, MappingNode):
        if node.value:
            raise ConfigError(f"{_where(node, name)}: a mapping inside a list is not allowed.")
        return {}
    return _scalar(node, name)


def _scalar(node: Node, name: str) -> Any:
    text, tag = str(node.value), str(node.tag).removeprefix("tag:yaml.org,2002:")
    try:
        match tag:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text.replace("_", ""), 0 if text.lstrip("+-")[:2] in ("0x", "0o", "0b") else 10)
            case "float":
                return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
            case "str" | "timestamp":
                return text
    except ValueError as error:
        raise ConfigError(f"{_where(node, name)}: {quoted(text)} is not a valid {tag}.") from error
    raise ConfigError(f"{_where(node, name)}: the tag {quoted(node.tag)} is not allowed; write a plain value.")
