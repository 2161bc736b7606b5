"""One file at a time: good ones without a finding, each kind of damage with its own."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from bridle.data.audio.check import SoundMeter
from bridle.data.inspect.findings import CheckOptions, Facts
from bridle.data.inspect.inspection import decoder_messages, inspect_file
from bridle.data.modality import file_modality, modality_of_file

RATE = 16_000


def hiss(samples: int = RATE, level: float = 0.1, channels: int = 1) -> np.ndarray:
    return (level * np.random.default_rng(0).standard_normal((samples, channels))).astype(np.float32)


def sound(path: Path, x: np.ndarray, rate: int = RATE, **options: Any) -> Path:
    soundfile.write(path, x, rate, **options)
    return path


def video(path: Path, frames: int = 12, codec: str = "mpeg4") -> Path:
    """Noise of 64 × 48 at 10 frames per second, its index before its frames."""
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        random = np.random.default_rng(0)
        for _ in range(frames):
            picture = random.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def halve(path: Path) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def look(path: Path, kind: str | None = None, **options: Any) -> Facts:
    modality = modality_of_file(path.name) if kind is None else file_modality(kind, option="--kind")
    assert modality is not None
    return inspect_file(path, modality, CheckOptions(**options))


def names(path: Path, **options: Any) -> list[str]:
    return [finding.name for finding in look(path, **options).findings]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.wav", {}),
        ("a.WAV", {}),
        ("a.flac", {}),
        ("a.ogg", {}),
        ("a.mp3", {}),
        ("a.aiff", {}),
        ("a.opus", {"format": "OGG", "subtype": "OPUS"}),
    ],
)
def test_a_good_sound_has_no_finding_and_its_true_length_and_rate(
    tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    facts = look(sound(tmp_path / name, hiss(RATE // 2), **options))
    assert facts._replace(sounding=None) == Facts("audio", seconds=0.5, rate=RATE, shape=(1, RATE // 2))
    assert facts.sounding == pytest.approx(0.5, abs=0.02)


def test_silence_at_the_ends_is_not_sounding_but_a_pause_is(tmp_path: Path) -> None:
    wave = np.zeros(RATE, np.float32)
    wave[RATE // 4 : RATE // 4 + 100] = wave[RATE // 2 - 100 : RATE // 2] = hiss(100)[:, 0]
    assert look(sound(tmp_path / "a.wav", wave, subtype="FLOAT")).sounding == pytest.approx(0.25, abs=1e-3)


def test_channels_and_rates_of_every_kind_are_looked_at(tmp_path: Path) -> None:
    facts = look(sound(tmp_path / "a.wav", hiss(192_000, channels=8), rate=192_000))
    assert facts == Facts("audio", seconds=1.0, rate=192_000, shape=(8, 192_000), sounding=1.0)


@pytest.mark.parametrize("value", [0.0, 5e-5, 0.25])
def test_zeros_and_constants_are_silent(tmp_path: Path, value: float) -> None:
    assert names(sound(tmp_path / "a.wav", np.full(RATE, value, np.float32), subtype="FLOAT")) == ["silent"]


def test_one_channel_that_sounds_is_enough(tmp_path: Path) -> None:
    x = np.concatenate([np.zeros((RATE, 1)), hiss()], axis=1)
    assert names(sound(tmp_path / "a.wav", x)) == []


def test_runs_at_full_scale_are_clipping_and_single_peaks_are_not(tmp_path: Path) -> None:
    x = hiss(10_000)[:, 0]
    x[::50] = 1.0  # 200 peaks, each alone
    assert names(sound(tmp_path / "peaks.wav", x)) == []
    x = hiss(10_000)[:, 0]
    x[100:111] = -1.0  # 11 in a row, 10 of them after another
    assert names(sound(tmp_path / "run.wav", x)) == ["clipped"]
    x[100] = 0.0  # 9 of 10,000 are less than 0.1 %
    assert names(sound(tmp_path / "short run.wav", x)) == []


def test_clipping_in_one_of_two_channels_counts(tmp_path: Path) -> None:
    x = hiss(channels=2)
    x[100:501, 1] = 1.0  # 400 after another, of 32,000
    found = look(sound(tmp_path / "a.wav", x)).findings
    assert [tuple(finding) for finding in found] == [("clipped", "1.25 % of samples at full scale")]


def test_a_run_goes_on_in_the_next_block() -> None:
    meter = SoundMeter()
    for block in ([0.0, 1.0], [1.0, 1.0], [0.0, 1.0]):
        meter.add(np.array(block, np.float32)[:, None])
    assert (meter.frames, meter.clipped) == (6, 2)


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    x = hiss()
    x[3], x[77] = np.nan, np.inf
    found = look(sound(tmp_path / "a.wav", x, subtype="FLOAT")).findings
    assert [finding.name for finding in found] == ["not finite"]
    assert found[0].detail.startswith("2 of 16000 samples")


def test_too_short_and_empty_sounds(tmp_path: Path) -> None:
    assert names(sound(tmp_path / "one.wav", hiss(1))) == ["too short"]
    assert names(sound(tmp_path / "short.wav", hiss(RATE // 20))) == ["too short"]
    assert names(tmp_path / "short.wav", shortest=0.01) == []
    assert names(sound(tmp_path / "none.wav", hiss(0))) == ["empty"]
    (tmp_path / "zero.mp3").touch()
    assert names(tmp_path / "zero.mp3") == ["empty"]


@pytest.mark.parametrize(
    ("name", "finding"),
    [("a.wav", "truncated"), ("a.flac", "truncated"), ("a.mp3", "truncated"), ("a.ogg", "cut short")],
)
def test_half_a_sound_is_noticed(tmp_path: Path, name: str, finding: str) -> None:
    assert names(halve(sound(tmp_path / name, hiss(3 * RATE)))) == [finding]


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.png", "a.mp4", "a.gif", "a.m4a"])
def test_a_text_with_a_media_name_is_undecodable(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("this is a text\n" * 20)
    found = look(tmp_path / name).findings
    assert [finding.name for finding in found] == ["undecodable"]
    assert name not in found[0].detail  # the path stands beside it


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "link.wav").symlink_to(tmp_path / "nowhere.wav")
    assert names(tmp_path / "link.wav") == ["missing"]
    (tmp_path / "folder.wav").mkdir()
    assert names(tmp_path / "folder.wav") == ["undecodable"]


def test_a_sound_that_ends_before_its_stated_length_is_truncated(tmp_path: Path) -> None:
    path = sound(tmp_path / "a.mp3", hiss(3 * RATE))
    content = bytearray(path.read_bytes())
    at = content.find(b"Xing") if b"Xing" in content else content.find(b"Info")
    frames = int.from_bytes(content[at + 8 : at + 12], "big")
    content[at + 8 : at + 12] = (2 * frames).to_bytes(4, "big")  # the tag now says twice as many frames
    path.write_bytes(bytes(content))
    found = look(path).findings
    assert [finding.name for finding in found] == ["truncated"]
    assert found[0].detail.startswith("3.0")


# Pictures


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.bmp"])
def test_a_good_picture_has_its_size_and_no_finding(tmp_path: Path, name: str) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / name)
    assert look(tmp_path / name) == Facts("image", size="30×20", shape=(3, 20, 30))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "I;16"])
def test_a_picture_of_one_colour_is_blank(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (5, 5)).save(tmp_path / "a.png")
    assert names(tmp_path / "a.png") == ["blank"]


def test_half_a_picture_and_a_bomb_are_undecodable(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "half.jpg")
    assert names(halve(tmp_path / "half.jpg")) == ["undecodable"]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"x")) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(bomb)
    assert names(tmp_path / "bomb.png") == ["undecodable"]


# Video


def test_a_good_video_has_its_size_and_length(tmp_path: Path) -> None:
    facts = look(video(tmp_path / "a.mp4"))
    assert facts == Facts("video", seconds=1.2, size="64×48", shape=(3, 12, 48, 64))


def test_only_so_many_frames_are_decoded_and_the_rest_is_believed(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", frames=40)
    damaged = bytearray(path.read_bytes())
    damaged[-3000:] = bytes(3000)  # in the last frames
    path.write_bytes(bytes(damaged))
    assert look(path, frames=5) == Facts("video", seconds=4.0, size="64×48", shape=(3, 40, 48, 64))
    assert names(path) != []


def test_half_a_video_is_cut_short_and_without_its_index_undecodable(tmp_path: Path) -> None:
    path = halve(video(tmp_path / "a.mp4", frames=40))
    found = look(path).findings
    assert [finding.name for finding in found] == ["cut short"]
    assert "of 40 frames" in found[0].detail
    path.write_bytes(path.read_bytes()[:200])
    assert names(path) == ["undecodable"]


def test_damage_that_a_decoder_hides_shows_in_what_it_prints(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4")
    damaged = bytearray(path.read_bytes())
    at = len(damaged) // 2
    damaged[at : at + 400] = bytes(np.random.default_rng(1).integers(0, 255, 400, dtype=np.uint8))
    path.write_bytes(bytes(damaged))
    found = look(path).findings
    assert [finding.name for finding in found] == ["decoder warning"]
    assert "0x" not in found[0].detail  # no addresses, which differ from run to run


def test_sound_alone_is_no_video_and_pictures_alone_are_no_sound(tmp_path: Path) -> None:
    silent = video(tmp_path / "a.mp4")
    assert names(silent, kind="audio") == ["undecodable"]
    with av.open(str(tmp_path / "b.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=RATE)
        frame = av.AudioFrame.from_ndarray(hiss(RATE).T.copy(), format="fltp", layout="mono")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert names(tmp_path / "b.mp4") == ["undecodable"]
    heard = look(tmp_path / "b.mp4", kind="audio")
    assert heard.findings == ()
    assert heard.rate == RATE
    assert heard.seconds == pytest.approx(1.0, abs=0.1)


# Kinds and messages


def test_the_name_tells_the_kind() -> None:
    endings = {
        "a.WAV": "audio",
        "a.m4a": "audio",
        "a.jpeg": "image",
        "a.mkv": "video",
        "a.gif": "video",
        "a.txt": None,
        "a.npz": "signal",
    }
    found = {name: modality_of_file(name) for name in endings}
    assert {name: modality and modality.kind for name, modality in found.items()} == endings


def test_messages_of_decoders_are_caught_and_the_stream_is_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    with decoder_messages() as messages:
        os.write(2, b"[codec @ 0x55d3e33a3180] bad things\nmore\n")
    sys.stderr.write("after\n")
    assert messages == ["[codec] bad things", "more"]
    assert capfd.readouterr().err == "after\n"
