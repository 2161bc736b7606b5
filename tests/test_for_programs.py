"""The command line for programs: --json, --quiet, the schema, completion, and code that runs on other systems."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import bridle
from bridle.cli.app import main
from bridle.config import load_config
from bridle.config.editor import HEADER, recipe_schema
from bridle.config.schema import Config
from bridle.console import json_output

PACKAGE = Path(bridle.__file__).parent


def lines_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["bridle", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_prints_one_object_per_line_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = lines_of(monkeypatch, capsys, "--json", "show", "digits-tiny", "seed=7")
    assert shown["command"] == "show" and shown["seed"] == 7
    (again,) = lines_of(monkeypatch, capsys, "show", "digits-tiny", "--json")  # the flag may stand anywhere
    assert again["seed"] == 0
    assert json_output.stream is None  # and the next command prints as ever


def test_json_of_training_is_the_results_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ["max_steps=1", "schedule.iterations=1", "probe.items=40", "data.workers=0", "log=none"]
    out = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["bridle", "pretrain", "digits-tiny", *small, "--out", out, "--json", "--quiet"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["command"] == "pretrain" and found["path"].endswith("results.json")
    assert found["evaluations"] == json.loads((tmp_path / "run" / "results.json").read_text())["evaluations"]
    assert "loss" not in printed.err  # --quiet leaves out the progress
    assert (tmp_path / "run" / "config.yaml").read_text().startswith(HEADER)


def test_the_schema_knows_every_key_and_every_recipe_fits_it() -> None:
    schema = recipe_schema()
    assert set(schema["properties"]) == {*Config.model_fields, "extends", "paper"}
    for path in (PACKAGE / "config" / "recipes").glob("*.yaml"):
        for key, value in YAML(typ="safe").load(path.read_text()).items():
            known = schema["properties"][key]
            if isinstance(value, dict):
                name = (known.get("$ref") or known["anyOf"][0]["$ref"]).rpartition("/")[2]
                assert value.keys() <= schema["$defs"][name]["properties"].keys(), path.name
    assert load_config("digits-tiny").name == "digits-tiny"


def test_the_shell_can_complete_commands() -> None:
    asked = {"_BRIDLE_COMPLETE": "complete_bash", "COMP_WORDS": "bridle pre", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['bridle']; from bridle.cli import app; app(prog_name='bridle')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["pretrain"], done.stderr


POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios"}
POSIX_CALLS = {
    *("fork", "getuid", "geteuid", "killpg", "setsid", "getpgid", "mkfifo", "statvfs", "getloadavg", "waitpid"),
    *("pread", "pwrite", "sysconf", "memfd_create", "sched_getaffinity", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW"),
}
ALTERNATIVES = {  # where the function itself has another way, or is not reached without the call
    "machine.py": ["/proc/", "os.sysconf"],  # children of a process: none are found, 0 seconds are told before sysconf
    "data/loading/cache.py": ["fcntl"],  # a lock on shared memory, which is there only with memfd_create
}


def posix_only(tree: ast.AST) -> list[str]:
    """Imports and calls of what only POSIX has, outside `try`, `if` and `hasattr` tests."""
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try | ast.If | ast.IfExp)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in POSIX_MODULES]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found += [f"os.{node.attr}"] if node.attr in POSIX_CALLS else []
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("/proc", "/dev/")):
            found.append(str(node.value))
    return sorted(found)


def test_no_call_that_only_posix_has_is_without_an_alternative() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in PACKAGE.rglob("*.py")
        if (names := posix_only(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == ALTERNATIVES


def test_the_check_sees_a_bare_call() -> None:
    bare = "import os, fcntl\nos.fork()\nopen('/proc/self/stat')"
    assert posix_only(ast.parse(bare)) == ["/proc/self/stat", "fcntl", "os.fork"]
    assert posix_only(ast.parse("import os\nif hasattr(os, 'fork'):\n    os.fork()")) == []


ASKING = {"is_available", "device_count", "get_device_name"}  # of torch.cuda: answer everywhere, also by ROCm
CUDA_PLACES = {  # where a device is chosen or set up, each time after asking for it
    "machine.py": ["'cuda'", "torch.cuda.is_bf16_supported", "torch.cuda.max_memory_allocated"],
    "distributed.py": ["torch.cuda.set_device"],
}


def hard_coded_cuda(tree: ast.AST) -> list[str]:
    """`.cuda()`, the name of a CUDA device given to a call or as a default, functions of torch.cuda that need one."""
    found = []
    for node in ast.walk(tree):
        given: list[ast.AST | None] = []
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            found += [".cuda()"] if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" else []
        elif isinstance(node, ast.arguments):
            given = [*node.defaults, *node.kw_defaults]
        for value in (
            part for one in given if one for part in ([one.body, one.orelse] if isinstance(one, ast.IfExp) else [one])
        ):
            if isinstance(value, ast.Constant) and re.fullmatch(r"cuda(:\d+)?", str(value.value)):
                found.append(repr(value.value))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda" and node.attr not in ASKING:
            found.append(ast.unparse(node))
    return sorted(found)


def test_no_device_is_hard_coded() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in PACKAGE.rglob("*.py")
        if (names := hard_coded_cuda(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == CUDA_PLACES


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x.cuda()", [".cuda()"]),
        ("x.to('cuda:0')", ["'cuda:0'"]),
        ("torch.autocast(device_type='cuda')", ["'cuda'"]),
        ("def load(path, device='cuda'): ...", ["'cuda'"]),
        ("torch.cuda.synchronize()", ["torch.cuda.synchronize"]),
        ("x.to(device) if device.type == 'cuda' and torch.cuda.is_available() else x", []),
    ],
)
def test_the_check_sees_a_hard_coded_device(code: str, found: list[str]) -> None:
    assert hard_coded_cuda(ast.parse(code)) == found


ROOT = PACKAGE.parent


def test_workflows_are_yaml_and_test_every_python_and_system() -> None:
    folder = ROOT / ".github" / "workflows"
    test, release = (YAML(typ="safe").load((folder / f"{name}.yml").read_text()) for name in ("test", "release"))
    matrix = test["jobs"]["matrix"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    assert [name.partition("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}  # trusted publishing: no stored token
    paths = [word for step in test["jobs"]["matrix"]["steps"] for word in str(step.get("run")).split()]
    assert all((ROOT / path).exists() for path in paths if path.startswith("tests/"))
