"""Recordings as samples: crops, views, padding, augmentation, the cache, bad files and single files of any length."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from functools import partial
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from bridle.config.data_schema import AugmentConfig
from bridle.data.audio import source as audio_source
from bridle.data.audio.decode import EXTENSIONS, read_waveform
from bridle.data.audio.logmel import FLOOR, LogMel
from bridle.data.audio.source import RecordingReader, Recordings
from bridle.data.file_source import open_splits
from bridle.data.listing.columns import PathList
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import DataListing, Listing
from bridle.data.loading.loader import Loader, load_checked, sequential
from bridle.data.loading.mixing import Mixed
from bridle.data.sources import Viewed
from bridle.errors import ConfigError, DataError
from bridle.geometry import Geometry

RATE = 16_000
FRONT = LogMel(mels=8)
GEOMETRY = Geometry(1, (16, 8), (4, 4))  # 16 frames: 400 + 15 · 160 samples
RECORDINGS = partial(Recordings, geometry=GEOMETRY, front=FRONT, augment=AugmentConfig())
SAMPLES = 2_800


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def samples_of(frames: int) -> int:
    return 400 + (frames - 1) * 160


def write(path: Path, *waves: np.ndarray, rate: int = RATE) -> PathList:
    for i, wave in enumerate(waves):
        soundfile.write(path / f"{i}.wav", wave, rate, subtype="FLOAT")
    return PathList(path, [f"{i}.wav" for i in range(len(waves))])


def source(  # type: ignore[no-untyped-def]
    paths: PathList,
    *,
    views: int = 1,
    trim: bool = False,
    cache_mb: int = 0,
    geometry: Geometry = GEOMETRY,
    **augment: object,
):
    return Recordings(
        Listing(paths, None),
        None,
        geometry=geometry,
        front=FRONT,
        augment=AugmentConfig(**augment),  # type: ignore[arg-type]
        views=views,
        trim=trim,
        cache_mb=cache_mb,
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole(paths: PathList, i: int = 0) -> torch.Tensor:
    """All features of a file, the oracle of most tests here."""
    features: torch.Tensor = FRONT(read_waveform(paths[i], rate=RATE))
    return features


def first_frame(x: torch.Tensor, features: torch.Tensor) -> int:
    """Where in a clip's features a sample was cut out."""
    errors = [float((features[at : at + 16] - x[0]).abs().max()) for at in range(len(features) - 15)]
    assert min(errors) < 1e-4
    return int(np.argmin(errors))


@pytest.mark.parametrize("cache_mb", [0, 1])
def test_evaluation_cuts_out_the_centre(tmp_path: Path, cache_mb: int) -> None:
    paths = write(tmp_path, noise(samples_of(36)))
    sample = source(paths, cache_mb=cache_mb).load(0, None)
    assert (sample.x.shape, sample.x.dtype, sample.valid, sample.label) == ((1, 16, 8), torch.float32, None, None)
    assert first_frame(sample.x, whole(paths)) == 10


@pytest.mark.parametrize("cache_mb", [0, 1])
@pytest.mark.parametrize("change", [{}, {"gain_db": 1e-6}])
def test_training_cuts_out_every_place(tmp_path: Path, cache_mb: int, change: dict[str, float]) -> None:
    paths = write(tmp_path, noise(samples_of(19)))
    clips = source(paths, cache_mb=cache_mb, **change)
    starts = [first_frame(clips.load(0, seeded(seed)).x, whole(paths)) for seed in range(40)]
    assert set(starts) == {0, 1, 2, 3}
    assert starts == [first_frame(clips.load(0, seeded(seed)).x, whole(paths)) for seed in range(40)]


def test_augmentation_switched_off_is_evaluation(tmp_path: Path) -> None:
    clips = source(write(tmp_path, noise(samples_of(36))), enabled=False, roll=True, gain_db=6.0)
    assert torch.equal(clips.load(0, seeded()).x, clips.load(0, None).x)


def test_views_reach_from_the_beginning_to_the_end(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(samples_of(36)))
    clips = source(paths, views=3)
    assert isinstance(clips, Viewed)
    assert [first_frame(clips.load_view(0, view).x, whole(paths)) for view in range(3)] == [0, 10, 20]
    assert first_frame(source(paths).load_view(0, 0).x, whole(paths)) == 10


