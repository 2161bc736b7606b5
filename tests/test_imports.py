"""Imports go one way through the rooms of the house, and the command line starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import bridle

PACKAGE = Path(bridle.__file__).parent
ORDER = [
    *("errors", "geometry", "distributed", "seeding", "files", "failpoints", "plugins", "console", "machine", "config"),
    *("nn", "quantize", "models", "data", "runs", "train", "evaluate", "report", "export", "infer", "search"),
    *("propose", "api", "plan", "grid", "cli"),
]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bridle"):
            rest = node.module.split(".")[1:]
            names |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("bridle.")}
    return names


def test_every_room_has_its_place() -> None:
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms == set(ORDER)


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in PACKAGE.rglob("*.py")
        if room_of(path) not in ("__init__", "__main__")
        for other in imported_rooms(ast.parse(path.read_text()))
        if other in ORDER and ORDER.index(other) > ORDER.index(room_of(path))
    ]
    assert wrong == []


def test_the_check_sees_a_wrong_import() -> None:
    assert imported_rooms(ast.parse("from bridle.train.engine import fit\nimport bridle.cli")) == {"train", "cli"}


def test_help_does_not_load_torch() -> None:
    code = "import sys; from bridle.cli import app; import bridle.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_ground_needs_no_module_that_only_posix_has() -> None:
    code = "import sys\nfor name in ('fcntl', 'resource'): sys.modules[name] = None\n"
    code += "from bridle import console, errors, failpoints, files, machine\nfrom bridle.cli import app\n"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_network_and_training_code_do_not_name_modalities() -> None:
    for room in ("nn", "quantize", "models", "train"):
        for path in (PACKAGE / room).rglob("*.py"):
            words = path.read_text().lower()
            assert not any(word in words for word in ("audio", "image", "video")), path
