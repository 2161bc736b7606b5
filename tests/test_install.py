"""The wheel, and what works without the extras. `benchmarks/install_sizes.py` installs each extra for real."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from install_sizes import COMMANDS
from ruamel.yaml import YAML

from bridle.errors import UsageError, needs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"pillow": "PIL", "scikit-learn": "sklearn", "faiss-cpu": "faiss"}  # named otherwise than their package
TASKS = {"audio", "image", "video", "train", "report", "search", "export", "hub", "cluster", "lm", "all"}
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def package(requirement: str) -> str:
    return requirement.partition(">")[0].partition("[")[0]


def optional_modules() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    names = {package(one) for extra, wanted in extras.items() if extra not in ("test", "docs") for one in wanted}
    return {MODULES.get(name, name) for name in names} - {"bridle"}


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    blocked = BLOCKED.format(blocked=optional_modules())
    return subprocess.run([sys.executable, "-c", blocked + code], check=False, capture_output=True, text=True)


def test_extras_are_named_by_task_and_all_has_them() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) >= TASKS
    assert all(task in extras["all"][0] for task in TASKS - {"all"})
    assert {package(one) for one in PROJECT["dependencies"]} == {
        *("torch", "numpy", "pydantic", "ruamel.yaml", "typer", "rich", "safetensors"),
    }


def test_every_extra_for_users_is_installed_by_the_benchmark() -> None:
    assert {name for names in COMMANDS for name in names.split(",")} == set(PROJECT["optional-dependencies"]) - {
        "docs",
        "test",
    }


def test_a_model_encodes_and_tokenizes_arrays_without_any_extra() -> None:
    code = "import bridle, numpy; model = bridle.load('digits-tiny'); x = numpy.zeros((2, 1, 16, 16), 'float32')\n"
    code += "print(tuple(model.encode(x).shape), tuple(model.tokenize(x).shape))"
    done = without_extras(code)
    assert (done.stdout, done.returncode) == ("(2, 16, 96) (2, 16, 4)\n", 0), done.stderr


def test_a_command_without_its_extra_names_the_package_and_how_to_install_it(tmp_path: Path) -> None:
    code = "import sys; from bridle.cli import main; sys.argv = ['bridle', 'pretrain', 'digits-tiny', '--out', "
    done = without_extras(f"{code}{str(tmp_path / 'run')!r}]; main()")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == 'UsageError: sklearn is not installed; install it with `pip install "bridle[train]"`.'


def test_an_import_that_fails_inside_a_package_is_named_by_the_package() -> None:
    told = r'^av is not installed; install it with `pip install "bridle\[video\]"`\.$'
    with pytest.raises(UsageError, match=told), needs("video"):
        raise ModuleNotFoundError("No module named 'av.codec'", name="av.codec")


def test_wheel_and_sdist_are_whole_and_pass_twine(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", str(dist)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    workflow = YAML(typ="safe").load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    assert commands[:2] == ["pip install build twine", "python -m build"]  # as above
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for tag, ended in ((f"v{PROJECT['version']}", [0, 0]), ("v0.0.0", [0, 1])):  # twine, and whether the tag is right
        environment = {**os.environ, "PATH": tools, "GITHUB_REF_NAME": tag}
        done = [subprocess.run(["bash", "-c", one], cwd=tmp_path, env=environment, check=False) for one in commands[2:]]
        assert [one.returncode for one in done] == ended
    names = zipfile.ZipFile(wheel).namelist()
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bridle").rglob("*.py")}
    assert source <= set(names)
    assert "bridle/py.typed" in names and "bridle/released/digits-tiny/config.json" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert wheel.name.startswith(f"bridle-{PROJECT['version']}-")
    with tarfile.open(sdist) as archive:
        assert f"bridle-{PROJECT['version']}/LICENSE" in archive.getnames()


def test_the_citation_has_the_version_of_the_project() -> None:
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