@pytest.mark.parametrize(("frames", "columns"), [(15, 4), (14, 4), (13, 3), (6, 2), (5, 1), (2, 1)])
def test_a_short_clip_is_padded_with_the_floor_and_marked(tmp_path: Path, frames: int, columns: int) -> None:
    paths = write(tmp_path, noise(samples_of(frames)))
    sample = source(paths).load(0, None)
    assert torch.equal(sample.x[0, :frames], whole(paths))
    assert (sample.x[0, frames:] == log(FLOOR)).all()
    assert sample.valid is not None
    # A token is a patch of 4 frames by 4 bands; both bands of a column of frames are real or not.
    assert sample.valid.tolist() == [True] * (2 * columns) + [False] * (8 - 2 * columns)


@pytest.mark.parametrize("samples", [1, 399, 400])
def test_a_clip_without_half_a_patch_is_refused(tmp_path: Path, samples: int) -> None:
    clips = source(write(tmp_path, noise(samples)))
    with pytest.raises(DataError, match=r"0\.wav' is too short: [01] frames, but half a patch of 4 needs 2 \(0.035 s"):
        clips.load(0, None)


def test_silence_is_a_sample_like_any_other(tmp_path: Path) -> None:
    paths = write(tmp_path, np.zeros(SAMPLES, np.float32))
    assert (source(paths).load(0, None).x == log(FLOOR)).all()
    assert torch.isfinite(source(paths, noise_db=10.0, gain_db=6.0, time_mask=4).load(0, seeded()).x).all()


@pytest.mark.parametrize("cache_mb", [0, 8])
@pytest.mark.parametrize("change", [{}, {"gain_db": 1e-6}])
def test_trimming_shows_what_lies_between_the_silence_at_the_ends(
    tmp_path: Path, cache_mb: int, change: dict[str, float]
) -> None:
    sound = noise(samples_of(20))
    sound[1_000:1_600] = 0.0  # a pause is part of the sound
    faint = np.full(3_000, 0.9 * 2**-15, np.float32)
    padded = np.concatenate([faint, sound, np.zeros(9_000, np.float32)])
    oracle = FRONT(torch.from_numpy(sound))
    clips = source(write(tmp_path, padded), trim=True, cache_mb=cache_mb, views=2, **change)
    for view, first in ((0, 0), (1, 4)):
        torch.testing.assert_close(clips.load_view(0, view).x[0], oracle[first : first + 16])
    torch.testing.assert_close(clips.load(0, None).x[0], oracle[2:18])
    assert torch.equal(clips.listen(0).wave, torch.from_numpy(sound)[320 : 320 + SAMPLES])
    starts = {first_frame(clips.load(0, seeded(seed)).x, oracle) for seed in range(40)}
    assert starts == {0, 1, 2, 3, 4}


def test_trimming_leaves_half_a_patch_of_a_click_and_all_of_a_clip_without_sound(tmp_path: Path) -> None:
    click = np.zeros(RATE, np.float32)
    click[-10] = 0.5
    paths = write(tmp_path, click, np.zeros(RATE, np.float32))
    clips = source(paths, trim=True)
    assert torch.equal(clips.listen(0).wave, torch.from_numpy(click[-samples_of(2) :]))
    sample = clips.load(0, None)
    assert sample.valid is not None and sample.valid.sum() == 2
    assert clips.load(1, None).valid is None


def test_a_recording_too_long_to_decode_whole_is_not_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wave = noise(10 * RATE)
    wave[: 2 * RATE] = 0.0
    paths = write(tmp_path, wave)
    monkeypatch.setattr(audio_source, "LONG", 5.0)
    assert torch.equal(source(paths, trim=True).load(0, None).x, source(paths).load(0, None).x)


def test_only_the_span_of_a_row_is_read(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(RATE))
    twice = PathList(tmp_path, ["0.wav", "0.wav", "0.wav"])
    clips = source(twice)
    clips.spans = [(0.5, 0.6), (0.5, None), (2.0, 3.0)]
    part = read_waveform(paths[0], rate=RATE, start=0.5, seconds=0.1)
    sample = clips.load(0, None)
    assert torch.equal(sample.x[0, :8], FRONT(part))
    assert sample.valid is not None
    assert sample.valid.sum() == 4  # 8 frames are two columns
    assert clips.load(1, None).valid is None
    assert clips.describe(0) == f"{tmp_path}/0.wav [0.5–0.6 s]"
    assert clips.describe(1) == f"{tmp_path}/0.wav [0.5–end s]"
    with pytest.raises(DataError, match="holds no samples at 2 s"):
        clips.load(2, None)


