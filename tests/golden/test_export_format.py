"""A folder exported in format 1, kept as it was written: every later version must read it and give the same numbers.

The input is (37·i mod 101)/100 in row-major order. The folder is never written again; a new format gets a new one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import bridle

HERE = Path(__file__).parent


def test_an_export_of_format_1_loads_and_gives_its_stored_features_and_codes() -> None:
    expected = json.loads((HERE / "export-1.json").read_text())
    model = bridle.load(HERE / "export-1")
    x = (torch.arange(2 * 256) * 37 % 101).reshape(2, 1, 16, 16) / 100
    assert torch.allclose(model.encode(x), torch.tensor(expected["features"]), atol=1e-5)
    assert torch.allclose(model.encode(x, pool="class"), torch.tensor(expected["class"]), atol=1e-5)
    assert model.tokenize(x).tolist() == expected["codes"]
    assert model.facts.data_licence == "CC0"
