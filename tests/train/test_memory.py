"""A run says how much memory it took."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from bridle.machine import peak_memory


def test_peak_memory_counts_what_was_held_and_let_go() -> None:
    before = gigabytes(peak_memory())
    held = np.ones(2**29, dtype=np.uint8)  # 0.54 GB, touched
    del held
    now = gigabytes(peak_memory())
    assert now >= 0.5
    assert now >= before
    status = Path("/proc/self/status")
    if status.exists():  # Linux: the kernel's own high-water mark, in kB
        peak = int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) * 1024 / 1e9
        assert abs(now - peak) <= 0.06  # rounded to a tenth


def gigabytes(text: str) -> float:
    found = re.match(r"(\d+\.\d) GB", text)
    assert found is not None
    return float(found[1])
