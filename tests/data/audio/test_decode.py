"""Sound out of files: formats, rates, channels, parts, streams and damage."""

from __future__ import annotations

import os
import tracemalloc
from io import FileIO
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr
import torch

from bridle.data.audio import decode as audio_decode
from bridle.data.audio.decode import open_track, read_part, read_waveform, stream_waveform
from bridle.errors import DataError

RATE = 16_000


def tone(seconds: float, rate: int, frequency: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def noise(samples: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(0).standard_normal(samples)).astype(np.float32)


def sweep(seconds: float, rate: int) -> np.ndarray:
    """A tone that rises from 200 to 3,000 Hz, so that every place sounds different."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * (200 * time + 1_400 / seconds * time**2))).astype(np.float32)


def write_film(path: Path, wave: np.ndarray, rate: int, codec: str = "aac") -> Path:
    """A container with a picture track and a sound track."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream(codec, rate=rate, layout="mono")
        picture = container.add_stream("mpeg4", rate=10)
        picture.width = picture.height = 16
        for _ in range(3):
            container.mux(picture.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        container.mux(picture.encode(None))
        frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
        frame.rate, frame.pts = rate, 0
        container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
    return path


@pytest.mark.parametrize(
    ("name", "subtype", "tolerance"),
    [
        ("a.wav", "PCM_16", 1e-4),
        ("a.wav", "PCM_24", 1e-6),
        ("a.wav", "PCM_U8", 1e-2),
        ("a.wav", "FLOAT", 0.0),
        ("a.wav", "DOUBLE", 0.0),
        ("a.wav", "ULAW", 2e-2),
        ("a.WAV", "PCM_16", 1e-4),
        ("a.flac", "PCM_16", 1e-4),
        ("a.aiff", "PCM_16", 1e-4),
        ("a.ogg", "VORBIS", 5e-2),
        ("a.mp3", "MPEG_LAYER_III", 5e-2),
    ],
)
def test_formats_and_bit_depths_give_the_same_sound(tmp_path: Path, name: str, subtype: str, tolerance: float) -> None:
    wave = tone(0.5, RATE)
    soundfile.write(tmp_path / name, wave, RATE, subtype=subtype)
    read = read_waveform(tmp_path / name, rate=RATE)
    assert (read.dtype, read.shape) == (torch.float32, (8_000,))
    assert np.abs(read.numpy() - wave)[400:-400].max() <= tolerance  # lossy formats are less exact at the ends


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.mov", "a.m4a"])
def test_the_sound_track_of_a_film_is_read(tmp_path: Path, name: str) -> None:
    wave = sweep(1.0, RATE)
    read = read_waveform(write_film(tmp_path / name, wave, RATE), rate=RATE).numpy()
    assert abs(len(read) - len(wave)) <= 2 * 1024  # the coder begins with silence and fills its last frame
    lag = int(np.argmax(np.correlate(read[3000:14000], wave[5000:11000], "valid"))) - 2000
    assert lag == 0
    np.testing.assert_allclose(read[5000 + lag : 11000 + lag], wave[5000:11000], atol=0.05)


def test_channels_are_averaged(tmp_path: Path) -> None:
    channels = np.stack([np.full(800, value) for value in (0.1, 0.2, 0.3, 0.4, -0.1, -0.2, -0.3, 0.4)], axis=1)
    soundfile.write(tmp_path / "a.wav", channels, RATE, subtype="FLOAT")
    torch.testing.assert_close(read_waveform(tmp_path / "a.wav", rate=RATE), torch.full((800,), 0.1))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000, 44_099])
