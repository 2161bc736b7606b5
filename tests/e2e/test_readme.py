"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import bridle
from PIL import Image

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHORTER = {
    "pretrain": ["--max-steps", "20"],
    "finetune": ["finetune.epochs=1", "finetune.warmup_epochs=0"],
    "detokenizer": ["detokenizer.steps=3", "detokenizer.warmup_steps=1"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


def commands_of_the_table() -> list[str]:
    """Those in the right column of "to | run", without the ones that hold a placeholder."""
    rows = re.findall(r"^\| [^|]* \| (`bridle .*) \|$", README, re.MULTILINE)
    found = [command for row in rows for command in re.findall(r"`(bridle [^`]*)`", row)]
    return [command for command in found if "FILE" not in command and "…" not in command]


def make_pictures(root: Path) -> None:
    """`photos` (two classes) as the README assumes it."""
    random = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 200)):
        (root / "photos" / name).mkdir(parents=True)
        for i in range(8):
            pixels = random.integers(level - 50, level + 50, (80, 80 + i, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / "photos" / name / f"{i}.jpg")


def test_the_readme_begins_with_the_two_commands() -> None:
    assert commands()[:2] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert "demo:" in makefile
    assert "test:" in makefile


def test_the_shown_commands_run_in_their_order(tmp_path: Path) -> None:
    """One test, because later commands use what earlier ones wrote, and two tests may run on two workers."""
    make_pictures(tmp_path)
    shown = [*(c for c in commands() if c.startswith("bridle")), *commands_of_the_table()]
    assert len(shown) >= 12
    for command in shown:
        words = command.split()[1:]
        ended = bridle(*words, *SHORTER.get(words[0], []), cwd=tmp_path)
        assert ended.code == 0, f"{command}\n{ended.err[-1500:]}"


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = [torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    names = {"my_dataset": data, "x": torch.stack(data)}
    exec(compile(blocks("python")[0], "README", "exec"), names)
    assert names["codes"].shape == (8, 4, 4)
    assert names["z"].shape == (8, 4, 128)
    assert names["vectors"].shape[:2] == (8, 4)
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 10


def test_there_is_one_figure_and_it_is_small() -> None:
    (figure,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", README)
    assert 5_000 < (ROOT / figure).stat().st_size < 300_000