def test_a_long_recording_is_neither_decoded_whole_nor_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, noise(10 * RATE))
    monkeypatch.setattr(audio_source, "LONG", 5.0)
    for change in ({}, {"roll": True}):
        clips = source(paths, cache_mb=8, **change)
        tracemalloc.start()
        x = clips.load(0, seeded()).x
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000  # bytes; block by block, where the whole would be 640,000 and as much again
        first_frame(x, whole(paths))
        assert clips.cache.used == 0


def test_the_cache_saves_reading_and_changes_nothing(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(samples_of(30)))
    for change in ({}, {"roll": True, "gain_db": 6.0, "noise_db": 10.0, "time_mask": 4, "band_mask": 2}):
        fresh, kept = source(paths, **change), source(paths, cache_mb=1, **change)
        before = [fresh.load(0, seeded(seed)).x for seed in range(5)]
        assert all(torch.equal(kept.load(0, seeded(seed)).x, x) for seed, x in enumerate(before))
        assert kept.cache.used > 0
        assert torch.equal(kept.load(0, None).x, fresh.load(0, None).x)
        os.rename(paths[0], tmp_path / "gone.wav")
        assert all(torch.equal(kept.load(0, seeded(seed)).x, x) for seed, x in enumerate(before))
        os.rename(tmp_path / "gone.wav", paths[0])


def test_train_and_test_share_the_cache(tmp_path: Path) -> None:
    paths = write(tmp_path, *[noise(SAMPLES)] * 4)
    found = DataListing(Listing(paths, None), Listing(PathList(tmp_path, ["0.wav"]), None), None)
    splits = open_splits(found, RECORDINGS, cache_mb=10)
    assert isinstance(splits.train, Recordings)
    assert isinstance(splits.test, Recordings)
    assert (splits.train.cache.limit, splits.test.cache.limit) == (8 * 2**20, 2 * 2**20)


def test_roll_turns_the_whole_clip_around(tmp_path: Path) -> None:
    wave = np.zeros(2 * SAMPLES, np.float32)
    wave[:160] = noise(160)  # a click at the beginning of a clip of two samples' length
    clips = source(write(tmp_path, wave), roll=True)
    heard = [int(clips.load(0, seeded(seed)).x[0].mean(1).argmax()) for seed in range(40)]
    assert len(set(heard)) > 8  # it comes at every time
    unrolled = source(clips.paths)
    assert all(int(unrolled.load(0, seeded(seed)).x[0].mean(1).argmax()) < 2 for seed in range(40))


def test_gain_shifts_the_features(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(SAMPLES))
    shifts = [source(paths, gain_db=6.0).load(0, seeded(seed)).x - whole(paths) for seed in range(20)]
    assert all(float(shift.std()) < 1e-3 for shift in shifts)
    decibels = [float(shift.mean()) * 10 / log(10) for shift in shifts]
    assert all(abs(db) <= 6.001 for db in decibels)
    assert max(decibels) - min(decibels) > 6


def test_the_released_gain_shifts_the_features_too(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(SAMPLES))
    shifts = [source(paths, gain_beta=10.0).load(0, seeded(seed)).x - whole(paths) for seed in range(20)]
    gains = [exp(float(shift.mean()) / 2) for shift in shifts]  # of amplitudes
    assert all(0.5 < gain < 1.5 for gain in gains)
    assert max(gains) - min(gains) > 0.2


def test_stripes_are_filled_with_the_mean_of_the_clip(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(samples_of(10)))  # shorter than a sample
    mean = whole(paths).mean()
    changed = [source(paths, time_mask=4, band_mask=2).load(0, seeded(seed)).x[0] for seed in range(20)]
    for x in changed:
        other = x[:10] != whole(paths)
        torch.testing.assert_close(x[:10][other], mean.expand(int(other.sum())))
        assert (x[10:] == log(FLOOR)).all()
    assert any((x[:10] != whole(paths)).any() for x in changed)


def test_frames_and_bands_are_hidden_by_their_own_settings(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(SAMPLES))
    for wide, across in (({"time_mask": 16}, 1), ({"band_mask": 8}, 0)):
        hidden = [source(paths, **wide).load(0, seeded(seed)).x[0] != whole(paths) for seed in range(20)]
        assert all(torch.equal(h.all(across), h.any(across)) for h in hidden)  # whole frames, or whole bands
        assert max(int(h.any(across).sum()) for h in hidden) > 5  # of 16 frames, of 8 bands


