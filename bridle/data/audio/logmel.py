"""Log-mel features of a waveform, as Kaldi computes them, in plain torch.

Shapes: waveform (B, N) in ±1 -> features (B, frames, mels); frames = 1 + (N − window) // shift, 0 if N < window.

Per frame of 25 ms, every 10 ms:  y = x − mean(x);  y_i ← y_i − 0.97·y_{i−1};  y ← y · hann;
p = |rfft(y, 512)|²;  feature_j = ln(max(Σ_f p_f · triangle_j(mel(f)), 1.19e-7)),  mel(f) = 1127·ln(1 + f/700).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

FLOOR = torch.finfo(torch.float32).eps  # 1.19e-7
PREEMPHASIS = 0.97
CHUNK = 512  # frames computed at a time on a CPU


class LogMel(nn.Module):
    """Waveform to log-mel features on the waveform's device, always in float32.

    Window and mel matrix are cached per device outside the module, so that `.half()` or autocast cannot touch them.
    """

    def __init__(
        self,
        *,
        sample_rate: int = 16_000,
        mels: int = 128,
        low: float = 20.0,
        window_ms: float = 25.0,
        shift_ms: float = 10.0,
    ) -> None:
        super().__init__()
        self.sample_rate, self.mels, self.low = sample_rate, mels, low
        self.window = int(sample_rate * window_ms / 1000)
        self.shift = int(sample_rate * shift_ms / 1000)
        self.fft = 1 << (self.window - 1).bit_length()  # the next power of two

    def frames(self, samples: int) -> int:
        """Frames of a waveform of this many samples."""
        return 0 if samples < self.window else 1 + (samples - self.window) // self.shift

    def forward(self, waveform: Tensor) -> Tensor:
        """(B, N) -> (B, frames, mels), or (N,) -> (frames, mels)."""
        if self.frames(waveform.shape[-1]) == 0:
            return waveform.new_zeros(*waveform.shape[:-1], 0, self.mels, dtype=torch.float32)
        rows = waveform.float().reshape(-1, waveform.shape[-1])
        frames = rows.unfold(-1, self.window, self.shift)  # (B, frames, window), a view
        with torch.autocast(device_type=waveform.device.type, enabled=False):
            if waveform.device.type != "cpu":
                features = self._features(frames)
            else:  # pieces that stay in the cache: less than half the time
                features = torch.cat(
                    [
                        torch.cat([self._features(x) for x in torch.split(clips, CHUNK, dim=1)], dim=1)
                        for clips in torch.split(frames, max(1, CHUNK // frames.shape[1]))
                    ]
                )
        return features.reshape(*waveform.shape[:-1], -1, self.mels)

    def _features(self, x: Tensor) -> Tensor:
        """(B, frames, window) -> (B, frames, mels)"""
        x = x - x.mean(-1, keepdim=True)
        x = x - PREEMPHASIS * torch.cat([x[..., :1], x[..., :-1]], dim=-1)
        x = x * hann(self.window, x.device)
        spectrum = torch.fft.rfft(x, n=self.fft)[..., :-1]  # Kaldi leaves the Nyquist bin out
        power = spectrum.real.square() + spectrum.imag.square()  # (B, frames, fft/2)
        energy = torch.matmul(power, triangles(self.fft, self.sample_rate, self.mels, self.low, x.device))
        return energy.clamp_min(FLOOR).log()


class LogMelGraph(nn.Module):
    """The same features by one convolution and one product, for graphs that know no FFT.

    Up to the spectrum everything is linear in a frame, so that its values for unit impulses are the kernels.
    """

    kernels: Tensor
    mel: Tensor

    def __init__(self, front: LogMel) -> None:
        super().__init__()
        self.sample_rate, self.window, self.shift = front.sample_rate, front.window, front.shift
        x = torch.eye(front.window, dtype=torch.float64)  # a frame for each sample
        x = x - x.mean(-1, keepdim=True)
        x = x - PREEMPHASIS * torch.cat([x[..., :1], x[..., :-1]], dim=-1)
        spectrum = torch.fft.rfft(x * hann(front.window, x.device), n=front.fft)[..., :-1]
        rows = torch.cat([spectrum.real, spectrum.imag], dim=-1).T  # (fft, window)
        self.register_buffer("kernels", rows[:, None].float())
        self.register_buffer("mel", triangles(front.fft, front.sample_rate, front.mels, front.low, x.device))

    def samples(self, frames: int) -> int:
        """The waveform that just gives this many frames."""
        return self.window + (frames - 1) * self.shift

    def forward(self, waveform: Tensor) -> Tensor:
        """(B, N) -> (B, frames, mels)"""
        spectrum = torch.conv1d(waveform[:, None], self.kernels, stride=self.shift)  # (B, fft, frames)
        real, imaginary = spectrum.chunk(2, dim=1)
        power = (real.square() + imaginary.square()).transpose(1, 2)
        return torch.matmul(power, self.mel).clamp_min(FLOOR).log()


@lru_cache(maxsize=16)
def hann(window: int, device: torch.device) -> Tensor:
    """Kaldi's 'hanning': zero at both ends."""
    return torch.hann_window(window, periodic=False, dtype=torch.float64).float().to(device)


@lru_cache(maxsize=16)
def triangles(fft: int, sample_rate: int, mels: int, low: float, device: torch.device) -> Tensor:
    """(fft/2, mels) triangles of height 1, evenly spaced and straight-sided on the mel scale, low to Nyquist."""
    edges = torch.linspace(0, 1, mels + 2, dtype=torch.float64)
    bottom, top = (mel(torch.tensor(f, dtype=torch.float64)) for f in (low, sample_rate / 2))
    edges = bottom + (top - bottom) * edges
    bins = mel(torch.arange(fft // 2, dtype=torch.float64) * sample_rate / fft)[:, None]  # (fft/2, 1)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
    return torch.minimum(rising, falling).clamp_min(0).float().to(device)


def mel(frequency: Tensor) -> Tensor:
    """HTK's mel scale."""
    return 1127.0 * torch.log1p(frequency / 700.0)
