"""Memory stays flat over optimizer steps; `make soak` looks at more of them."""

from __future__ import annotations

from pathlib import Path

from soak.leak import measure_growth


def test_memory_stays_flat(tmp_path: Path) -> None:
    found = measure_growth(tmp_path, steps=150)
    assert found.steps == 100
    assert found.bytes <= 2_000_000, found  # pages come in clusters: a leak of a sample a step would be 25 MB
