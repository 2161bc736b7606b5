"""`torchrun -m bridle tokenize`: two processes share a corpus, are killed, and nothing is lost or repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL
from PIL import Image

import bridle

QUICK = (*SMALL, "schedule.iterations=2", "probe.enabled=false", "data.cache_mb=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """photos/ with forty pictures, one of them broken, and a trained run."""
    root = tmp_path_factory.mktemp("ranks")
    (root / "photos").mkdir()
    random = np.random.default_rng(0)
    for i in range(40):
        Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(root / "photos" / f"{i:02}.png")
    shape = ["geometry.input=[16, 16]", "geometry.patch=[4, 4]"]
    bridle.pretrain("image", out=root / "run", overrides=[*QUICK, *shape, f"data.root={root / 'photos'}"], max_steps=1)
    (root / "photos" / "17.png").write_bytes(b"\x89PNG\r\n")
    return root


def run(root: Path, *arguments: str, ranks: int, failpoints: str = "") -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    log = root / "fired.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BRIDLE_FAILPOINTS": failpoints}
    return subprocess.run(
        [sys.executable, *launcher, "-m", "bridle", "tokenize", "run", "photos", "--workers", "0", *arguments],
        cwd=root, env={**environment, "BRIDLE_FAILPOINTS_LOG": str(log)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_two_processes_are_killed_and_others_finish_what_they_began(root: Path) -> None:
    killed = run(root, "--out", "codes", "--batch", "1", ranks=2, failpoints="export.file_done@9=kill")
    assert killed.returncode != 0
    assert (root / "fired.txt").read_text() == "export.file_done@9=kill\n"
    assert not (root / "codes" / "index.json").exists()
    ledgers = [path.read_text().splitlines() for path in (root / "codes" / "job").glob("part-*/ledger.jsonl")]
    done = sum(map(len, ledgers))
    assert 9 <= done < 40
    # Another number of processes goes on with the same parts.
    goes_on = run(root, "--out", "codes", "--batch", "1", ranks=1)
    assert goes_on.returncode == 0, goes_on.stderr
    assert f"continuing: {done} of 40 files are done" in goes_on.stderr
    assert "1 of 40 files could not be read" in goes_on.stderr
    assert "wrote codes: 39 files, 624 rows" in goes_on.stdout
    model = bridle.load(root / "run")
    names = [name for name, _ in bridle.read_codes(root / "codes")]
    assert names == [f"photos/{i:02}.png" for i in range(40) if i != 17]
    for name, found in bridle.read_codes(root / "codes"):
        assert np.array_equal(found.codes, model.tokenize_file(root / name, batch=1).codes)
