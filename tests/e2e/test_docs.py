"""The commands of the guides run as they stand there, on small data of the same layout; only training is shortened."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
import webdataset
from bucket import stay_local
from forked import bridle
from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
FULL_SIZE = ("audioset2m", "as2m", "imagenet1k", "in1k", "kinetics400", "k400", "from-vit")  # need days, or gigabytes
SHORTER = {
    "pretrain": ["--max-steps", "2"],
    "finetune": ["finetune.epochs=1", "finetune.warmup_epochs=0", "finetune.shot_steps=2", "finetune.draws=2"],
    "bench": ["--seconds", "0.2"],
    "detokenizer": ["detokenizer.steps=3", "detokenizer.warmup_steps=1"],
    "ablate": ["max_steps=2", "probe.items=20"],
}


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not any(word in line for word in FULL_SIZE)]


def shortened(command: str) -> list[str]:
    words = [word.replace("0,1", "0") for word in shlex.split(command)]  # one seed
    return [*words, *SHORTER.get(words[1], [])]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every folder the guides speak of."""
    root = tmp_path_factory.mktemp("docs")
    make_pictures(root)
    make_recordings(root)
    make_clips(root)
    return root


def make_pictures(root: Path) -> None:
    random = np.random.default_rng(0)
    for folder, size in (("photos", 80), ("cifar10/train", 32), ("cifar10/test", 32)):
        for name, level in (("airplane", 60), ("bird", 200)):
            (root / folder / name).mkdir(parents=True)
            for i in range(10):
                pixels = random.integers(level - 50, level + 50, (size, size, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / folder / name / f"{i}.jpg")


def make_weights(path: Path) -> None:
    """A ViT from elsewhere: one block, 64 wide, 4 × 4 patches of 16 × 16 pixels, the names of timm."""
    shapes = {"attn.qkv": (192, 64), "attn.proj": (64, 64), "mlp.fc1": (256, 64), "mlp.fc2": (64, 256)}
    weights = {f"blocks.0.{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"blocks.0.{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items()}
    for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm"):
        weights |= {f"{norm}.weight": torch.ones(64), f"{norm}.bias": torch.zeros(64)}
    weights |= {"patch_embed.proj.weight": 0.1 * torch.randn(64, 3, 16, 16), "patch_embed.proj.bias": torch.zeros(64)}
    weights |= {"cls_token": torch.zeros(1, 1, 64), "pos_embed": 0.1 * torch.randn(1, 17, 64)}
    torch.save({"model": weights, "epoch": 1}, path)


def make_recordings(root: Path) -> None:
    random = np.random.default_rng(0)

    def sound(path: Path, hertz: float, seconds: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        wave = np.sin(2 * np.pi * hertz * np.arange(int(16_000 * seconds)) / 16_000)
        soundfile.write(path, 0.3 * wave + 0.01 * random.standard_normal(len(wave)), 16_000)

    for i in range(8):
        sound(root / "recordings" / ("dog", "cat")[i % 2] / f"{i}.wav", (300.0, 3000.0)[i % 2], 1.0 + i)
    rows = []
    for i in range(20):
        name = "1-100032-A-0.ogg" if i == 0 else f"{i % 5 + 1}-{i}-A-{i % 2}.ogg"
        sound(root / "ESC-50" / "audio" / name, (300.0, 3000.0)[i % 2], 3.0)
        rows.append([name, i % 5 + 1, i % 2, ("dog", "rooster")[i % 2], "False", i, "A"])
    (root / "ESC-50" / "meta").mkdir()
    with (root / "ESC-50" / "meta" / "esc50.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["filename", "fold", "target", "category", "esc10", "src_file", "take"], *rows])
    sound(root / "audioset" / "audio" / "-0Gj8-vB1q4.wav", 500.0, 2.0)
    sound(root / "audioset" / "audio" / "aaaaaaaaaaa.wav", 900.0, 2.0)
    (root / "audioset" / "class_labels_indices.csv").write_text(
        'index,mid,display_name\n0,/m/09x0r,"Speech"\n1,/m/0dgbq,"Siren"\n'
    )
    (root / "audioset" / "balanced_train_segments.csv").write_text(
        '# YTID, start_seconds, end_seconds, positive_labels\n-0Gj8-vB1q4, 30.000, 40.000, "/m/09x0r"\n'
        'aaaaaaaaaaa, 30.000, 40.000, "/m/09x0r,/m/0dgbq"\nbbbbbbbbbbb, 0.000, 10.000, "/m/0dgbq"\n'
    )


def make_clips(root: Path) -> None:
    random = np.random.default_rng(0)

    def clip(path: Path, level: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=15)
            stream.width = stream.height = 96
            stream.pix_fmt = "yuv420p"
            for _ in range(20):
                pixels = random.integers(level - 50, level + 50, (96, 96, 3)).astype(np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode(None))

    for i in range(6):
        clip(root / "clips" / ("dark", "light")[i % 2] / f"{i}.mp4", (60, 200)[i % 2])
    lists: dict[str, list[str]] = {"train": [], "val": []}
    for i in range(8):
        name = f"{('airplane', 'bird')[i % 2]}/{i}.mp4"
        clip(root / "sky4" / name, (60, 200)[i % 2])
        lists["train" if i < 4 else "val"].append(f"{name} {i % 2}")
    for split, lines in lists.items():
        (root / "sky4" / f"{split}.csv").write_text("\n".join(lines) + "\n")


PAGES = ["data-sets.md", "own-data.md", "using.md", "evaluating.md", "with.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_guide_run(page: str, place: Path) -> None:
    here = place / page.removesuffix(".md")
    here.mkdir()
    for folder in ("photos", "cifar10", "recordings", "ESC-50", "audioset", "clips", "sky4"):
        (here / folder).symlink_to(place / folder)
    if page == "using.md":
        make_weights(here / "vit.pth")
    if page == "with.md":
        make_sources(here)
    if page == "evaluating.md":  # scores a run that data-sets.md makes
        assert run_command("bridle pretrain cifar10-tiny data.root=cifar10 --out runs/c10", here)[0] == 0
    assert len(commands(page)) >= 5
    # These are about what comes before and after training.
    less = " schedule.iterations=1 probe.enabled=false" if page in ("using.md", "own-data.md", "with.md") else ""
    for command in commands(page):
        code, said = run_command(command + (less if command.startswith("bridle pretrain") else ""), here)
        assert code == 0, f"{command}\n{said}"
    if page == "using.md":
        run_python(page, here)


def make_sources(here: Path) -> None:
    """What with.md speaks of: an Arrow folder by the page's own code, tars of webdataset, and a bucket."""
    run_python("with.md", here, section="## datasets")
    files = sorted((here / "photos").rglob("*.jpg"))
    (here / "bucket" / "tars").mkdir(parents=True)
    for split in ("train", "test"):
        with webdataset.ShardWriter(f"{here}/bucket/tars/{split}-%06d.tar", maxcount=10, verbose=0) as sink:
            for i, file in enumerate(files):
                sink.write({"__key__": f"{i}", "jpg": file.read_bytes(), "cls": i // 10})
    (here / "tars").symlink_to(here / "bucket" / "tars")
    shutil.copytree(here / "recordings", here / "bucket" / "talks")
    (here / "bucket" / "talks" / "list.csv").write_text("path,label\ndog/0.wav,dog\ncat/1.wav,cat\n")


def run_python(page: str, place: Path, section: str = "# ") -> None:
    """The Python of a page, or of a section of it, in one go; what needs another package is left out of whole pages."""
    text = (DOCS / page).read_text().partition(f"{section}")[2]
    text = text if section == "# " else text.partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = "\n".join(block for block in blocks if section != "# " or "datasets" not in block)
    environment = {**ENVIRONMENT, "HF_HOME": str(place / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run_command(command: str, place: Path) -> tuple[int | None, str]:
    """Exit code, and the last of what the command said."""
    words = shortened(command)
    if words[0] == "bridle":
        ended = bridle(*words[1:], cwd=place, before=stay_local)
        return ended.code, ended.out[-1500:] + ended.err[-1500:]
    done = subprocess.run(words, cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout[-1500:] + done.stderr[-1500:]
