"""The Dockerfile: linted by hadolint, and its commands run here, since no container engine does."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
CLEAN = "BRIDLE_TEST_CLEAN_INSTALL"  # in the environment: also install torch and all else anew, which takes minutes


class Step(NamedTuple):
    """An instruction of a Dockerfile."""

    name: str  # RUN, COPY, …
    rest: str


def steps(text: str) -> list[Step]:
    """The instructions, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Step(*line.split(maxsplit=1)) for line in joined.splitlines()]


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("hadolint")
    return subprocess.run([tool, "--no-color", "-"], input=text, capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    done = hadolint(text)
    assert (done.stdout, done.returncode) == ("", 0)
    assert "DL3020" in hadolint(text.replace("COPY bridle", "ADD bridle")).stdout  # it does look


def test_the_dockerfile_copies_what_the_build_needs_and_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    known = {"ARG", "FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    starts = [line for line, before in zip(lines, ["", *lines], strict=False) if not before.endswith("\\")]
    assert {line.split()[0] for line in starts if line and not line.startswith("#")} <= known
    extras = next(line for line in lines if line.startswith("ARG EXTRAS=")).partition("=")[2].split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    assert {"pyproject.toml", "bridle", project["readme"], *project["license-files"]} == copied


class Container:
    """A folder that stands for the root of an image; `variables` are those of ARG and ENV."""

    def __init__(self, root: Path) -> None:
        self.root = root
        own = Path(sys.base_prefix, "bin")
        self.variables = {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}", "HOME": str(root), "OMP_NUM_THREADS": "1"}

    def placed(self, text: str) -> str:
        """Paths of the image as paths here."""
        return re.sub(r"/(opt|src|work)\b", rf"{self.root}/\1", text)

    def run(self, command: str, **more: str) -> str:
        (self.root / "work").mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", self.placed(command)],
            env={**self.variables, **more},
            cwd=self.root / "work",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def build(self, text: str, **settings: str) -> list[str]:
        """Do what the instructions say, without FROM and users; returns ENTRYPOINT and CMD."""
        started = dict[str, list[str]]()
        for name, rest in steps(text):
            if name in ("ARG", "ENV"):
                given = dict(word.partition("=")[::2] for word in shlex.split(rest))
                values = {
                    key: self.placed(value).replace("$PATH", self.variables["PATH"]) for key, value in given.items()
                }
                self.variables |= values
            elif name == "COPY":
                *files, target = rest.split()
                self.copy(files, Path(self.placed(target)))
            elif name == "RUN" and not rest.startswith("useradd"):
                self.run(rest, **settings)
            elif name in ("ENTRYPOINT", "CMD"):
                started[name] = json.loads(rest)
        return [*started["ENTRYPOINT"], *started["CMD"]]

    def copy(self, files: list[str], target: Path) -> None:
        for file in files:
            if (ROOT / file).is_dir():
                shutil.copytree(ROOT / file, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, target)


def test_its_commands_install_bridle_and_a_model_is_trained(tmp_path: Path) -> None:
    """Packages that are installed here are taken from here; bridle itself is built and installed anew."""
    image = Container(tmp_path)
    image.variables["PYTHONPATH"] = sysconfig.get_path("purelib")
    started = image.build(DOCKERFILE, PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    assert "pretrain" in image.run(shlex.join(started))
    image.run("bridle pretrain digits-tiny --out runs/digits max_steps=1 probe.items=20 log=none")  # as docs/with.md
    assert (tmp_path / "work" / "runs" / "digits" / "results.json").is_file()
    assert image.run("python -c 'import bridle; print(bridle.__file__)'").startswith(str(tmp_path / "opt"))


@pytest.mark.skipif(CLEAN not in os.environ, reason=f"takes minutes and a network: set {CLEAN}=1")
def test_its_commands_work_with_nothing_installed_before(tmp_path: Path) -> None:
    image = Container(tmp_path)
    text = DOCKERFILE if os.environ[CLEAN] == "1" else DOCKERFILE.replace('--index-url "${TORCH_INDEX}" ', "")
    assert "pretrain" in image.run(shlex.join(image.build(text)))
    image.run("bridle pretrain digits-tiny --out runs/digits max_steps=1 probe.items=20 log=none")
