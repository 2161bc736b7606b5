"""Resident memory of the loader over several passes: python benchmarks/data_memory.py RECIPE [KEY=VALUE]...

Memory is what this process holds after each pass over the same samples; the first pass fills caches.
"""

from __future__ import annotations

import sys
from math import ceil

from bench.data import ROWS, loader
from bench.timing import resident

from bridle.config import Config, load_config
from bridle.data.build import open_data
from bridle.data.sources import Source

PASSES = 4
SAMPLES = 512
FLAT_MB = 16.0  # growth from the second pass to the last that still counts as flat


def measure(source: Source, config: Config, *, samples: int) -> list[float]:
    """MB after each pass over the first samples of the order."""
    held = []
    for _ in range(PASSES):
        for _batch in loader(source, config, workers=0, batch=ROWS).steps(0, ceil(samples / ROWS)):
            pass
        held.append(resident("VmRSS") / 1024)
    return held


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    config = load_config(sys.argv[1], sys.argv[2:])
    source = open_data(config).train
    samples = min(SAMPLES, len(source))
    memory = measure(source, config, samples=samples)
    growth = memory[-1] - memory[1]
    steady = "flat" if growth <= FLAT_MB else f"grew by {growth:.0f} MB after the second pass"
    print(f"memory after passes over {samples} samples: {', '.join(f'{mb:.0f}' for mb in memory)} MB ({steady})")
    return 0 if growth <= FLAT_MB else 1


if __name__ == "__main__":
    sys.exit(main())
