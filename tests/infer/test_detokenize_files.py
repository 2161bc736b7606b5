"""Detokenizing files: what cannot be decoded is refused before anything is written; media are written in pieces."""

from __future__ import annotations

import json
import shutil
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from conftest import SMALL
from forked import bridle
from PIL import Image
from run_folders import StopAt, write_run
from safetensors.torch import load_file

import bridle as package
from bridle.config import load_config
from bridle.data.audio.logmel import LogMel
from bridle.errors import BridleError, Interrupted, UsageError
from bridle.evaluate.reconstruction.media import Media, write_array, write_gif, write_sound, write_video
from bridle.geometry import Geometry
from bridle.infer import detokenize_files
from bridle.infer import detokenizer_command as command
from bridle.infer.detokenize_files import frame_rate
from bridle.infer.model import load
from bridle.infer.write import Options, tokenize_inputs
from bridle.runs.folder import RunFolder
from bridle.seeding import generator

SHORT = ["detokenizer.steps=6", "detokenizer.items=8", "detokenizer.warmup_steps=2", "max_steps=null"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits run of 16 tokens with a detokenizer of 6 steps, and codes of two pictures in codes.npz beside it."""
    place = tmp_path_factory.mktemp("detokenize")
    folder = write_run(place / "run", load_config("digits-tiny", list(SMALL)))
    command.detokenizer_run(folder, SHORT)
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8)).astype(np.uint8)
        (place / "in").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(place / f"in/{number}.png")
    tokenize_inputs(load(folder), [str(place / "in")], place / "codes.npz", stages=None, options=Options(workers=0))
    return folder


def spoiled(run: Path, out: Path, **changes: Callable[[Any], Any]) -> Path:
    """codes.npz with some of its arrays changed."""
    with np.load(run.parent / "codes.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, change in changes.items():
        arrays[name] = change(arrays[name])
    np.savez(out, **arrays)
    return out


def header_with(**values: Any) -> Callable[[Any], Any]:
    return lambda header: np.array(json.dumps({**json.loads(str(header)), **values}))


def put(row: int, stage: int, value: int) -> Callable[[Any], Any]:
    def change(codes: Any) -> Any:
        codes = codes.copy()
        codes[row, stage] = value
        return codes

    return change


BAD = {
    "out of range": ({"codes": put(20, 2, 77)}, "code 77 of stage 3 at token 4 is not below its codebook's size, 16"),
    "another model": ({"header": header_with(model="0123456789abcdef")}, "come from another model"),
    "a stage missing in the middle": (
        {"header": header_with(codebook_sizes=[16, 16, 8, 16])},
        "stages can be left out at the end only",
    ),
    "a stage missing in the middle, and a header without it": (
        {
            "codes": lambda codes: np.ascontiguousarray(codes[:, [0, 2, 3]]),
            "header": header_with(codebook_sizes=[16, 16, 16]),
        },
        "a stage or some codes are missing or were changed",
    ),
    "codes that were changed": ({"codes": lambda codes: (codes + 1) % 16}, "or were changed"),
    "in another order": ({"positions": lambda positions: positions[::-1].copy()}, "tokens are not in order"),
    "a window missing": ({"positions": lambda positions: positions + np.array([9, 0])}, "a window of them is missing"),
    "fewer columns than stages": (
        {"codes": lambda codes: np.ascontiguousarray(codes[:, [0, 2, 3]])},
        "whole numbers of 4 stages",
    ),
    "not a number": ({"codes": lambda codes: np.full(codes.shape, np.nan)}, "whole numbers of 4 stages, got float64"),
    "zero length": (
        {"starts": lambda starts: np.array([0, 0, starts[-1]]), "positions": lambda p: p},
        "has no codes",
    ),
    "beyond the grid": ({"positions": put(3, 1, 9)}, "positions go beyond the grid"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_codes_get_one_line_and_nothing_is_written(run: Path, tmp_path: Path, name: str) -> None:
    changes, message = BAD[name]
    codes = spoiled(run, tmp_path / "bad.npz", **changes)
    with pytest.raises(BridleError, match=message) as caught:
        package.detokenize(run, codes, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_command_says_it_in_one_line_too(run: Path, tmp_path: Path) -> None:
    codes = spoiled(run, tmp_path / "bad.npz", codes=put(0, 0, 200))
    done = bridle("detokenize", run, codes, "--out", tmp_path / "out")
    assert done.code == 65
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_detokenizer_writes_nothing(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("detokenizer"))
    with pytest.raises(UsageError, match="train one with `bridle detokenizer"):
        package.detokenize(tmp_path / "run", run.parent / "codes.npz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stage_that_is_missing_in_an_array_is_named(run: Path) -> None:
    codes = torch.zeros(1, 16, 4, dtype=torch.long)
    codes[..., 1] = -1
    with pytest.raises(UsageError, match="a code of stage 2 is"):
        load(run).decode_to_input(codes)


def test_detokenize_writes_what_decode_to_input_gives(run: Path, tmp_path: Path) -> None:
    model = load(run)
    written = package.detokenize(model, run.parent / "codes.npz", tmp_path / "out", stages=2)
    (_, found), *_ = package.read_codes(run.parent / "codes.npz")
    expected = model.decode_to_input(found.codes[None], stages=2)[0, 0].clamp(0, 1)
    pixels = np.asarray(Image.open(written[0]))
    np.testing.assert_array_equal(pixels, (expected * 255).round().numpy().astype(np.uint8))


def test_a_long_file_read_window_by_window_is_the_file_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", load_config("sounds-tiny", list(SMALL)))
    command.detokenizer_run(run, [*SHORT[:-1], "max_steps=1"])
    (tmp_path / "in").mkdir()
    for name, seconds in (("long", 6.3), ("short", 0.2)):
        wave = 0.1 * torch.randn(int(16_000 * seconds), generator=generator(name))
        soundfile.write(tmp_path / f"in/{name}.wav", wave.numpy(), 16_000)
    model, decoded = load(run), list[bytes]()
    for suffix in (".npz", ".safetensors", ".parquet", ""):
        codes = tmp_path / f"codes{suffix}"
        tokenize_inputs(model, [str(tmp_path / "in")], codes)
        blocks = [columns for _, columns in detokenize_files.numbered_blocks(package.read_codes(codes), model.geometry)]
        assert len(blocks) == 5 and max(len(block["codes"]) for block in blocks) == 2 * model.geometry.tokens
        pieces = package.detokenize(model, codes, tmp_path / "pieces")
        assert [path.name for path in pieces] == ["long.wav", "short.wav"]
        decoded += [path.read_bytes() for path in pieces]
    monkeypatch.setattr(detokenize_files, "numbered_blocks", lambda stored, geometry: stored.blocks(None))
    whole = package.detokenize(model, tmp_path / "codes.npz", tmp_path / "whole")
    assert decoded == 4 * [path.read_bytes() for path in whole]


def test_a_file_is_held_window_by_window() -> None:
    geometry, blocks, stages = Geometry(1, (8, 4), (2, 2)), 200, 4096  # blocks of a window, 32 kB each

    def columns() -> Iterator[dict[str, Any]]:
        for number in range(blocks):
            positions = np.indices((4, 2)).reshape(2, -1).T + np.array([4 * number, 0])
            yield {"codes": np.zeros((8, stages), np.uint8), "positions": positions}

    tracemalloc.start()
    starts = [window.start for window in detokenize_files.windows_of(columns(), 4 * blocks, geometry)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert starts == list(range(0, 4 * blocks - 3, 2))
    assert peak < 0.2 * blocks * 8 * stages


def tensors(run: Path) -> dict[str, torch.Tensor]:
    (end,) = RunFolder(run).detokenizer(1).encoder_checkpoints(ends=True)
    return load_file(end / "model.safetensors")


def test_an_interrupted_training_is_the_uninterrupted_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "run"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("detokenizer"))
    monkeypatch.setattr(command, "open_trackers", lambda log: [StopAt(("detokenizer", 1, 3))])
    with pytest.raises(Interrupted, match="saved at step 3"):
        command.detokenizer_run(again, SHORT)
    monkeypatch.undo()
    command.detokenizer_run(again, SHORT)
    whole, parts = tensors(run), tensors(again)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    results = [json.loads((folder / "detokenizer/iter1/result.json").read_text()) for folder in (run, again)]
    assert results[0] == results[1]


def test_max_steps_caps_the_detokenizer_too(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("detokenizer"))
    command.detokenizer_run(again, [*SHORT[:-1], "max_steps=2"])
    (end,) = RunFolder(again).detokenizer(1).encoder_checkpoints(ends=True)
    assert end.name.endswith("00000002-end")


def test_the_detokenizer_travels_with_an_export(run: Path, tmp_path: Path) -> None:
    model = load(run)
    model.save_pretrained(tmp_path / "exported")
    exported = load(tmp_path / "exported")
    codes = torch.randint(16, (2, 16, 4), generator=generator("codes"))
    assert torch.equal(model.decode_to_input(codes), exported.decode_to_input(codes))
    assert exported.fingerprint == model.fingerprint
    exported.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").decode_to_input(codes), model.decode_to_input(codes))
    text = "".join(path.read_text() for path in (tmp_path / "exported").rglob("*.yaml"))
    assert str(tmp_path) not in text and str(run) not in text


def counted(pieces: int, shape: tuple[int, ...], alive: list[int]) -> Iterator[torch.Tensor]:
    """Pieces of which `alive` notes how many existed together."""
    held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    for number in range(pieces):
        piece = torch.full(shape, 0.1 + 0.8 * number / pieces)
        held.add(piece)
        alive.append(len(held))
        yield piece
        del piece


FRONT = LogMel(mels=8)


@pytest.mark.parametrize(
    ("write", "shape", "patch"),
    [
        (write_video, (1, 2, 15, 18), 2),
        (write_gif, (1, 2, 15, 18), 2),
        (write_array, (2, 3, 4), 3),
        (lambda pieces, path, media: write_sound(pieces, path, media, front=FRONT), (1, 400, 8), 400),
    ],
)
def test_long_files_are_written_piece_by_piece(tmp_path: Path, write: Any, shape: tuple[int, ...], patch: int) -> None:
    alive: list[int] = []
    write(counted(12, shape, alive), tmp_path / "out", Media(12 * patch))
    assert len(alive) == 12
    assert max(alive) <= 3


def test_clips_are_mp4_or_gif_with_all_frames(tmp_path: Path) -> None:
    clip = torch.rand(3, 10, 15, 18, generator=generator("clip"))
    write_video(iter(clip.split(4, dim=1)), tmp_path / "a.mp4", Media(10, frame_rate=7.5))
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate or 0) == 7.5  # every second frame of 15
    assert len(frames) == 10 and frames[0].shape == (16, 18, 3)
    write_gif(iter(clip[:1].split(4, dim=1)), tmp_path / "a.gif", Media(10, frame_rate=5))
    with Image.open(tmp_path / "a.gif") as picture:
        assert (picture.n_frames, picture.info["loop"], picture.info["duration"]) == (10, 0, 200)
        picture.seek(7)
        np.testing.assert_array_equal(picture.convert("L"), (clip[0, 7] * 255).round().numpy())


def test_arrays_are_joined_along_the_first_axis(tmp_path: Path) -> None:
    x = torch.randn(2, 7, 3, generator=generator("array"))
    write_array(iter(x.split(3, dim=1)), tmp_path / "a.npy", Media(7))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), x.numpy())


def test_a_sound_in_pieces_is_the_sound_of_the_whole(tmp_path: Path) -> None:
    features = FRONT(0.1 * torch.randn(16_000 * 3, generator=generator("wave")))[None]  # (1, 298, 8)
    for name, size in (("whole", 298), ("pieces", 37)):
        write_sound(iter(features.split(size, dim=1)), tmp_path / f"{name}.wav", Media(298), front=FRONT)
    whole, pieces = (soundfile.read(tmp_path / f"{name}.wav")[0] for name in ("whole", "pieces"))
    np.testing.assert_array_equal(whole, pieces)


def test_the_frame_rate_comes_from_the_times_of_the_tokens() -> None:
    geometry = Geometry(3, (8, 4, 4), (2, 4, 4))
    columns = {"positions": np.array([[0, 0, 0], [1, 0, 0]]), "times": np.array([0.0, 0.25])}
    assert frame_rate(columns, geometry) == 8.0
    assert frame_rate({"positions": columns["positions"][:1]}, geometry) == 8.0
