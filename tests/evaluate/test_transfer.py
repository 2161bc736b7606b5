"""`--on`: a run's encoder judged on another data set, of another input size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from run_folders import write_run
from video_files import write_pictures

from bridle.config import Config, load_config, read_config
from bridle.errors import ConfigError
from bridle.evaluate.finetune import finetune_run
from bridle.evaluate.probe_command import knn_run, probe_run
from bridle.geometry import Geometry
from bridle.models.build import build_encoder
from bridle.nn.position import resized_position, sincos_position
from bridle.runs.results import read_results

Small = Callable[..., Config]


@pytest.fixture
def signals(tmp_path: Path) -> Path:
    """Class folders of 1-channel signals, slow and fast; shorter than what the run is trained on."""
    for split, count in (("train", 12), ("test", 4)):
        for name, pace in (("slow", 1), ("fast", 8)):
            folder = tmp_path / "other" / split / name
            folder.mkdir(parents=True)
            for n in range(count):
                wave = 5 + 3 * np.sin(np.linspace(0, 6.28 * pace, 32) + n)
                np.save(folder / f"{n}.npy", wave[None].astype(np.float32))
    return tmp_path / "other"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe of the other data: half as long."""
    path = tmp_path / "short.yaml"
    path.write_text(
        "extends: signal\nname: short\ngeometry: {channels: 1, input: [32], patch: [4]}\n"
        "finetune: {steps: 3, warmup_steps: 1, batch: 8, epochs: null, warmup_epochs: null}\nruntime: {threads: 1}\n"
    )
    return str(path)


