"""Randomness as a function of names: (seed, phase, step, purpose, sample) -> generator.

Nothing in bridle draws from a global generator, so restarts, worker counts and world sizes cannot change a result.
"""

from __future__ import annotations

import hashlib

import torch


def mix(*names: int | str) -> int:
    """A 63-bit number that depends on every name and on their order; the same on every machine and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*names: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh torch generator seeded by the names."""
    return torch.Generator(device=device).manual_seed(mix(*names))
