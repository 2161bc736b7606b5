"""What the README shows is run as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


def make_pictures(root: Path) -> None:
    """`photos` (classes) and `cifar10` (train/ and test/) as the README assumes them."""
    random = np.random.default_rng(0)
    for folder, size in (("photos", 80), ("cifar10/train", 32), ("cifar10/test", 32)):
        for name, level in (("dark", 60), ("light", 200)):
            (root / folder / name).mkdir(parents=True)
            for i in range(8):
                pixels = random.integers(level - 50, level + 50, (size, size + i, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / folder / name / f"{i}.jpg")


def test_the_readme_begins_with_the_two_commands() -> None:
    assert commands()[:2] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert "demo:" in makefile
    assert "test:" in makefile


def test_the_shown_commands_run_in_their_order(tmp_path: Path) -> None:
    """One test, because later commands use what earlier ones wrote, and two tests may run on two workers."""
    make_pictures(tmp_path)
    for command in (c for c in commands() if c.startswith("bridle")):
        shortened = command + " --max-steps 2" if "cifar10-tiny" in command else command  # the whole run takes minutes
        done = subprocess.run(
            shortened.split(), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = [torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    names = {"my_dataset": data, "x": torch.stack(data)}
    exec(compile(blocks("python")[0], "README", "exec"), names)
    assert names["codes"].shape == (8, 4, 4)
    assert names["z"].shape == (8, 4, 128)


def test_the_quantizer_example_runs_and_has_ten_lines() -> None:
    code = blocks("python")[1]
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    names: dict[str, torch.Tensor] = {}
    exec(compile(code, "README", "exec"), names)
    assert names["q"].shape == (4096, 256)


def test_the_demo_runs_for_one_modality(tmp_path: Path) -> None:
    command = ["bridle", "demo", "--modality", "image", "--out", "demo"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**ENVIRONMENT, "COLUMNS": "80"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in ("raw input", "untrained encoder", "VQ iter1", "VQ iter2", "RQ iter1", "RQ iter2", "report.html"):
        assert words in done.stdout
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000
    for method, codes in (("vq", [256]), ("rq", [64] * 4)):
        results = json.loads((tmp_path / "demo" / f"image-{method}" / "results.json").read_text())
        assert [stage["codes"] for stage in results["evaluations"][1]["codebooks"]] == codes
        assert results["evaluations"][1]["probe"]["accuracy"] > 0.8  # ten classes: far above chance


def test_the_figure_is_small_and_there() -> None:
    figure = ROOT / "docs" / "figures" / "demo.png"
    assert 5_000 < figure.stat().st_size < 300_000
    assert "docs/figures/demo.png" in README


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tests_named_in_the_docs_exist() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for name, function in re.findall(
            r"`((?:unit|property|parity|golden|e2e)/[\w*]+\.py)(?:::(\w+))?", page.read_text()
        ):
            found = list((ROOT / "tests").glob(name))
            assert found, f"{page.name}: {name}"
            assert not function or f"def {function}(" in found[0].read_text(), f"{page.name}: {name}::{function}"
