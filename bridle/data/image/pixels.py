"""Pictures as tensors (C, H, W) in 0 … 1, and as bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]  # (H, W) or (H, W, 3)


def as_bytes(x: Tensor) -> Pixels:
    """(C, H, W) in 0 … 1 -> (H, W) or (H, W, 3) bytes."""
    values = (x.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return np.ascontiguousarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0))


def as_tensor(pixels: Pixels) -> Tensor:
    """(H, W) or (H, W, 3) bytes -> (C, H, W) in 0 … 1."""
    values = torch.from_numpy(pixels.copy()).float() / 255
    return values[None] if values.ndim == 2 else values.movedim(-1, 0)
