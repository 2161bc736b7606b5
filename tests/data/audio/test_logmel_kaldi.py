"""Log-mel features against kaldi-native-fbank, an independent implementation."""

from __future__ import annotations

import kaldi_native_fbank as knf
import numpy as np
import pytest
import torch
from torch import Tensor

from bridle.data.audio.logmel import LogMel

RATE = 16_000


def kaldi(waveform: Tensor, *, mels: int, rate: int = RATE) -> Tensor:
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.window_type = "hanning"
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = mels
    options.mel_opts.low_freq = 20.0
    options.mel_opts.high_freq = 0.0  # Nyquist
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(rate, waveform.tolist())
    bank.input_finished()
    return torch.from_numpy(np.array([bank.get_frame(i) for i in range(bank.num_frames_ready)]).reshape(-1, mels))


def seconds(duration: float, rate: int = RATE) -> Tensor:
    return torch.arange(int(duration * rate)) / rate


def noise(samples: int) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(0))


WAVEFORMS = {
    "noise": 0.1 * noise(3 * RATE),
    "loud noise": noise(RATE).clamp(-1, 1),
    "quiet noise": 1e-4 * noise(RATE),
    "low tone": 0.5 * torch.sin(2 * torch.pi * 440 * seconds(1)),
    "high tone over an offset": 0.3 + 0.1 * torch.sin(2 * torch.pi * 6000 * seconds(1)),
    "silence": torch.zeros(RATE),
    "click": (torch.arange(8000) == 4000).float(),
    "one window": noise(400),
    "one window and a bit": noise(559),
    "two windows": noise(560),
}


@pytest.mark.parametrize("mels", [64, 128])
@pytest.mark.parametrize("name", WAVEFORMS)
def test_features_are_those_of_kaldi(name: str, mels: int) -> None:
    ours, theirs = LogMel(mels=mels)(WAVEFORMS[name]), kaldi(WAVEFORMS[name], mels=mels)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().mean() <= 1e-4
    # Far from a tone a band holds what rounding left of it, which no two CPUs round alike: 0.0037 was seen.
    assert (ours - theirs).abs().max() <= 1e-2


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
def test_features_are_those_of_kaldi_at_other_rates(rate: int) -> None:
    waveform = 0.1 * noise(rate)
    ours, theirs = LogMel(sample_rate=rate, mels=40)(waveform), kaldi(waveform, mels=40, rate=rate)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 3e-3


def test_a_clip_shorter_than_a_window_has_no_frames() -> None:
    assert kaldi(noise(399), mels=64).shape == (0, 64)
    assert LogMel(mels=64)(noise(399)).shape == (0, 64)
    assert LogMel(mels=64)(noise(798).reshape(2, 399)).shape == (2, 0, 64)