def labelled(paths: PathList, labels: list[int] | list[tuple[int, ...]], **augment: object) -> Recordings:
    return Recordings(
        Listing(paths, labels),
        classes=("a", "b", "c"),
        geometry=GEOMETRY,
        front=FRONT,
        augment=AugmentConfig(**augment),  # type: ignore[arg-type]
    )


def test_labels_are_a_class_or_shares(tmp_path: Path) -> None:
    paths = write(tmp_path, noise(SAMPLES), noise(SAMPLES))
    assert labelled(paths, [2, 0]).load(0, None).label == 2
    shares = labelled(paths, [(0, 2), ()])
    assert [shares.load(i, None).label.tolist() for i in (0, 1)] == [[1, 0, 1], [0, 0, 0]]  # type: ignore[union-attr]


def test_two_waveforms_are_mixed_with_their_labels(tmp_path: Path) -> None:
    own, other = noise(SAMPLES), noise(samples_of(10), seed=1)
    clips = labelled(write(tmp_path, own, other), [2, 0], mixup=1.0, mix_space="waveform")
    sample = clips.load_mixed(0, 1, 0.25, seeded())
    mixed = 0.25 * own
    mixed[: len(other)] += 0.75 * other
    torch.testing.assert_close(sample.x[0], FRONT(torch.from_numpy(mixed)), rtol=0, atol=1e-4)
    assert isinstance(sample.label, torch.Tensor)
    assert sample.label.tolist() == [0.75, 0, 0.25]
    assert sample.valid is None
    short = labelled(PathList(tmp_path, ["1.wav", "1.wav"]), [(0, 1), (1,)]).load_mixed(0, 1, 0.25, seeded())
    assert isinstance(short.label, torch.Tensor)
    assert short.label.tolist() == [0.25, 1, 0]
    assert short.valid is not None
    assert int(short.valid.sum()) == 6  # 10 frames: three columns, the third of them half


def test_mixing_by_config_uses_the_waveforms(tmp_path: Path) -> None:
    clips = labelled(write(tmp_path, noise(SAMPLES), noise(SAMPLES, 1)), [2, 0], mixup=1.0, mix_space="waveform")
    label = Mixed(clips, clips.augment).load(0, seeded()).label
    assert isinstance(label, torch.Tensor)
    assert float(label.sum()) == pytest.approx(1)


def test_a_source_travels_to_workers_without_its_cache(tmp_path: Path) -> None:
    clips = source(write(tmp_path, noise(samples_of(3_000))), cache_mb=8)
    x = clips.load(0, None).x
    sent = pickle.dumps(clips)
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent).load(0, None).x, x)