def test_every_rate_is_resampled_as_soxr_does(tmp_path: Path, rate: int) -> None:
    wave = tone(0.5, rate) + noise(round(0.5 * rate))
    soundfile.write(tmp_path / "a.wav", wave, rate, subtype="FLOAT")
    expected = soxr.resample(wave, rate, RATE, quality="HQ")
    read = read_waveform(tmp_path / "a.wav", rate=RATE).numpy()
    assert abs(len(read) - 8_000) <= 1
    np.testing.assert_allclose(read, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_a_part_is_what_the_whole_has_there(tmp_path: Path, name: str, rate: int) -> None:
    soundfile.write(tmp_path / name, noise(4 * rate), rate)
    whole = read_waveform(tmp_path / name, rate=RATE)
    for start, seconds in ((0.0, 0.5), (1.2345, 0.7), (3.9, 1.0)):
        part = read_waveform(tmp_path / name, rate=RATE, start=start, seconds=seconds)
        first = round(start * RATE)
        torch.testing.assert_close(part, whole[first : first + round(seconds * RATE)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_part_of_a_film_is_what_the_whole_has_there(tmp_path: Path, name: str) -> None:
    path = write_film(tmp_path / name, sweep(4.0, RATE), RATE)
    whole = read_waveform(path, rate=RATE)
    part = read_waveform(path, rate=RATE, start=2.5, seconds=0.5)
    assert part.shape == (8_000,)
    slack = 0 if name == "a.mp4" else 16  # Matroska writes times in milliseconds
    errors = [float((part - whole[at : at + 8_000]).abs().max()) for at in range(40_000 - slack, 40_001 + slack)]
    assert min(errors) < 1e-4


def test_a_part_of_a_long_film_is_read_by_seeking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Counted(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            read.append(len(data))
            return data

    path = write_film(tmp_path / "a.mp4", noise(60 * RATE), RATE)
    monkeypatch.setattr(audio_decode, "FileIO", Counted)
    assert read_waveform(path, rate=RATE, start=50.0, seconds=0.1).shape == (1_600,)
    assert sum(read) < path.stat().st_size / 2


def test_a_part_of_a_long_file_is_read_by_seeking(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(600 * RATE, np.int16), RATE)  # 19 MB
    tracemalloc.start()
    assert read_waveform(tmp_path / "a.wav", rate=RATE, start=500.0, seconds=1.0).shape == (RATE,)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("rate", [16_000, 44_100, 8_000])
@pytest.mark.parametrize("block_seconds", [0.01, 0.37, 100.0])
def test_a_stream_is_the_whole_in_pieces(tmp_path: Path, rate: int, block_seconds: float) -> None:
    soundfile.write(tmp_path / "a.wav", noise(3 * rate), rate, subtype="FLOAT")
    pieces = list(stream_waveform(tmp_path / "a.wav", rate=RATE, block_seconds=block_seconds))
    assert {len(piece) for piece in pieces[:-1]} <= {round(block_seconds * RATE)}
    torch.testing.assert_close(torch.cat(pieces), read_waveform(tmp_path / "a.wav", rate=RATE), rtol=0, atol=1e-5)


def test_a_stream_needs_the_memory_of_a_block(tmp_path: Path) -> None:
    peaks = []
    for minutes in (1, 8):
        soundfile.write(tmp_path / "a.flac", np.zeros(minutes * 60 * 22_050, np.int16), 22_050)
        tracemalloc.start()
        assert sum(map(len, stream_waveform(tmp_path / "a.flac", rate=RATE))) == minutes * 60 * RATE
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 10_000_000


def read_some(path: Path, *, size: int, whole: int, end: float | None = None, start: float = 0.0) -> tuple[int, bool]:
    part = read_part(
        path, rate=RATE, start=start, end=end, size=size, whole=whole, choose=lambda samples: samples - size
    )
    return len(part.wave), part.whole


def test_short_clips_come_whole_and_long_ones_in_part(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(1_000), RATE)
    assert read_some(tmp_path / "a.wav", size=400, whole=1_000) == (1_000, True)
    assert read_some(tmp_path / "a.wav", size=400, whole=999) == (400, False)
    assert read_some(tmp_path / "a.wav", size=400, whole=999, end=0.05) == (800, True)
    assert read_some(tmp_path / "a.wav", size=400, whole=700, end=0.05) == (400, False)
    assert read_some(tmp_path / "a.wav", size=400, whole=700, start=0.05) == (200, True)


def without_length(path: Path, *, noise_first: bool) -> Path:
    """An mp3 of 3 s silence and 3 s noise whose length can only be guessed, wrongly, from its first frame."""
    wave = np.concatenate([noise(3 * RATE), np.zeros(3 * RATE)][:: 1 if noise_first else -1])
    soundfile.write(path, wave, RATE, bitrate_mode="VARIABLE", compression_level=0.3)
    data = path.read_bytes()
    path.write_bytes(data[data.index(data[:2], 4) :])  # without the frame that states the length
    return path


def test_a_wrong_guess_of_the_length_is_corrected(tmp_path: Path) -> None:
    for noise_first in (False, True):
        path = without_length(tmp_path / "a.mp3", noise_first=noise_first)
        with open_track(path) as track:
            assert not track.exact
            assert track.length < 5 * RATE if noise_first else track.length > 7 * RATE
        assert abs(len(read_waveform(path, rate=RATE)) - 6 * RATE) < 4_000
        assert read_some(path, size=RATE, whole=5 * RATE) == (RATE, False)
        whole = read_waveform(path, rate=RATE)
        for start in (1.0, 2.9, 4.5):
            part = read_waveform(path, rate=RATE, start=start, seconds=0.5)
            first = round(start * RATE)
            torch.testing.assert_close(part, whole[first : first + 8_000], rtol=0, atol=1e-3)


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.flac", "a.mp4"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("mp4"):
        write_film(path, noise(4 * RATE), RATE)
    else:
        soundfile.write(path, noise(4 * RATE), RATE)
    with pytest.raises(DataError, match=f"{name}' (ends after .* truncated|cannot be read)"):
        read_waveform(cut(path), rate=RATE)
    with pytest.raises(DataError, match=name):  # also where only the part is wanted that is there
        read_waveform(path, rate=RATE, seconds=0.1)
    with pytest.raises(DataError, match=name):
        list(stream_waveform(path, rate=RATE))


def test_a_wav_that_was_never_closed_is_read(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(1_000), RATE)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"  # the sizes, as programs write them that send to a pipe
    (tmp_path / "a.wav").write_bytes(data)
    assert len(read_waveform(tmp_path / "a.wav", rate=RATE)) == 1_000


def test_a_header_alone_does_not_make_us_allocate(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.flac", noise(1_000), RATE)
    data = bytearray((tmp_path / "a.flac").read_bytes())
    data[21] |= 0x0F  # the number of samples, 36 bits
    data[22:26] = b"\xff\xff\xff\xff"
    (tmp_path / "a.flac").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.flac"):
        read_waveform(tmp_path / "a.flac", rate=RATE)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    wave = noise(1_000)
    wave[700] = value
    soundfile.write(tmp_path / "a.wav", wave, RATE, subtype="FLOAT")
    with pytest.raises(DataError, match=r"a\.wav' holds samples that are not finite"):
        read_waveform(tmp_path / "a.wav", rate=RATE)


@pytest.mark.parametrize("name", ["a.wav", "a.mp3", "a.mp4", "a.ogg", "a.mkv"])
@pytest.mark.parametrize("content", [b"hello, world\n" * 50, b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", bytes(500)])
def test_what_is_not_sound_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}' (cannot be read as sound|holds no samples)"):
        read_waveform(tmp_path / name, rate=RATE)


def test_files_without_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.wav").touch()
    with pytest.raises(DataError, match=r"empty\.wav' is empty \(0 bytes\)"):
        read_waveform(tmp_path / "empty.wav", rate=RATE)
    soundfile.write(tmp_path / "none.wav", np.zeros(0), RATE)
    with pytest.raises(DataError, match=r"none\.wav' holds no samples"):
        read_waveform(tmp_path / "none.wav", rate=RATE)
    with pytest.raises(DataError, match=r"none\.wav' holds no samples"):
        list(stream_waveform(tmp_path / "none.wav", rate=RATE))
    soundfile.write(tmp_path / "short.wav", noise(1_000), RATE)
    with pytest.raises(DataError, match=r"short\.wav' holds no samples at 2 s"):
        read_waveform(tmp_path / "short.wav", rate=RATE, start=2.0)


def test_a_film_without_sound_is_refused(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        picture = container.add_stream("mpeg4", rate=10)
        picture.width = picture.height = 16
        container.mux(picture.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        container.mux(picture.encode(None))
    with pytest.raises(DataError, match="has no sound track"):
        read_waveform(tmp_path / "a.mp4", rate=RATE)


def test_a_sample_rate_that_cannot_be_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(1_000), 1)
    with pytest.raises(DataError, match="sample rate is 1 Hz"):
        read_waveform(tmp_path / "a.wav", rate=RATE)


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.wav").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        read_waveform(tmp_path / "folder.wav", rate=RATE)
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(DataError, match="is not a file"):
        read_waveform(tmp_path / "pipe.wav", rate=RATE)
    with pytest.raises(DataError, match=r"absent\.wav' cannot be read as sound: No such file"):
        read_waveform(tmp_path / "absent.wav", rate=RATE)
    with pytest.raises(DataError, match="null byte"):
        read_waveform(tmp_path / "a\0.wav", rate=RATE)


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    soundfile.write(tmp_path / "a.wav", noise(1_000), RATE)
    monkeypatch.setattr(os, "open", refuse)  # root, who may run this, can read every file
    with pytest.raises(DataError, match="Permission denied"):
        read_waveform(tmp_path / "a.wav", rate=RATE)


@pytest.mark.parametrize("ending", [b".wav", b".mp4"])
def test_names_that_are_not_utf8_are_read(tmp_path: Path, ending: bytes) -> None:
    plain = tmp_path / ("a" + ending.decode())
    if ending == b".mp4":
        write_film(plain, noise(RATE), RATE)
    else:
        soundfile.write(plain, noise(RATE), RATE)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + ending))
    os.rename(plain, odd)
    assert len(read_waveform(odd, rate=RATE)) >= RATE


def test_no_file_stays_open(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", noise(1_000), RATE)
    (tmp_path / "text.wav").write_text("hello")
    write_film(tmp_path / "a.mp4", noise(RATE), RATE)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for name in ("a.wav", "text.wav", "a.mp4"):
        for _ in range(3):
            try:
                read_waveform(tmp_path / name, rate=RATE, seconds=0.01)
                next(stream_waveform(tmp_path / name, rate=RATE, block_seconds=0.01))
            except DataError:
                continue
    assert (len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0) == before
