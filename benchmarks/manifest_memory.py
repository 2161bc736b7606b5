"""Memory of a data worker against the number of rows of its manifest, and how long opening the manifest takes.

    python benchmarks/manifest_memory.py [ROWS …]

For each number of rows a CSV (path, label, start, end) is written to a temporary folder. One fresh process opens it for
the first time, which makes the index (`its peak`: most memory it took); another opens it again and asks two workers for
random rows. `own` is memory that a worker has to itself (RssAnon), `mapped` are pages of files it touched (RssFile),
which all processes share and the system takes back when it needs room.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROWS = (10_000, 100_000, 1_000_000)
LOOKS = 20_000  # rows that each worker asks for


def main() -> None:
    counts = [int(word.replace("_", "")) for word in sys.argv[1:]] or list(ROWS)
    print("| rows | list, MB | index, MB | first open, CPU s | its peak, MB | again, CPU s | own, MB | mapped, MB |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            file = write_manifest(Path(folder) / f"{count}.csv", count)
            first, again = measure(file, workers=0), measure(file, workers=2)
            index = sum(part.stat().st_size for part in Path(folder).glob(f".{file.name}.index/*"))
            own, mapped = (max(sizes) for sizes in zip(*again["workers"], strict=True))
            sizes = f"{file.stat().st_size / 1e6:.1f} | {f'{index / 1e6:.1f}' if index else 'none'}"
            times = f"{first['seconds']:.2f} | {first['peak'] / 1e3:.0f} | {again['seconds']:.2f}"
            print(f"| {count:,} | {sizes} | {times} | {own / 1e3:.0f} | {mapped / 1e3:.0f} |", flush=True)


def write_manifest(file: Path, count: int) -> Path:
    with file.open("w") as text:
        text.write("path,label,start,end\n")
        for i in range(count):
            text.write(f"speakers/{i % 1000:04d}/recording-{i:09d}.flac,class{i % 500},{i % 60},{i % 60 + 10}\n")
    return file


def measure(file: Path, *, workers: int) -> dict[str, Any]:
    """Open the manifest in a fresh process; its answer is one line of JSON."""
    command = [sys.executable, __file__, "--child", str(file), str(workers)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(answer))


def child(file: Path, workers: int) -> None:
    from bridle.data.listing.manifest import read_manifest
    from bridle.data.loading.worker_pool import map_in_order

    begin = time.process_time()
    found = read_manifest(file, base=None)
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = list(map_in_order(partial(look, found), range(workers), workers=workers)) if workers else []
    print(json.dumps({"seconds": seconds, "peak": peak, "rows": len(found.train.paths), "workers": seen}))


def look(found: Any, seed: int) -> tuple[int, ...]:
    """Ask for random rows in a worker, then for its own and its mapped memory in kB."""
    draw, listing = random.Random(seed), found.train
    for _ in range(LOOKS):
        at = draw.randrange(len(listing.paths))
        assert found.classes[listing.labels[at]] == f"class{int(listing.paths[at].stem.rpartition('-')[2]) % 500}"
        assert listing.spans[at][1] == listing.spans[at][0] + 10
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(status[name].split()[0]) for name in ("RssAnon", "RssFile"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
