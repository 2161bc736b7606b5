"""A trained model in the hand: features and codes of arrays.

Shapes: x (B, C, *input) in the units of the data (images in 0 … 1); z (B, T, D); codes (B, T, M).
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from bridle.config import Config, read_config
from bridle.data.loader import moments_tensors, normalise
from bridle.errors import CheckpointError, UsageError
from bridle.geometry import Geometry
from bridle.models.build import Nets
from bridle.train.checkpoint import load as load_checkpoint
from bridle.train.interleave import finished_phases, restore_nets
from bridle.train.runtime import choose_device


class Model:
    """Encoder and tokenizer of a run, frozen, with the normalisation they were trained with."""

    def __init__(self, nets: Nets, config: Config, *, device: torch.device) -> None:
        self.config = config
        self.geometry: Geometry = config.geometry.build()
        self.device = device
        self.encoder, self.tokenizer = nets.encoder, nets.tokenizer
        for module in (self.encoder, self.tokenizer):
            module.requires_grad_(False).eval().to(device)
        if config.data.mean is None or config.data.std is None:
            raise UsageError(f"run {config.name!r} has no normalisation statistics in its config.")
        self.mean, self.std = moments_tensors(config.data.mean, config.data.std)

    @torch.no_grad()
    def encode(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Features of every token: (B, C, *input) -> (B, T, D)."""
        z: Tensor = self.encoder(self._prepare(x), valid=self._on_device(valid)).z
        return z

    @torch.no_grad()
    def tokenize(self, x: Tensor) -> Tensor:
        """Codes of every token: (B, C, *input) -> (B, T, M), stage by stage."""
        return self.tokenizer.tokenize(self._prepare(x))

    @torch.no_grad()
    def decode_codes(self, codes: Tensor, *, stages: int | None = None) -> Tensor:
        """The code vectors q of codes (…, M), summed over the first `stages`: (…, Dq)."""
        return self.tokenizer.quantizer.decode(codes.to(self.device), stages=stages)

    def _prepare(self, x: Tensor) -> Tensor:
        if x.dim() == len(self.geometry.shape):
            x = x.unsqueeze(0)
        if tuple(x.shape[1:]) != self.geometry.shape:
            raise UsageError(
                f"expected an input of shape (B, {', '.join(map(str, self.geometry.shape))}), got {tuple(x.shape)}."
            )
        return normalise(x.float().cpu(), mean=self.mean, std=self.std).to(self.device)

    def _on_device(self, valid: Tensor | None) -> Tensor | None:
        return None if valid is None else valid.to(self.device)


def load(path: str | Path, *, iteration: int | None = None, device: str = "auto") -> Model:
    """The model of a run directory after its last finished encoder phase, or after that of `iteration`."""
    folder = Path(path)
    nets, config = read_trained(folder, iteration=iteration)
    return Model(nets, config, device=choose_device(device))


def read_trained(folder: Path, *, iteration: int | None = None) -> tuple[Nets, Config]:
    """Networks and config of a run's last finished encoder phase that is whole."""
    if not (folder / "config.yaml").is_file():
        raise UsageError(f"{folder}: not a run directory (no config.yaml); give the folder that --out named.")
    config = read_config(folder / "config.yaml")
    ends = finished_phases(folder)
    if iteration is not None:
        ends = [path for path in ends if f"-iter{iteration}-" in path.name]
    problems = []
    for path in reversed(ends):
        try:
            loaded = load_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            warnings.warn(f"{error} Using an earlier checkpoint if there is one.", stacklevel=3)
            continue
        return restore_nets(config, loaded), config
    if problems:
        raise CheckpointError(" ".join(problems))
    which = "" if iteration is None else f" of iteration {iteration}"
    raise UsageError(
        f"{folder}: no finished encoder phase{which} yet; run `bridle pretrain` with the same arguments to go on."
    )
