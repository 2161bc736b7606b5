"""Every notebook runs from its first cell to its last."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def test_there_is_a_notebook_for_each_modality() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["clips", "images", "sounds"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("agg")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    names: dict[str, object] = {}
    for cell in cells:
        source = "".join(cell["source"])
        shorter = source.replace('"probe.shots=[1,5,10]"', '"probe.shots=[1]", "probe.items=200", "probe.draws=2"')
        exec(compile(shorter, path.name, "exec"), names)
        if "STEPS" in source:
            names["STEPS"] = 4
    assert names["codes"].shape[-1] == 4  # type: ignore[attr-defined]
    assert "RQ iter1" in repr(names["run"].results)  # type: ignore[attr-defined]
