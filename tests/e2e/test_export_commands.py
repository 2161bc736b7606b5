"""`bridle tokenize` and `bridle embed` as a user types them, on pictures, recordings and videos."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import forked
import numpy as np
import pytest
import soundfile
from conftest import SMALL
from PIL import Image

import bridle

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
QUICK = (*SMALL, "schedule.iterations=2", "probe.enabled=false", "data.cache_mb=0")


def command(*arguments: str | Path, cwd: Path, expect: int = 0, stdin: str = "") -> str:
    """Run the command and return what it printed; stderr first."""
    ended = forked.bridle(*arguments, cwd=cwd, stdin=stdin)
    assert ended.code == expect, f"exit {ended.code}\n{ended.out}\n{ended.err}"
    return ended.err + ended.out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """photos/ with twelve pictures, and a trained run."""
    root = tmp_path_factory.mktemp("pictures")
    (root / "photos").mkdir()
    random = np.random.default_rng(0)
    for i in range(12):
        Image.fromarray(random.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(root / "photos" / f"{i:02}.png")
    shape = ["geometry.input=[16, 16]", "geometry.patch=[4, 4]"]
    bridle.pretrain("image", out=root / "run", overrides=[*QUICK, *shape, f"data.root={root / 'photos'}"], max_steps=2)
    return root


def test_tokenize_a_folder_of_pictures(pictures: Path, tmp_path: Path) -> None:
    said = command("tokenize", pictures / "run", pictures / "photos", "--out", tmp_path / "c.npz", cwd=tmp_path)
    assert "12/12 files" in said
    assert "wrote" in said
    assert "12 files, 192 rows of 4 codes, 16 bits each" in said
    assert "bridle.read_codes(" in said
    model = bridle.load(pictures / "run")
    for name, found in bridle.read_codes(tmp_path / "c.npz"):
        assert np.array_equal(found.codes, model.tokenize_file(name).codes)
        assert found.positions[-1].tolist() == [3, 3]
        assert found.times is None
    again = command(
        "tokenize", pictures / "run", pictures / "photos", "--out", tmp_path / "c.npz", cwd=tmp_path, expect=2
    )
    assert "exists; give --overwrite" in again


def test_embed_pools_and_tells_bad_files(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n")
    names = "".join(f"{path}\n" for path in sorted((pictures / "photos").iterdir())[:3]) + "broken.png\n"
    run, out = pictures / "run", tmp_path / "z.safetensors"
    said = command("embed", run, "-", "--out", out, "--pool", "mean", cwd=tmp_path, stdin=names)
    assert "1 of 4 files could not be read" in said
    (line,) = (tmp_path / "z.safetensors.quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["path"] == "broken.png"
    stored = bridle.read_features(out)
    assert [found.z.shape for _, found in stored] == [(16,)] * 3
    said = command("embed", run, "broken.png", "--out", "x.npz", cwd=tmp_path, expect=65)
    assert said.splitlines()[-1].startswith("DataError: none of the 1 files could be read")
    said = command("embed", run, "broken.png", "--out", "y.npz", "--pool", "max", cwd=tmp_path, expect=2)
    assert said == "UsageError: --pool 'max': expected one of probe, none, mean, axis, class.\n"


def test_a_killed_command_goes_on_where_it_stopped(pictures: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    (tmp_path / "many").mkdir()
    Image.fromarray(pixels).save(tmp_path / "many" / "0000.png")
    for i in range(1, 1500):
        os.link(tmp_path / "many" / "0000.png", tmp_path / "many" / f"{i:04}.png")
    arguments = [sys.executable, "-m", "bridle", "tokenize", str(pictures / "run"), "many", "--out", "c.npz"]
    process = subprocess.Popen(arguments, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    ledger = tmp_path / "c.npz.parts" / "job" / "part-00000000" / "ledger.jsonl"
    while process.poll() is None and not (ledger.exists() and ledger.stat().st_size > 2000):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "of 1500 files are done. Run the same command again to continue." in said
    done = len(ledger.read_text().splitlines())
    assert 0 < done < 1500
    said = command(*arguments[3:], cwd=tmp_path)
    assert f"continuing: {done} of 1500 files are done" in said
    stored = bridle.read_codes(tmp_path / "c.npz")
    assert stored.files == [f"many/{i:04}.png" for i in range(1500)]
    first = next(iter(stored))[1].codes
    assert all(np.array_equal(found.codes, first) for _, found in stored)


def test_recordings_have_times_and_rates(tmp_path: Path) -> None:
    (tmp_path / "sounds").mkdir()
    random = np.random.default_rng(0)
    for i in range(8):
        wave = 0.1 * random.standard_normal((16_000, 2))
        soundfile.write(tmp_path / "sounds" / f"{i}.wav", wave, 16_000)
    shape = ["geometry.input=[64, 32]", "geometry.patch=[16, 16]", f"data.root={tmp_path / 'sounds'}"]
    bridle.pretrain("audio", out=tmp_path / "run", overrides=[*QUICK, *shape], max_steps=2)
    soundfile.write(tmp_path / "dog.flac", 0.1 * random.standard_normal(44_100 * 3), 44_100)
    said = command("tokenize", "run", "dog.flac", "--out", "dog.npz", cwd=tmp_path)
    assert "× realtime" in said
    assert "bits per second" in said
    ((name, found),) = bridle.read_codes(tmp_path / "dog.npz")
    assert name == "dog.flac"
    # 3 s make 298 frames of 10 ms: 18 patches of 16 and a rest of 10, which is more than half; 2 bands.
    assert found.times is not None
    assert found.codes.shape == (38, 4)
    np.testing.assert_allclose(found.times, np.repeat(np.arange(19) * 0.16, 2))
    assert found.positions[-1].tolist() == [18, 1]
    header = bridle.read_codes(tmp_path / "dog.npz").header
    assert header.model_extra["audio"]["sample_rate"] == 16_000
    assert header.model_extra["audio"]["shift_ms"] == 10.0
    assert header.tokens_per_second == pytest.approx(12.5)  # 2 bands every 0.16 s
    assert header.bits_per_second == pytest.approx(200.0)  # 4 codes of 4 bits
    command("embed", "run", "dog.flac", "--out", "dog-z.npz", "--pool", "axis", cwd=tmp_path)
    ((_, pooled),) = bridle.read_features(tmp_path / "dog-z.npz")
    assert pooled.z.shape == (2 * 16,)


def test_videos_have_times_of_their_own(tmp_path: Path) -> None:
    def write(path: Path, frames: int) -> None:
        random = np.random.default_rng(frames)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for _ in range(frames):
                picture = random.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())

    (tmp_path / "clips").mkdir()
    for i in range(4):
        write(tmp_path / "clips" / f"{i}.mp4", 10 + i)
    shape = ["geometry.input=[4, 16, 16]", "geometry.patch=[2, 8, 8]", f"data.root={tmp_path / 'clips'}"]
    fast = ["encoder_phase.batch=2", "tokenizer_phase.batch=2", "video.stride=2", "mask.ratio=0.5"]
    bridle.pretrain("video", out=tmp_path / "run", overrides=[*QUICK, *shape, *fast], max_steps=1)
    write(tmp_path / "long.mp4", 22)  # every second frame: 11, in windows of 4
    command("tokenize", "run", "long.mp4", "--out", "c.npz", cwd=tmp_path)
    ((_, found),) = bridle.read_codes(tmp_path / "c.npz")
    assert found.times is not None
    # A tubelet takes 2 of every second frame at 10 a second: 0.4 s; the sixth has one frame of two, which is half.
    np.testing.assert_allclose(found.times, np.repeat(np.arange(6) * 0.4, 4), atol=1e-3)
    assert found.positions[:, 0].tolist() == np.repeat(np.arange(6), 4).tolist()
