"""Pooled features of files longer than the input, where stem and blocks have different widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from small_models import signal_model, write_signal

from bridle.infer.read import read_features
from bridle.infer.write import Options, embed_inputs
from bridle.models.measure import measure_inputs
from bridle.seeding import generator


def test_windows_are_averaged_by_their_real_tokens_at_every_place(tmp_path: Path) -> None:
    settings = ("encoder.stem=5", "probe.layer=all", "probe.deviation=true", "probe.pool=axis", "probe.axis=0")
    model = signal_model(*settings)
    measure_inputs(model.encoder.embed, [(torch.randn(60, 2, 12, generator=generator("x")), None)], generator("stem"))
    x = write_signal(tmp_path / "a.npy", 18)  # a window of 12 and one of 6: 4 and 2 tokens
    found = model.embed([tmp_path / "a.npy"])[0]
    windows = torch.stack([x[:, :12], torch.nn.functional.pad(x[:, 12:], (0, 6))])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    parts = model.encode(windows, valid=valid, layers="all", pool="axis", axis=0, deviation=True).split(
        [2 * 4 * width for width in (5, 8, 8, 8, 8)], dim=1
    )
    expected = []
    for part in parts:  # (2, 2 · 4 · width): the means of four places, then their deviations
        first, second = part.reshape(2, 2, 4, -1)
        joined = first.clone()
        joined[:, :2] = (first[:, :2] + second[:, :2]) / 2
        expected.append(joined.flatten())
    np.testing.assert_allclose(found, torch.cat(expected).numpy(), atol=1e-5)
    embed_inputs(model, [str(tmp_path / "a.npy")], tmp_path / "out.npz", options=Options(workers=0))
    ((_, stored),) = list(read_features(tmp_path / "out.npz"))
    np.testing.assert_allclose(np.asarray(stored.z).reshape(-1), found, atol=1e-6)
