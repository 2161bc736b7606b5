"""Log-mel features: shapes, precision, independence of rows. The numbers themselves: parity/test_data_kaldi.py."""

from __future__ import annotations

import pytest
import torch

from bridle.data.audio.logmel import FLOOR, LogMel


def noise(*shape: int) -> torch.Tensor:
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("samples", [399, 400, 559, 560, 16_000])
def test_frames_says_how_many_frames_come(samples: int) -> None:
    logmel = LogMel(mels=8)
    assert logmel(noise(samples)).shape == (logmel.frames(samples), 8)


def test_a_batch_gives_each_clip_its_own_features() -> None:
    logmel, clips = LogMel(mels=32), noise(5, 100_000)  # long enough to be computed in several pieces
    batch = logmel(clips)
    assert batch.shape == (5, 623, 32)
    for clip, features in zip(clips, batch, strict=True):
        torch.testing.assert_close(logmel(clip), features, rtol=0, atol=1e-5)


def test_a_long_clip_has_the_features_of_its_parts() -> None:
    logmel, clip = LogMel(mels=32), noise(100_000)
    for first in (0, 500, 600):  # frames on both sides of a piece's end
        part = clip[first * 160 : first * 160 + 400 + 19 * 160]
        torch.testing.assert_close(logmel(part), logmel(clip)[first : first + 20], rtol=0, atol=1e-5)


def test_silence_is_the_floor() -> None:
    assert torch.equal(LogMel(mels=4)(torch.zeros(400)), torch.full((1, 4), FLOOR).log())


def test_half_precision_of_the_model_does_not_reach_the_features() -> None:
    logmel = LogMel(mels=32)
    expected = logmel(noise(16_000))
    assert torch.equal(logmel.half()(noise(16_000)), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logmel(noise(16_000)), expected)


def test_a_tone_is_loudest_in_its_own_band() -> None:
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000)
    loudest = LogMel(mels=64)(tone).mean(0).argmax()
    # Centre of band j on the mel scale, worked by hand: mel(20) + (j + 1)/65 · (mel(8000) − mel(20)).
    mel = [1127 * torch.log(torch.tensor(1 + f / 700)) for f in (20.0, 8000.0, 1000.0)]
    expected = (mel[2] - mel[0]) / (mel[1] - mel[0]) * 65 - 1
    assert abs(float(loudest) - float(expected)) <= 1
