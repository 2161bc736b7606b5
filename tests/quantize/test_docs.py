"""The example of docs/quantizer.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
PAGE = Path(__file__).parents[2] / "docs" / "quantizer.md"


def test_the_example_runs_and_means_what_it_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, torch.Tensor] = {}
    exec(blocks[0], names)
    assert names["coarse"].shape == (20_000, 256)


def test_the_figures_it_shows_exist() -> None:
    shown = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 3
    assert [name for name in shown if not (PAGE.parent / name).is_file()] == []


@pytest.mark.parametrize("name", re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
def test_the_files_it_names_exist(name: str) -> None:
    assert (PAGE.parents[1] / name).is_file()
