"""Models of the embedded data read files: an item that was written to a file comes back as the model knows it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from conftest import SMALL
from forked import bridle
from PIL import Image
from run_folders import write_run
from torch import Tensor

import bridle as package
from bridle.config import load_config
from bridle.data.build import open_data, open_reader
from bridle.data.embedded.sets import SoundSource
from bridle.data.embedded.sounds import RATE

RECIPES = {"patterns-tiny": ".png", "moving-patterns-tiny": ".mkv", "sounds-tiny": ".wav"}


def grey_bytes(x: Tensor) -> np.ndarray:
    return (x * 255).round().to(torch.uint8).numpy()


def write_item(recipe: str, place: Path, index: int) -> Path:
    """A test item of a recipe's data as a file."""
    source = open_data(load_config(recipe)).test
    assert source is not None
    path = place / f"{index}{RECIPES[recipe]}"
    x = source.load(index, None).x[0]
    if path.suffix == ".png":
        Image.fromarray(grey_bytes(x)).save(path)
    elif path.suffix == ".wav":
        assert isinstance(source, SoundSource)
        soundfile.write(path, source.listen(index).wave.numpy(), RATE, subtype="FLOAT")
    else:  # FFV1 loses nothing
        with av.open(str(path), "w") as container:
            stream = container.add_stream("ffv1", rate=Fraction(12))
            stream.height, stream.width, stream.pix_fmt = x.shape[1], x.shape[2], "gray"
            for frame in grey_bytes(x):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="gray")))
            container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_file_of_an_item_is_read_as_that_item(recipe: str, tmp_path: Path) -> None:
    config = load_config(recipe)
    source = open_data(config).test
    assert source is not None
    (window,) = open_reader(config).windows(write_item(recipe, tmp_path, 5))
    assert window.valid is None
    # Bytes are 1/255 apart; log-mel features are computed from the same samples.
    torch.testing.assert_close(window.x, source.load(5, None).x, atol=0.51 / 255, rtol=0)


def test_a_short_recording_is_padded_and_a_long_one_has_several_windows(tmp_path: Path) -> None:
    reader = open_reader(load_config("sounds-tiny"))
    for name, seconds in (("short.wav", 0.3), ("long.wav", 2.5)):
        soundfile.write(tmp_path / name, 0.1 * np.random.default_rng(0).standard_normal(int(seconds * RATE)), RATE)
    (short,) = reader.windows(tmp_path / "short.wav")
    assert short.valid is not None and 0 < int(short.valid.sum()) < len(short.valid)
    assert [window.start for window in reader.windows(tmp_path / "long.wav")] == [0, 96, 192]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_for_files_runs_on_a_run_of_embedded_data(recipe: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", load_config(recipe, [*SMALL, "detokenizer.items=8"]))
    (tmp_path / "files").mkdir()
    first, *_ = [write_item(recipe, tmp_path / "files", index) for index in range(3)]
    for words in (
        "tokenize run files --out codes.npz",
        "tokenize run files --out again.npz",
        "codes diff codes.npz again.npz",
        "embed run files --out pooled.npz",
        "index run files --out index",
        f"search index files/{first.name} --html hits.html",
        "sequences codes.npz --out sequences --pattern delayed",
        "detokenizer run detokenizer.steps=2 detokenizer.warmup_steps=1",
        "detokenize run codes.npz --out decoded",
    ):
        done = bridle(*words.split(), cwd=tmp_path)
        assert done.code == 0, words + done.err
    assert len(list((tmp_path / "decoded").iterdir())) == 3
    x = open_data(load_config(recipe)).test.load(0, None).x  # type: ignore[union-attr]
    (_, codes), *_ = package.read_codes(tmp_path / "codes.npz")
    assert float((codes.codes == package.load(run).tokenize(x[None])[0].numpy()).mean()) > 0.95
    assert (tmp_path / "hits.html").read_text().count("data:") >= 3
