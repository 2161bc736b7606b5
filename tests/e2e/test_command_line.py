"""The commands as a user types them: real processes, real files, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
from conftest import SMALL
from PIL import Image

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def bridle(*arguments: str | Path, cwd: Path, expect: int = 0) -> str:
    """Run the command and return what it printed; stderr first."""
    ended = forked.bridle(*arguments, cwd=cwd)
    assert ended.code == expect, f"exit {ended.code}\n{ended.out}\n{ended.err}"
    return ended.err + ended.out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with train/ and test/, PNG and JPEG, several sizes: red-ish against blue-ish noise."""
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 10)):
        for channel, name in ((0, "red"), (2, "blue")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 120, (20 + i % 7, 24, 3), dtype=np.uint8)
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / f"{i}.{'png' if i % 2 else 'jpg'}")
    return root


TRAIN = (*SMALL, "geometry.input=[16, 16]", "encoder_phase.steps=6", "tokenizer_phase.steps=4", "schedule.iterations=2")


def test_pretrain_probe_report_on_class_folders(pictures: Path, tmp_path: Path) -> None:
    said = bridle("pretrain", "cifar10-tiny", f"data.root={pictures}", *TRAIN, "--out", "runs/c10", cwd=tmp_path)
    assert "iter 2/2 encoder" in said
    assert "samples/s" in said
    assert "bridle probe runs/c10" in said
    run = tmp_path / "runs" / "c10"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "results.json", "environment.json", "checkpoints"} <= names
    assert json.loads((run / "environment.json").read_text())["command"].startswith("bridle pretrain cifar10-tiny")
    results = json.loads((run / "results.json").read_text())
    assert [entry["iteration"] for entry in results["evaluations"]] == [1, 2]
    assert results["baselines"]["raw"]["test_items"] == 20
    said = bridle("pretrain", "cifar10-tiny", f"data.root={pictures}", *TRAIN, "--out", "runs/c10", cwd=tmp_path)
    assert "is finished; nothing to do" in said
    said = bridle("probe", "runs/c10", cwd=tmp_path)
    assert "untrained encoder" in said
    probed = json.loads((run / "probe.json").read_text())
    assert probed["evaluations"][1]["probe"]["accuracy"] == results["evaluations"][1]["probe"]["accuracy"]
    assert "probing" not in bridle("probe", "runs/c10", cwd=tmp_path)  # what is known is not computed again
    said = bridle("probe", "runs/c10", "probe.items=50", "probe.pool=axis", cwd=tmp_path)
    assert "probing p0002-iter2-encoder-00000006-end" in said
    assert json.loads((run / "probe.json").read_text())["evaluations"][1]["probe"]["train_items"] == 50
    assert "probing" not in bridle("probe", "runs/c10", "probe.items=50", "probe.pool=axis", cwd=tmp_path)
    assert "k-NN acc. %" in bridle("knn", "runs/c10", cwd=tmp_path)
    refused = bridle("probe", "runs/c10", "encoder.depth=9", cwd=tmp_path, expect=2)
    assert "a probe cannot change this" in refused
    said = bridle("codebooks", "runs/c10", "--iteration", "2", cwd=tmp_path)
    assert "iteration 2" in said and "iteration 1 " not in said and "stage 1: " in said
    assert (run / "codebooks.json").is_file() and (run / "figures" / "code-norms-iteration2.png").is_file()
    bridle("report", "runs/c10", "--out", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "Token maps" in page and "Nearest neighbours" in page
    bridle("report", "runs/c10", "--no-samples", "--out", "page.html", cwd=tmp_path)
    assert "Token maps" not in (tmp_path / "page.html").read_text()


def test_ctrl_c_saves_and_the_same_command_continues(pictures: Path, tmp_path: Path) -> None:
    arguments = ["pretrain", "cifar10-tiny", f"data.root={pictures}", *TRAIN, "encoder_phase.steps=4000",
                 "schedule.iterations=1", "--out", "run"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "bridle", *arguments], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped by SIGINT; saved at step" in said
    assert "Traceback" not in said
    reached = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert 3 <= reached < 4000
    again = bridle(*arguments, "--max-steps", "4000", cwd=tmp_path, expect=2)  # another experiment: refused
    assert "another config (max_steps" in again


def test_a_flat_folder_of_unlabelled_pictures_pretrains(pictures: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, path in enumerate(sorted(pictures.rglob("*.png"))):
        (flat / f"{i}.png").write_bytes(path.read_bytes())
    (flat / "broken.png").write_text("this is not a picture")
    out = ["--out", "run", "--max-steps", "12"]
    said = bridle("pretrain", "image", f"data.root={flat}", *TRAIN, "geometry.patch=[4, 4]", *out, cwd=tmp_path)
    assert "broken.png" in said
    listed = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [Path(row["path"]).name for row in listed] == ["broken.png"]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert ["probe" in entry for entry in results["evaluations"]] == [False, False]
    assert "a probe needs labels" in bridle("probe", "run", cwd=tmp_path, expect=65)


def test_signals_from_npy_files_pretrain(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for kind in ("slow", "fast"):
        folder = tmp_path / "signals" / kind
        folder.mkdir(parents=True)
        for i in range(12):
            time_axis = np.arange(150 + i)
            wave = np.sin(time_axis * (0.05 if kind == "slow" else 0.4) + random.uniform(0, 6, (2, 1)))
            np.save(folder / f"{i}.npy", wave.astype(np.float32))
    changes = [*SMALL, "geometry.channels=2", "geometry.input=[128]", "geometry.patch=[8]", "encoder_phase.steps=4"]
    bridle("pretrain", "signal", "data.root=signals", *changes, "tokenizer_phase.steps=3", "--out", "run", cwd=tmp_path)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["evaluations"][0]["probe"]["classes"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pretrain", "cifar10-tiny", "data.root=nowhere"], 2, "nowhere"),
        (["pretrain", "cifar10-tiny", "data.root=empty"], 65, "empty"),
        (["pretrain", "cifar10-tiny"], 2, "give data.root=PATH"),
        (["pretrain", "cifar10-tiny", "encodr.depth=3"], 2, "did you mean 'encoder.depth'"),
        (["pretrain", "cifar10-tiny", "depth"], 2, "expected key=value"),
        (["pretrain", "cifar10-tiny", "geometry.patch=[5,5]"], 2, "does not divide"),
        (["pretrain", "digits-tiny", "geometry.input=[8,8]"], 2, "the embedded digits are"),
        (["pretrain", "digits-tiny", "runtime.device=cuda:7"], 2, "try runtime.device=cpu"),
        (["pretrain", "nosuch"], 2, "bridle recipes"),
        (["probe", "empty"], 2, "not a run directory"),
        (["report", "empty"], 2, "not a run"),
        (["demo", "--modality", "smell"], 2, "audio"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = bridle(*arguments, cwd=tmp_path, expect=code)
    assert message in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]  # nothing is left behind


def test_the_version_is_told(tmp_path: Path) -> None:
    assert re.fullmatch(r"bridle \d+\.\d+\S*\n", bridle("--version", cwd=tmp_path))


def test_a_setting_written_as_an_option_is_named(tmp_path: Path) -> None:
    said = bridle("pretrain", "digits-tiny", "--device", "cuda", cwd=tmp_path, expect=2)
    assert "--device: settings are written KEY=VALUE: runtime.device=cuda" in said
    assert "KEY=VALUE" not in bridle("plan", "digits-tiny", "--device", "tpu", cwd=tmp_path, expect=2)


def test_help_groups_the_commands_by_task(tmp_path: Path) -> None:
    text = bridle("--help", cwd=tmp_path)
    tasks = {"Start": "init", "Train": "pretrain", "Evaluate": "probe", "Use codes and features": "embed",
             "Share": "export", "Machine": "doctor"}  # fmt: skip
    places = [text.index(f"╭─ {task} ─") for task in tasks]
    assert places == sorted(places)
    for begin, end, command in zip(places, [*places[1:], len(text)], tasks.values(), strict=True):
        assert f" {command} " in text[begin:end]


def test_recipes_show_and_doctor_answer(tmp_path: Path) -> None:
    assert "cifar10-tiny" in bridle("recipes", cwd=tmp_path)
    shown = bridle("show", "cifar10-tiny", "quantizer=vq", cwd=tmp_path)
    assert "codes: 1024" in shown
    (tmp_path / "shown.yaml").write_text(shown)
    assert bridle("show", "shown.yaml", cwd=tmp_path) == shown  # what is shown is itself a config
    said = bridle("doctor", cwd=tmp_path)
    assert all(word in said for word in ("torch 2", "threads", "bf16", "disk", "codecs"))


@pytest.mark.parametrize(
    "command",
    [[], ["pretrain"], ["probe"], ["knn"], ["demo"], ["show"], ["recipes"], ["report"], ["codebooks"], ["doctor"]],
)
def test_every_command_has_help_with_an_example(command: list[str], tmp_path: Path) -> None:
    said = bridle(*command, "--help", cwd=tmp_path)
    assert "Usage" in said
    assert not command or "Example:" in said


def test_bf16_on_this_cpu_trains_or_is_refused_but_never_kills_the_process(tmp_path: Path) -> None:
    width = ["encoder.width=64", "decoder.width=64", "encoder_phase.batch=64"]  # large enough for the fast kernels
    arguments = [
        "pretrain",
        "digits-tiny",
        *SMALL,
        *width,
        "runtime.precision=bf16",
        "schedule.iterations=1",
        "--out",
        "r",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bridle", *arguments, "--max-steps", "2"],
        cwd=tmp_path, env={k: v for k, v in ENVIRONMENT.items() if k != "ONEDNN_MAX_CPU_ISA"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode == 2:  # only a CPU without any working bf16 may refuse here
        assert "bf16 does not work on this CPU" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "bf16" in done.stderr
    assert json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])["loss"] > 0
    bridle("probe", "r", cwd=tmp_path)  # and what was trained so can be probed


def test_bf16_from_python_with_torch_already_running_is_refused_or_works(tmp_path: Path) -> None:
    code = (
        "import torch; a = torch.ones(256, 256); a @ a; import bridle\n"
        "from bridle.errors import ConfigError\n"
        "try:\n"
        "    bridle.pretrain('digits-tiny', out='r', max_steps=1, overrides=['runtime.precision=bf16'])\n"
        "except ConfigError as error:\n"
        "    print('refused:', error)\n"
    )
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "refused" not in done.stdout or "fp32" in done.stdout