@pytest.mark.parametrize(
    ("geometry", "why"),
    [
        (Geometry(1, (16, 16), (4, 4)), "16 mel bands, but the front end makes 8"),
        (Geometry(3, (16, 8), (4, 4)), "recordings have 1"),
        (Geometry(1, (16,), (4,)), r"need \[frames, mel bands\]"),
    ],
)
def test_a_geometry_that_does_not_fit_is_refused(tmp_path: Path, geometry: Geometry, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        source(PathList(tmp_path), geometry=geometry)


# Single files of any length.


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("seconds", [0.05, 0.3, 12.3, 25.0])
def test_the_windows_of_a_file_are_its_features_one_after_another(tmp_path: Path, rate: int, seconds: float) -> None:
    path = write(tmp_path, noise(round(seconds * rate)), rate=rate)
    reader = RecordingReader(geometry=GEOMETRY, front=FRONT)
    windows = list(reader.windows(path[0]))
    features = whole(path)
    assert [window.start for window in windows] == list(range(0, 16 * len(windows), 16))
    joined = torch.cat([window.x[0] for window in windows])
    n = min(len(features), len(joined))
    assert len(features) - n < 2  # only a rest of less than half a patch is left out
    torch.testing.assert_close(joined[:n], features[:n], rtol=0, atol=1e-4)
    assert (joined[n:] == log(FLOOR)).all()
    assert all(window.valid is None for window in windows[:-1])
    assert reader.frame_seconds == 0.01
    assert {".wav", ".mp3", ".mp4", ".mkv"} <= set(reader.extensions)


def test_a_long_file_is_read_in_the_memory_of_a_short_one(tmp_path: Path) -> None:
    reader = RecordingReader(geometry=Geometry(1, (1_024, 8), (16, 8)), front=FRONT)
    peaks = []
    for minutes in (1, 5):
        soundfile.write(tmp_path / "a.flac", np.zeros(minutes * 60 * RATE, np.int16), RATE)
        tracemalloc.start()
        count = sum(1 for _ in reader.windows(tmp_path / "a.flac"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == -(-(minutes * 6_000 - 2) // 1_024)
    assert peaks[1] < 1.2 * peaks[0] < 10_000_000


def test_a_file_too_short_for_any_window_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, noise(500))
    with pytest.raises(DataError, match="too short"):
        list(RecordingReader(geometry=GEOMETRY, front=FRONT).windows(path[0]))


# Bad input: pretraining goes on and tells, evaluation stops and says which file.


def truncated(path: Path) -> None:
    soundfile.write(path, noise(RATE), RATE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def not_finite(path: Path) -> None:
    wave = noise(SAMPLES)
    wave[100] = np.nan
    soundfile.write(path, wave, RATE, subtype="FLOAT")


BAD = {
    "text.wav": (lambda path: path.write_text("not a sound\n" * 20), "not of this format"),
    "truncated.mp3": (truncated, "truncated"),
    "nothing.wav": (lambda path: soundfile.write(path, np.zeros(0), RATE), "holds no samples"),
    "empty.flac": (lambda path: path.touch(), "is empty"),
    "one.wav": (lambda path: soundfile.write(path, np.zeros(1), RATE), "too short"),
    "nan.wav": (not_finite, "not finite"),
    "link.wav": (lambda path: path.symlink_to("nowhere.wav"), "No such file"),
}
GOOD = {
    "eight.wav": lambda path: soundfile.write(path, np.stack([noise(SAMPLES)] * 8, axis=1), RATE),
    "fast.wav": lambda path: soundfile.write(path, noise(12 * SAMPLES), 192_000),
    "plain.wav": lambda path: soundfile.write(path, noise(SAMPLES), RATE),
}


def folder(root: Path) -> Recordings:
    for name, (make, _) in BAD.items():
        make(root / name)  # type: ignore[no-untyped-call]
    for name, good in GOOD.items():
        good(root / name)  # type: ignore[no-untyped-call]
    odd = Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.wav"))
    soundfile.write(root / "odd.wav", noise(SAMPLES), RATE)
    os.rename(root / "odd.wav", odd)
    found = find_data(root=str(root), manifest=None, layout="folders", extensions=EXTENSIONS)
    splits = open_splits(found, RECORDINGS)
    assert isinstance(splits.train, Recordings)
    return splits.train


def test_pretraining_goes_on_and_names_every_bad_file_with_its_reason(tmp_path: Path) -> None:
    clips = folder(tmp_path)
    loader = Loader(source=clips, seed=0, phase="p", batch=12, mean=[0.0], std=[1.0])
    batches = [batch for step in loader.steps(0, 2) for batch in step]
    assert all(batch.x.shape == (12, 1, 16, 8) and torch.isfinite(batch.x).all() for batch in batches)
    bad = {Path(sample.name).name: sample.reason for batch in batches for sample in batch.bad}
    assert set(bad) == set(BAD)
    for name, (_, why) in BAD.items():
        assert why in bad[name], name
        assert name in bad[name]
    shown = {clips.describe(int(i)) for batch in batches for i in batch.index}
    assert {Path(name).name for name in shown} == {*GOOD, r"caf\udce9.wav"}
    json.dumps(sorted(shown)).encode()  # also the odd name can be written


@pytest.mark.parametrize("name", BAD)
def test_evaluation_stops_at_a_bad_file_and_names_it(tmp_path: Path, name: str) -> None:
    BAD[name][0](tmp_path / name)  # type: ignore[no-untyped-call]
    clips = source(PathList(tmp_path, [name]))
    with pytest.raises(DataError, match=name):
        list(sequential(clips, batch=1, mean=[0.0], std=[1.0]))


def test_a_file_missing_from_a_manifest_shows_when_it_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, noise(SAMPLES))
    (tmp_path / "list.csv").write_text("path,label\n0.wav,dog\ngone.wav,cat\n")
    found = find_data(root=None, manifest=str(tmp_path / "list.csv"), layout="auto", extensions=EXTENSIONS)
    train = open_splits(found, RECORDINGS).train
    assert load_checked(train, 0, None).label == 1
    with pytest.raises(DataError, match=r"gone\.wav' cannot be read as sound: No such file"):
        load_checked(train, 1, None)
