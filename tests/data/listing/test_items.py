"""What can be read besides files: tar shards, parts of recordings; and a long recording takes no more memory."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from small_models import SIZES, build_model

import bridle
from bridle.config import load_config
from bridle.console import ProgressLine
from bridle.data.listing.items import Item, Items, find_inputs
from bridle.errors import DataError, UsageError
from bridle.infer.model import Model
from bridle.infer.write import Options, Written, tokenize_inputs

RATE = 16_000


@pytest.fixture(scope="module")
def sound_model() -> Model:
    """Windows of 64 frames of 10 ms, patches of 16×16: 4×2 tokens."""
    shape = ("geometry.input=[64, 32]", "geometry.patch=[16, 16]", "quantizer.codes=16", "decoder.kind=plain")
    return build_model(load_config("audio", [*SIZES, *shape]))


@pytest.fixture(scope="module")
def picture_model() -> Model:
    shape = ("geometry.input=[8, 8]", "geometry.patch=[4, 4]", "quantizer.codes=16", "decoder.kind=plain")
    return build_model(load_config("image", [*SIZES, *shape]))


def tokenize(model: Model, named: Path | str, out: Path, **options: int) -> Written:
    progress = ProgressLine(io.StringIO())
    return tokenize_inputs(model, [str(named)], out, options=Options(batch=2, **options), progress=progress)  # type: ignore[arg-type]


def write_sound(path: Path, seconds: float, rate: int = RATE, channels: int = 1) -> None:
    wave = 0.1 * np.random.default_rng(round(seconds * 10)).standard_normal((round(seconds * rate), channels))
    soundfile.write(path, wave, rate)


def pack(shard: Path, *files: Path, **more: bytes) -> None:
    with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as archive:
        for file in files:
            archive.add(file, arcname=file.name)
        for name, content in more.items():
            member = tarfile.TarInfo(name.replace("_", "."))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_members_of_shards_have_the_codes_of_their_files(sound_model: Model, tmp_path: Path) -> None:
    for name, seconds in (("a.wav", 1.0), ("b.flac", 2.1)):
        write_sound(tmp_path / name, seconds)
    (tmp_path / "shards").mkdir()
    pack(tmp_path / "shards" / "0.tar", tmp_path / "a.wav", a_cls=b"3", notes_txt=b"-")
    pack(tmp_path / "shards" / "1.tar", tmp_path / "b.flac")
    for named in (tmp_path / "shards", f"{tmp_path}/shards/*.tar"):
        tokenize(sound_model, named, tmp_path / "c.npz", overwrite=True, workers=1)
        found = list(bridle.read_codes(tmp_path / "c.npz"))
        assert [name for name, _ in found] == [f"{tmp_path}/shards/0.tar/a.wav", f"{tmp_path}/shards/1.tar/b.flac"]
        for name, codes in found:
            expected = sound_model.tokenize_file(tmp_path / Path(name).name)
            assert np.array_equal(codes.codes, expected.codes)
            assert np.array_equal(codes.times, expected.times)


def test_pictures_in_a_shard_too_and_damage_is_listed(picture_model: Model, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(tmp_path / name)
    pack(tmp_path / "s.tar", tmp_path / "a.png", tmp_path / "b.png")
    whole = (tmp_path / "s.tar").read_bytes()
    (tmp_path / "s.tar").write_bytes(whole[: 512 + (tmp_path / "a.png").stat().st_size + 100])
    written = tokenize(picture_model, tmp_path / "s.tar", tmp_path / "c.npz")
    assert (written.files, written.failed) == (1, 1)
    assert written.quarantine is not None
    bad = json.loads(written.quarantine.read_text())
    assert bad["path"] == str(tmp_path / "s.tar")
    assert "is damaged at byte" in bad["reason"]
    pack(tmp_path / "other.tar", x_txt=b"-")
    with pytest.raises(DataError, match=r"other\.tar' holds no \.jpg"):
        tokenize(picture_model, tmp_path / "other.tar", tmp_path / "d.npz")


def test_parts_of_a_recording_are_items_of_their_own(sound_model: Model, tmp_path: Path) -> None:
    write_sound(tmp_path / "talk.wav", 5.0)
    wave, _ = soundfile.read(tmp_path / "talk.wav")
    soundfile.write(tmp_path / "cut.wav", wave[RATE : round(2.5 * RATE)], RATE)
    (tmp_path / "list.jsonl").write_text(
        '{"path": "talk.wav", "start": 1, "end": 2.5}\n{"path": "talk.wav", "start": 1, "end": 2.5}\n'
        '{"path": "talk.wav", "start": 7}\n{"path": "talk.wav"}\n'
    )
    written = tokenize(sound_model, tmp_path / "list.jsonl", tmp_path / "c.npz")
    assert (written.files, written.failed) == (2, 1)  # one row is there twice
    assert written.quarantine is not None
    assert "holds no samples at 7 s" in written.quarantine.read_text()
    (name, part), (_, whole) = bridle.read_codes(tmp_path / "c.npz")
    assert name == f"{tmp_path}/talk.wav#t=1,2.5"
    expected = sound_model.tokenize_file(tmp_path / "cut.wav")
    assert np.array_equal(part.codes, expected.codes)
    assert part.times is not None and expected.times is not None and whole.times is not None
    np.testing.assert_allclose(part.times, expected.times + 1.0)
    assert whole.times[0] == 0.0


def test_files_of_other_kinds_in_a_folder_are_counted(picture_model: Model, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "b.xyz").write_text("x")
    found = find_inputs([str(tmp_path)], reader=picture_model.reader, stdin=None)
    assert [item.path.name for item in found.items] == ["a.png"]
    assert found.notes == (f"left out in '{tmp_path}': 1 of other kinds.",)


def test_parts_of_pictures_make_no_sense(picture_model: Model, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,start,end\na.png,1,2\n")
    with pytest.raises(UsageError, match=r"gives a start or end in seconds, but this model reads .* no time axis"):
        tokenize(picture_model, tmp_path / "list.csv", tmp_path / "c.npz")


def test_items_come_back_from_their_flat_arrays(sound_model: Model, tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", 1.0)
    pack(tmp_path / "s.tar", tmp_path / "a.wav")
    member = find_inputs([str(tmp_path / "s.tar")], reader=sound_model.reader, stdin=None).items[0]
    items = [Item(Path("a b/ü.wav")), Item(Path("a.wav"), (1.5, None)), member, Item(Path("a.wav"), (0.0, 2.0)), member]
    assert list(Items(items)) == items
    assert [item.name for item in items[:2]] == ["a b/ü.wav", "a.wav#t=1.5"]
    assert items[3].stamp() == (-1, 0)
    assert items[2].stamp()[0] == (tmp_path / "s.tar").stat().st_size


def test_all_channels_are_averaged_and_unlikely_rates_refused(sound_model: Model, tmp_path: Path) -> None:
    write_sound(tmp_path / "two.wav", 1.0, channels=2)
    both, _ = soundfile.read(tmp_path / "two.wav", dtype="float32")
    soundfile.write(tmp_path / "one.wav", both.mean(1), RATE, subtype="FLOAT")
    one, two = (sound_model.tokenize_file(tmp_path / f"{name}.wav") for name in ("one", "two"))
    assert (one.codes == two.codes).mean() > 0.95  # rounding to 16 bits aside
    write_sound(tmp_path / "slow.wav", 60.0, rate=5)
    with pytest.raises(DataError, match=r"says its sample rate is 5 Hz, which is not believable"):
        sound_model.tokenize_file(tmp_path / "slow.wav")


class Watching(ProgressLine):
    """Notes the most memory seen while a job goes on."""

    peak = 0

    def show(self, text: str, short: str, *, final: bool = False) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.peak = max(self.peak, resident)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_ten_minutes_take_no_more_memory_than_two(sound_model: Model, tmp_path: Path) -> None:
    random, peaks = np.random.default_rng(0), []
    for minutes in (2, 10):
        with soundfile.SoundFile(tmp_path / "long.wav", "w", RATE, 1, "PCM_16") as file:
            for _ in range(minutes):
                file.write(0.1 * random.standard_normal(60 * RATE))
        progress, out = Watching(io.StringIO()), tmp_path / f"{minutes}.npz"
        written = tokenize_inputs(sound_model, [str(tmp_path / "long.wav")], out, progress=progress)
        peaks.append(progress.peak)
        assert written.rows == pytest.approx(minutes * 60 * 12.5, rel=0.01)
    assert peaks[0] > 0
    assert peaks[1] < peaks[0] + 8 * 2**20  # the sound alone has 37 MB, its features 8


def test_token_times_are_those_of_files(sound_model: Model, tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", 0.8)
    found = sound_model.tokenize_file(tmp_path / "a.wav")
    times = sound_model.token_times
    assert times is not None and found.times is not None
    np.testing.assert_allclose(times, [0, 0, 0.16, 0.16, 0.32, 0.32, 0.48, 0.48])
    np.testing.assert_allclose(found.times[:8], times)
    assert torch.equal(torch.from_numpy(sound_model.token_positions), torch.from_numpy(found.positions[:8]).long())