@pytest.fixture
def run(small: Small, tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    for n in range(20):
        wave = torch.randn(1, 64, generator=torch.Generator().manual_seed(n))
        np.save(tmp_path / "own" / f"{n}.npy", wave.numpy())
    overrides = (f"data.root={tmp_path / 'own'}", "geometry.input=[64]", "geometry.patch=[4]", "seed=3")
    return write_run(tmp_path / "run", small(*overrides, recipe="signal"))


def test_a_probe_on_other_data_takes_its_layout_statistics_length_and_classes(
    run: Path, recipe: str, signals: Path
) -> None:
    path = probe_run(run, [f"data.root={signals}"], on=recipe)
    assert path == run / "probe-short.json"
    found = json.loads(path.read_text())
    protocol = found["protocol"]
    assert (protocol["inputs"]["geometry"]["input"], protocol["on"], found["seed"]) == ([32], "short", 3)
    assert protocol["inputs"]["mean"][0] == pytest.approx(5, abs=0.2)  # measured on the other data
    (entry,) = found["evaluations"]
    assert (entry["probe"]["classes"], entry["probe"]["train_items"], entry["probe"]["test_items"]) == (2, 24, 8)
    assert "codebooks" not in entry  # they are judged on what their tokenizer was trained on
    assert knn_run(run, [f"data.root={signals}"], on=recipe) == run / "knn-short.json"


def test_fine_tuning_on_other_data_begins_with_the_runs_encoder_and_goes_on_where_it_stopped(
    run: Path, recipe: str, signals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = finetune_run(run, [f"data.root={signals}"], on=recipe)
    assert path == run / "finetune-short.json"
    (entry,) = json.loads(path.read_text())["evaluations"]
    assert (entry["start"], entry["finetune"]["test_items"]) == ("iter1", 8)
    assert "positions interpolated from grid (16,) to (8,)" in capsys.readouterr().err
    (folder,) = (run / "finetune").iterdir()
    kept = read_config(folder / "config.yaml")
    assert (kept.geometry.input, kept.encoder.width, kept.quantizer.codes) == ((32,), 16, 16)  # data theirs, nets ours
    finetune_run(run, [f"data.root={signals}"], on=recipe)  # finished: nothing is trained again
    assert [path.name for path in (run / "finetune").iterdir()] == [folder.name]
    assert not (run / "finetune.json").exists()


@pytest.mark.parametrize("split", ["train", "test"])
def test_fine_tuning_leaves_out_what_cannot_be_read_and_names_it(
    run: Path, recipe: str, signals: Path, split: str
) -> None:
    damaged = signals / split / "slow" / "2.npy"
    damaged.write_bytes(b"no array")
    path = finetune_run(run, [f"data.root={signals}"], on=recipe)  # three steps of 8 show all 24 items
    found = read_results(path).evaluations[-1].finetune
    assert found is not None
    assert found.left_out == (str(damaged),)
    assert found.test_items == (7 if split == "test" else 8)


def test_other_patches_and_other_networks_are_refused(run: Path, recipe: str, signals: Path) -> None:
    root = f"data.root={signals}"
    with pytest.raises(ConfigError, match=r"its patches are \[16\] of 1 channel\(s\), the run's \[4\] of 1"):
        probe_run(run, [root], on="signal")
    with pytest.raises(ConfigError, match=r"encoder\.depth: 4 against 3: the networks are the run's"):
        probe_run(run, [root, "encoder.depth=3"], on=recipe)
    with pytest.raises(ConfigError, match=r"--on .*probe\.layer: 4 of an encoder with 2 blocks"):
        probe_run(run, [root, "probe.layer=4"], on=recipe)


@pytest.mark.parametrize(("grid", "wanted"), [((8,), (4,)), ((64, 8), (32, 8)), ((4, 6, 6), (8, 3, 6))])
def test_positions_are_interpolated_on_grids_of_every_rank(grid: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    table = torch.stack([axis.flatten() for axis in torch.meshgrid(*map(torch.arange, grid), indexing="ij")], 1).float()
    found = resized_position(table, grid, wanted)  # of coordinates, so that the result is known
    assert found.shape == (int(np.prod(wanted)), len(grid))
    middle = found.mean(0)
    assert torch.allclose(middle, torch.tensor([(n - 1) / 2 for n in grid]), atol=0.05)
    assert resized_position(table, grid, grid) is table


def test_an_encoder_on_another_grid_keeps_all_it_has_learned() -> None:
    encoder = build_encoder(load_config("digits-tiny"))  # 16 x 16, patch 4
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder.change_grid(Geometry(channels=1, input=(16, 8), patch=(4, 4)))
    assert encoder(torch.zeros(2, 1, 16, 8)).z.shape == (2, 8, 96)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert torch.equal(encoder.position, resized_position(sincos_position((4, 4), 96), (4, 4), (4, 2)))


def write_item(path: Path, kind: str, shade: int) -> None:
    """A file that shows, or sounds, one of two classes."""
    random = np.random.default_rng(shade + len(path.name))
    pictures = [np.clip(random.integers(shade, shade + 40, (32, 32, 3)), 0, 255).astype(np.uint8) for _ in range(12)]
    if kind == "image":
        Image.fromarray(pictures[0]).save(path.with_suffix(".png"))
    elif kind == "video":
        write_pictures(path.with_suffix(".mkv"), pictures)
    else:
        wave = 0.3 * np.sin(np.arange(8_000) * shade / 500) + 0.01 * random.standard_normal(8_000)
        soundfile.write(path.with_suffix(".wav"), wave, 16_000)


@pytest.mark.filterwarnings("ignore::bridle.quantize.CodebookWarning")  # a handful of files has few distinct points
@pytest.mark.parametrize(
    ("kind", "patch", "own", "other"),
    [
        ("image", "[8, 8]", "[32, 32]", "[16, 32]"),
        ("video", "[2, 8, 8]", "[4, 16, 16]", "[8, 16, 16]"),
        ("audio", "[8, 8]", "[32, 16]", "[16, 16]"),
    ],
)
def test_every_modality_is_judged_on_data_of_another_size(
    small: Small, tmp_path: Path, kind: str, patch: str, own: str, other: str
) -> None:
    for split, count in (("train", 5), ("test", 2)):
        for name, shade in (("dark", 20), ("light", 180)):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for n in range(count):
                write_item(tmp_path / "data" / split / name / f"{n}", kind, shade)
    recipe = tmp_path / "other.yaml"
    channels = 1 if kind == "audio" else 3
    geometry = f"{{channels: {channels}, input: {other}, patch: {patch}}}"
    recipe.write_text(f"extends: {kind}\nname: other\ngeometry: {geometry}\nruntime: {{threads: 1}}\n")
    sizes = (f"geometry.input={own}", f"geometry.patch={patch}")
    config = small(f"data.root={tmp_path / 'data'}", *sizes, "data.workers=0", recipe=kind)
    folder = write_run(tmp_path / "run", config)
    path = knn_run(folder, [f"data.root={tmp_path / 'data'}", "data.workers=0"], on=str(recipe))
    found = json.loads(path.read_text())
    assert list(found["protocol"]["inputs"]["geometry"]["input"]) == json.loads(other)
    assert found["evaluations"][0]["probe"]["test_items"] == 4
