"""The way back from packed blocks of ids, written apart from the code that packs them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

PAD, SEP = 0, 3


def unpack(blocks: Iterable[np.ndarray]) -> list[np.ndarray]:
    """The rows that were packed: all ids in one line, cut at each separator, without the padding at the end."""
    line = [int(number) for block in blocks for number in block]
    while line and line[-1] == PAD:
        line.pop()
    rows: list[list[int]] = [[]] if line else []
    for number in line:
        if number == SEP:
            rows.append([])
        else:
            rows[-1].append(number)
    return [np.array(row, dtype=np.int64) for row in rows]
