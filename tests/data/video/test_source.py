"""Videos as samples: which frames and which part of the picture, in training, in evaluation and for whole files."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from video_files import numbers, write_numbered, write_pictures, write_sound

from bridle.config.data_schema import AugmentConfig
from bridle.data.listing.columns import PathList
from bridle.data.listing.table import Listing
from bridle.data.loading.loader import Loader, sequential
from bridle.data.sources import Reader, Viewed, Views
from bridle.data.video import source as video_source
from bridle.data.video.source import EXTENSIONS, Decoding, VideoReader, Videos
from bridle.errors import ConfigError, DataError
from bridle.geometry import Geometry
from bridle.seeding import generator

GEOMETRY = Geometry(channels=3, input=(4, 16, 16), patch=(2, 8, 8))  # 2 × 2 × 2 tokens
PLAIN = AugmentConfig(crop_scale=(1.0, 1.0), flip=False)
SKY = Path(__file__).parents[4] / "shared/data/sky4"  # beside the repository


def source(
    paths: list[Path],
    *,
    geometry: Geometry = GEOMETRY,
    stride: int = 3,
    augment: AugmentConfig = PLAIN,
    labels: Any = None,
    classes: tuple[str, ...] | None = None,
    spans: Any = None,
    **options: Any,
) -> Videos:
    listing = Listing(PathList(Path("/"), [str(p) for p in paths]), labels, spans)
    decoding = Decoding(geometry, stride, options.pop("short_side", None), options.pop("timeout", 30.0))
    return Videos(listing, classes, decoding=decoding, augment=augment, clips=options.pop("views", 1), **options)


@pytest.fixture
def forty(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "forty.mkv", 40)


def columns(path: Path, *, size: tuple[int, int], frames: int = 12) -> Path:
    """A video whose red tells the column and whose green the row of a pixel; it does not change."""
    height, width = size
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    picture[..., 0] = np.arange(width)
    picture[..., 1] = np.arange(height)[:, None]
    return write_pictures(path, [picture] * frames)


def test_a_sample_is_a_clip_between_0_and_1(forty: Path) -> None:
    sample = source([forty], labels=[1], classes=("a", "b")).load(0, None)
    assert sample.x.shape == (3, 4, 16, 16) and sample.x.dtype == torch.float32 and sample.x.is_contiguous()
    assert sample.x.min() >= 0 and sample.x.max() <= 1
    assert sample.label == 1 and sample.valid is None


def test_evaluation_takes_the_middle(forty: Path) -> None:
    assert numbers(source([forty]).load(0, None).x) == [15, 18, 21, 24]  # starts 0 … 30, the middle one is 15


def test_training_starts_anywhere_the_clip_fits(forty: Path) -> None:
    videos = source([forty], stride=12)  # spans 37 frames: starts 0 … 3
    found = Counter(tuple(numbers(videos.load(0, generator("start", n)).x)) for n in range(40))
    assert set(found) == {(s, s + 12, s + 24, s + 36) for s in range(4)}
    assert min(found.values()) >= 3


def test_a_sample_is_a_function_of_its_generator(forty: Path) -> None:
    everything = AugmentConfig(time_flip=True, randaugment=2, erase=0.5)
    videos = source([forty], augment=everything)
    once, again, other = (videos.load(0, generator("sample", n)).x for n in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert once.shape == (3, 4, 16, 16) and once.min() >= 0 and once.max() <= 1


def test_frames_past_the_end_repeat_the_last_and_are_marked(tmp_path: Path) -> None:
    short = write_numbered(tmp_path / "three.mkv", 3)
    geometry = Geometry(channels=3, input=(16, 16, 16), patch=(2, 8, 8))
    sample = source([short], geometry=geometry, stride=1).load(0, generator("short"))
    assert numbers(sample.x) == [0, 1] + [2] * 14
    assert sample.valid is not None and sample.valid.tolist() == [True] * 8 + [False] * 24  # 2 of 8 tubelets × 4


def test_less_than_half_a_tubelet_is_too_short(tmp_path: Path) -> None:
    one = write_numbered(tmp_path / "one.mkv", 1)
    geometry = Geometry(channels=3, input=(4, 16, 16), patch=(4, 8, 8))
    with pytest.raises(DataError, match=r"1 frames, but half a patch of 4 needs 2 at stride 3"):
        source([one], geometry=geometry).load(0, None)
    valid = source([one]).load(0, None).valid
    assert valid is not None and valid.tolist() == [True] * 4 + [False] * 4


def test_backwards_plays_the_same_frames_in_reverse(tmp_path: Path, forty: Path) -> None:
    videos = source([forty], stride=13, augment=PLAIN.model_copy(update={"time_flip": True}))  # starts at 0 only
    found = {tuple(numbers(videos.load(0, generator("time", n)).x)) for n in range(12)}
    assert found == {(0, 13, 26, 39), (39, 26, 13, 0)}
    short = source([write_numbered(tmp_path / "b.mkv", 3)], stride=1, augment=videos.augment)
    assert {tuple(numbers(short.load(0, generator("time", n)).x)) for n in range(12)} == {(0, 1, 2, 2), (2, 1, 0, 0)}


def test_all_frames_are_cut_and_mirrored_alike(tmp_path: Path) -> None:
    path = columns(tmp_path / "a.mkv", size=(64, 64))
    videos = source([path], augment=AugmentConfig(crop_scale=(0.3, 0.6)), short_side=64)
    mirrored = 0
    for n in range(12):
        x = videos.load(0, generator("crop", n)).x * 255
        assert torch.equal(x, x[:, :1].expand_as(x))
        red, green = x[0, 0].mean(0), x[1, 0].mean(1)  # by column, by row
        mirrored += int(red[0] > red[-1])
        area = (red[-1] - red[0]).abs() * (green[-1] - green[0]).abs() * (16 / 15) ** 2 / 64**2
        assert 0.24 < area < 0.66
        assert green[0] < green[-1]
    assert 2 <= mirrored <= 10


def test_views_are_clips_times_crops(tmp_path: Path) -> None:
    videos = source([columns(tmp_path / "a.mkv", size=(16, 40))], views=2, crops=3)
    assert isinstance(videos, Viewed) and videos.views == 6
    lefts = [round(float(videos.load_view(0, view).x[0, 0, 0, 0]) * 255) for view in range(6)]
    assert lefts == [0, 12, 24, 0, 12, 24]
    tall = source([columns(tmp_path / "b.mkv", size=(40, 16))], crops=2)
    assert [round(float(tall.load_view(0, view).x[1, 0, 0, 0]) * 255) for view in range(2)] == [0, 24]


def test_clips_are_spread_from_the_first_to_the_last(forty: Path) -> None:
    videos = Views(source([forty], views=3, crops=2))
    starts = [numbers(videos.load(view, None).x)[0] for view in range(len(videos))]
    assert starts == [0, 0, 15, 15, 30, 30]


def test_frames_of_512_by_288_are_cut_to_224(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (288, 512, 3), dtype=np.uint8)
    path = write_pictures(tmp_path / "a.mkv", [picture] * 4)
    geometry = Geometry(channels=3, input=(2, 224, 224), patch=(2, 16, 16))
    x = source([path], geometry=geometry, short_side=288).load(0, None).x
    expected = torch.from_numpy(picture[32:256, 144:368]).permute(2, 0, 1) / 255
    assert torch.equal(x[:, 0], expected)


def test_spans_are_samples_of_their_own(forty: Path) -> None:
    videos = source([forty, forty], spans=[(0.0, 1.0), (3.0, None)])  # ten frames each
    assert [numbers(videos.load(i, None).x) for i in range(2)] == [[0, 3, 6, 9], [30, 33, 36, 39]]
    assert videos.describe(1).endswith("forty.mkv [3–end s]")


def test_several_labels_become_shares(forty: Path) -> None:
    label = source([forty], labels=[(0, 2)], classes=("a", "b", "c")).load(0, None).label
    assert isinstance(label, torch.Tensor) and label.tolist() == [1.0, 0.0, 1.0]


def test_kept_videos_give_the_same_samples(tmp_path: Path, forty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [forty, write_numbered(tmp_path / "b.mp4", 30, codec="libx264", pixels="yuv420p")]
    augment = AugmentConfig()
    plain, cached = source(paths, augment=augment), source(paths, augment=augment, cache_mb=1)
    for index in (0, 1, 0, 1):
        for seed in range(3):
            expected = plain.load(index, generator("cached", seed)).x
            assert torch.equal(cached.load(index, generator("cached", seed)).x, expected)
    assert cached.cache is not None and set(cached.cache.items) == {0, 1}
    assert len(pickle.dumps(cached)) < 10_000
    monkeypatch.setattr(video_source, "MOST_CACHED", 35)
    cached = source(paths, augment=augment, cache_mb=1)
    for index in (0, 1):
        assert torch.equal(cached.load(index, generator(1)).x, plain.load(index, generator(1)).x)
    assert cached.cache is not None and [len(cached.cache.items[i]) for i in (0, 1)] == [0, 30]  # too long to be cached


def test_a_full_cache_decodes_only_clips(forty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    videos = source([forty, forty], cache_mb=1)
    assert videos.cache is not None
    videos.cache.limit = 50_000  # 40 frames of 16 × 24 × 3 are 46,080 bytes
    for index in (0, 1):
        videos.load(index, None)
    assert list(videos.cache.items) == [0] and videos.cache_full
    calls = []
    whole = video_source.Decoding.whole
    monkeypatch.setattr(video_source.Decoding, "whole", lambda *a, **k: calls.append(1) or whole(*a, **k))
    assert torch.equal(videos.load(0, None).x, videos.load(1, None).x)
    assert calls == []


def test_a_reader_covers_a_file_with_windows(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.mkv", 32, size=(16, 40))
    reader = VideoReader(Decoding(GEOMETRY, 3, None, 60.0))
    typed: Reader = reader
    windows = list(typed.windows(path))
    assert [numbers(w.x) for w in windows] == [[0, 3, 6, 9], [12, 15, 18, 21], [24, 27, 30, 30]]
    assert [w.start for w in windows] == [0, 4, 8]
    assert [w.seconds for w in windows] == [
        pytest.approx(times) for times in ((0.0, 0.3, 0.6, 0.9), (1.2, 1.5, 1.8, 2.1), (2.4, 2.7, 3.0))
    ]
    assert windows[0].valid is windows[1].valid is None
    assert windows[2].valid is not None and windows[2].valid.all()  # 3 real frames: the last tubelet is half real
    last = list(reader.windows(write_numbered(tmp_path / "b.mkv", 28, size=(16, 40))))[-1]
    assert last.valid is not None and last.valid.tolist() == [True] * 4 + [False] * 4


def test_a_reader_tells_times_of_a_variable_rate(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.mkv", 8, times=[3, 4, 5, 6, 20, 21, 22, 30])
    windows = list(VideoReader(Decoding(GEOMETRY, 1, None, 60.0)).windows(path))
    assert [w.seconds for w in windows] == [pytest.approx((0.0, 0.1, 0.2, 0.3)), pytest.approx((1.7, 1.8, 1.9, 2.7))]


def test_a_reader_refuses_what_is_no_video(tmp_path: Path) -> None:
    reader = VideoReader(Decoding(GEOMETRY, 1, None, 60.0))
    with pytest.raises(DataError, match=r"sound\.mp4.*no pictures, only audio"):
        list(reader.windows(write_sound(tmp_path / "sound.mp4")))


def test_bad_files_are_replaced_in_training_and_end_an_evaluation(tmp_path: Path, forty: Path) -> None:
    text = tmp_path / "text.mp4"
    text.write_text("no video")
    videos = source([forty, text, write_sound(tmp_path / "sound.mp4")])
    loader = Loader(source=videos, seed=0, phase="p", batch=6, mean=[0.0], std=[1.0])
    ((batch,),) = list(loader.steps(0, 1))
    assert {Path(bad.name).name for bad in batch.bad} == {"text.mp4", "sound.mp4"}
    assert batch.index.tolist() == [0] * 6
    with pytest.raises(DataError, match=r"text\.mp4"):
        list(sequential(videos, batch=3, mean=[0.0], std=[1.0]))


def test_workers_do_not_change_a_batch(tmp_path: Path, forty: Path) -> None:
    videos = source([forty, write_numbered(tmp_path / "b.mkv", 20)], augment=AugmentConfig())

    def batches(workers: int) -> list[torch.Tensor]:
        loader = Loader(source=videos, seed=0, phase="p", batch=4, mean=[0.0], std=[1.0], workers=workers)
        return [batch.x for (batch,) in loader.steps(0, 3)]

    for alone, shared in zip(batches(0), batches(2), strict=True):
        assert torch.equal(alone, shared)


def test_geometry_must_be_that_of_a_video() -> None:
    with pytest.raises(ConfigError, match="frames, height, width"):
        VideoReader(Decoding(Geometry(channels=3, input=(16, 16), patch=(8, 8)), 1, None, 60.0))
    with pytest.raises(ConfigError, match="1 or 3"):
        VideoReader(Decoding(Geometry(channels=2, input=(4, 16, 16), patch=(2, 8, 8)), 1, None, 60.0))


@pytest.mark.skipif(not SKY.is_dir(), reason="needs the clips sky4 in ../shared/data")
def test_real_clips_are_read() -> None:
    paths = sorted(path for path in SKY.rglob("*") if path.suffix in EXTENSIONS)[::40]
    geometry = Geometry(channels=3, input=(16, 64, 64), patch=(2, 8, 8))
    videos = source(paths, geometry=geometry, stride=2, augment=AugmentConfig())
    for index in range(len(videos)):
        sample = videos.load(index, generator(index))
        assert sample.x.shape == (3, 16, 64, 64) and sample.x.std() > 0.005


def test_a_video_that_cannot_be_kept_whole_gives_clips_all_the_same(
    forty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = video_source.Decoding._read

    def refuse_whole(self: video_source.Decoding, path: Path, **wanted: Any) -> tuple[int, torch.Tensor]:
        if wanted["length"] is None:
            raise DataError("its frames do not fit into memory")
        return real(self, path, **wanted)

    plain = source([forty]).load(0, None)
    monkeypatch.setattr(video_source.Decoding, "_read", refuse_whole)
    assert torch.equal(source([forty], cache_mb=1).load(0, None).x, plain.x)
