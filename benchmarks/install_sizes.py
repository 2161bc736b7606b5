"""Install bridle's wheel with each extra into a clean environment, run a command of that extra, and print a table.

    python benchmarks/install_sizes.py [--only "image;audio"]

Packages of the base install are shared by the environments of the extras, so that torch is installed once; an
environment sees the base and its own extra, nothing else. Needs `build`, and what pip needs to find torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FEATURES = """
import time; began = time.perf_counter()
import bridle, numpy; imported = time.perf_counter() - began
model = bridle.load("digits-tiny")
x = numpy.random.default_rng(0).random((1, 1, 16, 16), dtype="float32")
model.encode(x), model.tokenize(x)
print(f"{imported:.2f} {time.perf_counter() - began:.2f}")
"""
SOUND = "import numpy, soundfile; soundfile.write('d/a.wav', numpy.sin(numpy.arange(16000) / 9), 16000)"
PICTURE = "from PIL import Image; Image.radial_gradient('L').save('d/a.png')"
FILM = """
import av, numpy
with av.open('d/a.mp4', 'w') as out:
    stream = out.add_stream('mpeg4', rate=8); stream.width = stream.height = 64; stream.pix_fmt = 'yuv420p'
    for n in range(8):
        frame = av.VideoFrame.from_ndarray(numpy.full((64, 64, 3), 20 * n, 'uint8'), format='rgb24')
        [out.mux(packet) for packet in stream.encode(frame)]
    [out.mux(packet) for packet in stream.encode()]
"""
CHECK = ["-m", "bridle", "data", "check", "d"]
TRAIN = ["-m", "bridle", "pretrain", "digits-tiny", "--out", "run", "max_steps=2", "schedule.iterations=1"]
COMMANDS: dict[str, list[list[str]]] = {  # arguments of python, in order; `run` is made by train
    "audio": [["-c", SOUND], CHECK],
    "image": [["-c", PICTURE], CHECK],
    "video": [["-c", FILM], CHECK],
    "train": [TRAIN],
    "report": [["-m", "bridle", "report", "../train/run"]],
    "search": [["-c", "import sklearn.preprocessing, scipy.sparse, jinja2"]],
    "export": [["-m", "bridle", "export", "digits-tiny", "--out", "exported", "--onnx"]],
    "hub": [["-m", "bridle", "export", "digits-tiny", "--out", "exported"]],
    "cluster": [["-c", "import submitit.slurm.slurm"]],
    "parquet": [["-c", "import pyarrow.parquet"]],
    "audio,image,video,train,report": [["-c", FEATURES]],  # what every install had before there were extras
    "tensorboard": [["-c", "import torch.utils.tensorboard"]],
}


def run(*command: str, cwd: Path) -> str:
    """Run a command without the caller's Python settings; its output, or its error text and an exit."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    kept["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, check=False, cwd=cwd, env=kept, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def site_of(python: Path) -> Path:
    return next(python.parents[1].glob("[Ll]ib*/python3*/site-packages"), python.parents[1] / "Lib/site-packages")


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def new_environment(folder: Path, wheel: str, base: Path | None) -> Path:
    """A venv with the wheel, on top of the packages of `base`; returns its python."""
    run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    if base is not None:
        (site_of(python) / "base.pth").write_text(f"{base}\n")
    run(str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), wheel, cwd=folder)
    return python


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="extras, separated by semicolons")
    chosen = parser.parse_args().only.split(";")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run(sys.executable, "-m", "build", "--outdir", name, str(ROOT), cwd=place)
        (wheel,) = place.glob("*.whl")
        (place / "base").mkdir()
        python = new_environment(place / "base", str(wheel), None)
        base = site_of(python)
        torch = sum(megabytes(path) for path in base.glob("torch*"))
        run(str(python), "-c", FEATURES, cwd=place)  # compiles the files once
        imported, first = run(str(python), "-c", FEATURES, cwd=place).split()
        print("| install | MB beside torch | import s | first feature s | command s |\n|---|---|---|---|---|")
        print(f"| bridle | {megabytes(base) - torch:.0f} (torch {torch:.0f}) | {imported} | {first} | – |", flush=True)
        for extra, commands in COMMANDS.items():
            if chosen != [""] and extra not in chosen:
                continue
            (place / extra / "d").mkdir(parents=True)
            own = new_environment(place / extra, f"{wheel}[{extra}]", base)
            began = time.perf_counter()
            for arguments in commands:
                run(str(own), *arguments, cwd=place / extra)
            seconds = time.perf_counter() - began
            imported, first = run(str(own), "-c", FEATURES, cwd=place).split()
            size = megabytes(site_of(own))
            print(f"| bridle[{extra}] | +{size:.0f} | {imported} | {first} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
