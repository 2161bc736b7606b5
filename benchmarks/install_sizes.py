"""Install bridle's wheel with each extra into a clean environment, run a command of that extra, and print a table.

    python benchmarks/install_sizes.py [--only "image;audio"]

Packages of the base install are shared by the environments of the extras, so that torch is installed once; an
environment sees the base and its own extra, nothing else. Needs `build`, and what pip needs to find torch. Times are
CPU seconds, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FEATURES = """
import time; began = time.process_time()
import bridle, numpy; imported = time.process_time() - began
model = bridle.load("digits-tiny")
x = numpy.random.default_rng(0).random((1, 1, 16, 16), dtype="float32")
model.encode(x), model.tokenize(x)
print(f"{imported:.2f} {time.process_time() - began:.2f}")
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
INDEX = ["-m", "bridle", "index", "digits-tiny", "d", "--out", "index"]
TRAIN = ["-m", "bridle", "pretrain", "digits-tiny", "--out", "run", "max_steps=2", "schedule.iterations=1"]
AUTO = """
import torch; from transformers import AutoModel
AutoModel.from_pretrained("exported", trust_remote_code=True)(torch.zeros(1, 1, 16, 16)).last_hidden_state
"""
ROWS = "import datasets; datasets.Dataset.from_dict({'x': [1]}).save_to_disk('d'); datasets.load_from_disk('d')"
COMMANDS: dict[str, list[list[str]]] = {  # arguments of python, in order; `run` is made by train
    "audio": [["-c", SOUND], CHECK],
    "image": [["-c", PICTURE], CHECK],
    "video": [["-c", FILM], CHECK],
    "train": [TRAIN],
    "report": [["-m", "bridle", "report", "../train/run"]],
    "search": [["-c", PICTURE], INDEX, ["-m", "bridle", "search", "index", "d/a.png"]],
    "export": [["-m", "bridle", "export", "digits-tiny", "--out", "exported", "--onnx"]],
    "hub": [["-m", "bridle", "export", "digits-tiny", "--out", "exported"]],
    "cluster": [["-c", "import submitit.slurm.slurm"]],
    "parquet": [["-c", "import pyarrow.parquet"]],
    "audio,image,video,train,report": [["-c", FEATURES]],  # what every install had before there were extras
    "lm": [["-m", "bridle", "export", "digits-tiny", "--out", "exported", "--transformers"], ["-c", AUTO]],
    "datasets": [["-c", ROWS]],
    "s3": [["-c", "import s3fs"]],
    "gcs": [["-c", "import gcsfs"]],
    "tensorboard": [["-c", "import torch.utils.tensorboard"]],
    "wandb": [["-c", "import wandb; wandb.init(mode='offline').finish()"]],
    "mlflow": [["-c", "import mlflow"]],
    "trackio": [["-c", "import trackio"]],
    "faiss": [["-c", "import faiss"]],
    "all": [TRAIN, ["-m", "bridle", "report", "run"]],
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
    pinned = [] if "[trackio]" in wheel else ["-c", str(ROOT / "constraints.txt")]  # trackio: with an older pillow
    run(str(python), "-m", "pip", "install", "-q", *pinned, wheel, cwd=folder)
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
        print(
            "| install | MB beside torch | import CPU s | first feature CPU s | command CPU s |\n|---|---|---|---|---|"
        )
        print(f"| bridle | {megabytes(base) - torch:.0f} (torch {torch:.0f}) | {imported} | {first} | – |", flush=True)
        for extra, commands in COMMANDS.items():
            if chosen != [""] and extra not in chosen:
                continue
            (place / extra / "d").mkdir(parents=True)
            own = new_environment(place / extra, f"{wheel}[{extra}]", base)
            began = os.times()
            for arguments in commands:
                run(str(own), *arguments, cwd=place / extra)
            ended = os.times()
            seconds = sum(ended[2:4]) - sum(began[2:4])  # of children
            imported, first = run(str(own), "-c", FEATURES, cwd=place).split()
            size = megabytes(site_of(own))
            print(f"| bridle[{extra}] | +{size:.0f} | {imported} | {first} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
