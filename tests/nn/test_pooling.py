"""Pooling on a grid with one axis, where keeping that axis leaves nothing to average over."""

from __future__ import annotations

import torch

from bridle.nn.pooling import axis_pool, deviation_pool
from bridle.seeding import generator


def test_keeping_the_only_axis_keeps_every_token() -> None:
    tokens = torch.randn(2, 5, 3, generator=generator("tokens"))
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 3:] = False
    wanted = torch.where(valid[..., None], tokens, 0.0).flatten(1)
    assert torch.equal(axis_pool(tokens, (5,), 0, valid), wanted)
    assert torch.equal(deviation_pool(tokens, (5,), 0, valid), torch.zeros(2, 15))
