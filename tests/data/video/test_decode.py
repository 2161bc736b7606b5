"""The decoder: exactly the frames that were asked for, from every kind of file, and a reason where there are none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from video_files import STEP, numbers, write_numbered, write_pictures, write_sound

from bridle.data.video import decode as video_decode
from bridle.data.video.source import Decoding, unit_range
from bridle.errors import DataError
from bridle.geometry import Geometry

WHOLE = (0.0, None)
KINDS = {  # file name: codec and pixel format
    "a.mp4": ("libx264", "yuv420p"),  # with frames out of order
    "b.mov": ("mpeg4", "yuv420p"),
    "c.mkv": ("libx264", "yuv420p"),  # says neither duration nor number of frames
    "d.webm": ("libvpx-vp9", "yuv420p"),
    "e.gif": ("gif", "gray"),
    "f.avi": ("mpeg4", "yuv420p"),
    "g.avi": ("libx264", "yuv420p"),  # frames out of order in a format without times
    "h.webm": ("libvpx", "yuv420p"),
    "i.avi": ("mjpeg", "yuvj420p"),
}
VARIABLE = [0, 1, 4, 5, 7, 12, 13, 14, 18, 20, 21, 22, 30, 31, 33, 34, 35, 36, 40, 41, *range(50, 70)]


def decoding(*, length: int = 4, stride: int = 3, channels: int = 3, short: int | None = None) -> Decoding:
    return Decoding(Geometry(channels=channels, input=(length, 16, 16), patch=(1, 8, 8)), stride, short, 30.0)


def clip(path: Path, place: float, span: tuple[float, float | None] = WHOLE, **options: Any) -> list[int]:
    return numbers(unit_range(decoding(**options).clip(path, place=place, span=span).permute(0, 3, 1, 2)))


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        decoding().clip(path, place=0.0, span=WHOLE)
    assert repr(str(path)) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", KINDS)
def test_every_format_gives_exactly_the_frames_asked_for(tmp_path: Path, name: str) -> None:
    codec, pixels = KINDS[name]
    path = write_numbered(tmp_path / name, 40, codec=codec, pixels=pixels)
    # A clip of 4 frames, every third, spans 10: it can start at 0 … 30; place p is start floor(31·p).
    for start in (0, 1, 13, 29, 30):
        assert clip(path, (start + 0.5) / 31) == [start, start + 3, start + 6, start + 9]
    assert clip(path, 1.0) == [30, 33, 36, 39]


def test_single_frames_of_a_format_without_times_are_counted(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "g.avi", 40, codec="libx264", pixels="yuv420p", size=(64, 96))
    with av.open(str(path)) as container:
        times = [frame.pts for frame in container.decode(video=0)]
    assert times != sorted(times)  # frames were reordered, as meant
    assert [clip(path, (n + 0.5) / 40, length=1)[0] for n in range(0, 40, 3)] == list(range(0, 40, 3))
    windows = decoding(stride=1).windows(path, span=WHOLE)
    assert [time for seconds, _ in windows for time in seconds] == pytest.approx([n / 10 for n in range(40)])


@pytest.mark.parametrize("name", ["a.mp4", "c.mkv"])
def test_frames_are_counted_whatever_their_times(tmp_path: Path, name: str) -> None:
    path = write_numbered(tmp_path / name, 40, codec="libx264", pixels="yuv420p", times=VARIABLE)
    assert clip(path, 20.5 / 31) == [20, 23, 26, 29]


def test_a_file_without_duration_is_read(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "live.mkv", 40, codec="libx264", pixels="yuv420p", muxer={"live": "1"})
    with av.open(str(path)) as container:
        assert container.duration is None and container.streams.video[0].frames == 0
    assert clip(path, 1.0) == [30, 33, 36, 39]


def test_a_file_that_lies_about_its_length_is_counted(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.avi", 40, codec="mpeg4", pixels="yuv420p")
    content = bytearray(path.read_bytes())
    at = content.index(b"strh") + 8 + 32  # the stream header's length in frames
    assert int.from_bytes(content[at : at + 4], "little") == 40
    content[at : at + 4] = (9000).to_bytes(4, "little")
    path.write_bytes(content)
    assert clip(path, 1.0) == [30, 33, 36, 39]


def test_a_clip_is_decoded_from_the_key_frame_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbered(tmp_path / "a.mp4", 40, codec="libx264", pixels="yuv420p", gop=5)
    seen = []
    decoded = video_decode.decoded
    monkeypatch.setattr(video_decode, "decoded", lambda *a: (seen.append(1) or frame for frame in decoded(*a)))
    assert clip(path, 1.0) == [30, 33, 36, 39]  # 30 is a key frame
    assert len(seen) <= 15


def test_a_clip_longer_than_the_file_ends_with_it(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.mkv", 8)
    assert clip(path, 0.0) == clip(path, 1.0) == [0, 3, 6]


def test_a_span_holds_the_frames_shown_in_it(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.mkv", 40)  # ten frames a second
    assert clip(path, 0.0, (1.0, 3.0)) == [10, 13, 16, 19]
    assert clip(path, 1.0, (1.0, 3.0)) == [20, 23, 26, 29]
    assert clip(path, 1.0, (3.5, None)) == [35, 38]
    with pytest.raises(DataError, match="no frames from 7 s to 9 s"):
        clip(path, 0.0, (7.0, 9.0))


def test_a_span_counts_time_where_the_rate_varies(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.mkv", 40, times=VARIABLE)
    assert clip(path, 0.0, (1.2, 1.9), stride=1) == [5, 6, 7, 8]  # shown at 1.2, 1.3, 1.4 and 1.8 s


def test_pictures_without_loss_come_out_as_they_went_in(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (288, 512, 3), dtype=np.uint8)
    path = write_pictures(tmp_path / "a.mkv", [picture] * 2)
    found = decoding(length=2, stride=1, short=288).clip(path, place=0.0, span=WHOLE)
    assert found.shape == (2, 288, 512, 3)
    assert torch.equal(found[0], torch.from_numpy(picture))


def test_grey_pictures_keep_the_full_range(tmp_path: Path) -> None:
    pictures = [np.full((16, 16, 3), value, dtype=np.uint8) for value in (0, 128, 255)]
    path = write_pictures(tmp_path / "a.mp4", pictures, codec="libx264", pixels="yuv420p")
    found = decoding(length=3, stride=1, channels=1).clip(path, place=0.0, span=WHOLE)
    assert found.shape == (3, 16, 16, 1)
    assert (found.float().mean((1, 2, 3)) - torch.tensor([0.0, 128.0, 255.0])).abs().max() <= 2


@pytest.mark.parametrize(
    ("size", "short", "scaled"),
    [((32, 64), 24, (24, 48)), ((64, 32), 24, (48, 24)), ((8, 8), None, (16, 16)), ((32, 32), 4, (16, 16))],
)
def test_the_short_side_is_scaled_and_the_sample_always_fits(
    tmp_path: Path, size: tuple[int, int], short: int | None, scaled: tuple[int, int]
) -> None:
    path = write_numbered(tmp_path / "a.mkv", 4, size=size)
    assert decoding(short=short).clip(path, place=0.0, span=WHOLE).shape[1:3] == scaled


def test_shrinking_averages(tmp_path: Path) -> None:
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 200  # every other column: taking single pixels would give 0 or 200
    found = decoding(length=1).clip(write_pictures(tmp_path / "a.mkv", [stripes] * 2), place=0.0, span=WHOLE)
    assert (found.float() - 100).abs().max() < 20


def test_a_picture_filmed_sideways_is_turned_upright(tmp_path: Path) -> None:
    picture = np.zeros((16, 32, 3), dtype=np.uint8)
    picture[:, :16] = 200  # bright on the left
    path = write_pictures(tmp_path / "a.mp4", [picture] * 2, codec="libx264", pixels="yuv420p")
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 40  # the matrix: a quarter turn clockwise, what was left is then on top
    matrix = (0, 0x10000, 0, -0x10000, 0, 0, 0x100000, 0, 0x40000000)
    content[at : at + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    path.write_bytes(content)
    found = decoding(length=1).clip(path, place=0.0, span=WHOLE)[0].float()  # (32, 16, 3)
    assert found.shape == (32, 16, 3)
    assert found[:14].mean() > 180 and found[18:].mean() < 20


def test_a_file_that_breaks_off_is_as_long_as_what_is_whole(tmp_path: Path) -> None:
    whole = write_numbered(
        tmp_path / "a.mp4", 40, codec="libx264", pixels="yuv420p", gop=4, muxer={"movflags": "faststart"}
    )
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole.read_bytes()[: int(0.85 * whole.stat().st_size)])
    last = clip(path, 1.0, length=1)[0]
    assert 5 < last < 39
    assert clip(path, 1.0) == [last - 9, last - 6, last - 3, last]


def test_a_file_whose_index_is_missing_is_refused(tmp_path: Path) -> None:
    whole = write_numbered(tmp_path / "a.mp4", 40, codec="libx264", pixels="yuv420p")  # the index comes last
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert "beginning is damaged" in refusal(path)


def test_what_is_no_video_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("not a video\n" * 100)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "folder.mp4").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")
    assert "it is not an MP4" in refusal(tmp_path / "text.mp4")
    assert "it is not an MP4" in refusal(tmp_path / "empty.mp4")
    assert "it is a folder" in refusal(tmp_path / "folder.mp4")
    assert "not a regular file" in refusal(tmp_path / "pipe.mp4")
    assert "No such file" in refusal(tmp_path / "gone.mp4")
    assert "it holds no pictures, only audio" in refusal(write_sound(tmp_path / "sound.mp4"))


def test_a_file_with_no_frames_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    assert "holds no" in refusal(path)


def test_a_codec_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.avi", 4, codec="mjpeg", pixels="yuvj420p")
    path.write_bytes(path.read_bytes().replace(b"MJPG", b"ZZZZ"))
    assert "its codec is not known" in refusal(path)


def test_a_playlist_cannot_lead_to_other_files(tmp_path: Path) -> None:
    other = write_numbered(tmp_path / "a.mp4", 4, codec="libx264", pixels="yuv420p")
    path = tmp_path / "list.mp4"
    path.write_text(f"ffconcat version 1.0\nfile '{other.name}'\n")
    assert "it is not an MP4" in refusal(path)
    path.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other.name}\n#EXT-X-ENDLIST\n")
    assert "it is not an MP4" in refusal(path)


def test_frames_of_absurd_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "more than 32 times as long as wide" in refusal(write_numbered(tmp_path / "thin.mkv", 2, size=(2, 80)))
    path = write_numbered(tmp_path / "a.mkv", 2, size=(16, 16))
    monkeypatch.setattr(video_decode, "LARGEST_FRAME", 255)
    assert "frames of 16×16 are larger" in refusal(path)


def test_a_name_that_is_no_text_is_found(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff:\xe9.mkv"))
    write_numbered(tmp_path / "a.mkv", 8).rename(path)
    assert clip(path, 0.0) == [0, 3, 6]


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.mkv", 20)
    assert clip(path, 1.0) == [10, 13, 16, 19]
    write_numbered(path, 40)
    assert clip(path, 1.0) == [30, 33, 36, 39]


def test_damage_in_the_middle_is_an_error_where_it_is_needed(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "a.mov", 40, codec="png", pixels="rgb24")  # every frame for itself
    content = bytearray(path.read_bytes())
    parts = [at for at in range(len(content)) if content[at : at + 4] == b"IDAT"]
    assert len(parts) == 40
    for at in parts[20:22]:
        content[at - 8 : at + 12] = b"\x00" * 20
    path.write_bytes(content)
    assert clip(path, 0.0) == [0, 3, 6, 9]
    with pytest.raises(DataError, match="cannot be read as a video"):
        clip(path, 20.5 / 31)


def test_shades_tell_frame_numbers() -> None:
    assert numbers(torch.tensor([0.0, 5.0, 39.0]).reshape(1, 3, 1, 1) * STEP / 255) == [0, 5, 39]
