"""The frozen networks of a run on arrays: features and codes, with the normalisation they were trained with.

Shapes: x (B, C, *input) in the units of the data (images in 0 … 1); z (B, T, D); codes (B, T, M).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.config import Config
from bridle.data.loading.loader import moments_tensors, normalise
from bridle.data.modality import modality_of, settings_of
from bridle.errors import UsageError, quoted
from bridle.export.load import Trained
from bridle.geometry import Geometry
from bridle.infer.arrays import ArrayLike, Batch, batches, code_tensor, require_dtype, token_positions
from bridle.infer.features import FeatureOptions, FeatureSpec, PoolOptions, choose_features, probe_features
from bridle.infer.files import Compute
from bridle.models.build import Nets
from bridle.models.tokenizer import Tokenizer

ARRAY_BATCH = 64  # inputs of an array that go through the networks together


class FrozenNetworks:
    """Encoder and tokenizer, in eval mode and without gradients."""

    def __init__(
        self, nets: Nets | Trained, config: Config, *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is that of the encoders: float32, bfloat16 or float16; the quantizer is always float32."""
        self.config, self.dtype = config, require_dtype(dtype, device)
        self.geometry: Geometry = config.geometry.build()
        self.device = device
        self.encoder, self.own_tokenizer = nets.encoder, nets.own_tokenizer
        for module in self._networks():
            module.requires_grad_(False).eval().to(device)
        self.encoder.to(dtype)
        self.tokenizer_dtype = torch.float32 if self.own_tokenizer is None else self.own_tokenizer.cast(dtype)
        if config.data.mean is None or config.data.std is None:
            raise UsageError(f"run {config.name!r} has no normalisation statistics in its config.")
        self.mean, self.std = moments_tensors(config.data.mean, config.data.std)

    def __repr__(self) -> str:
        geometry, config = self.geometry, self.config
        size, patch = ("×".join(map(str, sizes)) for sizes in (geometry.input, geometry.patch))
        codes = "none" if self.own_tokenizer is None else " × ".join(map(str, config.quantizer.sizes))
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{type(self).__name__}({config.name!r}, {config.data.source}, on {self.device}, {dtype})",
            f"  input     {geometry.channels} × {size}, patches {patch}: {geometry.tokens} tokens",
            f"  encoder   width {self.encoder.width}, {self.encoder.depth} blocks",
            f"  codes     {codes}",
            f"  features  {self.probe_spec.describe()}",
        ]
        return "\n".join(lines)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; an encoder from elsewhere, or one that was trained to predict patches, has none."""
        if self.own_tokenizer is None:
            raise UsageError(
                f"model {quoted(self.config.name)} has no tokenizer, so it gives no codes; use encode or "
                "`bridle embed`, or a run with loss.target=codes."
            )
        return self.own_tokenizer

    def _networks(self) -> list[nn.Module]:
        return [self.encoder] if self.own_tokenizer is None else [self.encoder, self.own_tokenizer]

    @overload
    def encode(
        self,
        x: ArrayLike,
        *,
        valid: ArrayLike | None = ...,
        layers: int | None = ...,
        batch: int = ...,
        **pooling: Unpack[PoolOptions],
    ) -> Tensor: ...
    @overload
    def encode(
        self,
        x: ArrayLike,
        *,
        valid: ArrayLike | None = ...,
        layers: Sequence[int],
        batch: int = ...,
        **pooling: Unpack[PoolOptions],
    ) -> tuple[Tensor, ...]: ...
    @torch.no_grad()
    def encode(
        self,
        x: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        layers: int | Sequence[int] | None = None,
        batch: int = ARRAY_BATCH,
        **pooling: Unpack[PoolOptions],
    ) -> Tensor | tuple[Tensor, ...]:
        """Features of every token: (B, C, *input) -> (B, T, D) float32, `batch` inputs at a time; see `arrays` for x.

        `valid` (B, T) is False on padding. `layers` takes the output of a block (1 to depth; only the last is
        normalised), or of several. `pool`: "mean" over the real tokens gives (B, D); "axis" keeps grid axis `axis` and
        gives (B, grid[axis] · D); `deviation=True` puts as many standard deviations behind; "class" is the class token
        (B, D); "probe" is what the run's probe used. Token t lies at `token_positions[t]`.
        """
        several = isinstance(layers, Sequence)
        chosen = layers if isinstance(layers, Sequence) else [layers if layers is None else int(layers)]
        specs = [self.features(layer=layer, **pooling) for layer in chosen]
        pieces = [self._encoded(piece, specs) for piece in self._batches(x, valid, batch)]
        joined = tuple(torch.cat(same) for same in zip(*pieces, strict=True))
        return joined if several else joined[0]

    @torch.no_grad()
    def tokenize(
        self,
        x: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        stages: int | None = None,
        batch: int = ARRAY_BATCH,
    ) -> Tensor:
        """Codes of every token, stage by stage: (B, C, *input) -> (B, T, M), or of the first `stages` only.

        `batch` inputs at a time; see `arrays` for x. Token t lies at `token_positions[t]`.
        """
        found = []
        for piece in self._batches(x, valid, batch):
            normalised = self._normalised(piece.x).to(self.tokenizer_dtype)
            found.append(self.tokenizer.tokenize(normalised, valid=piece.valid, stages=stages))
        return torch.cat(found)

    @torch.no_grad()
    def decode_codes(self, codes: Tensor | NDArray[Any], *, stages: int | None = None) -> Tensor:
        """The code vectors q of codes (…, M), summed over the first `stages`: (…, Dq)."""
        checked = code_tensor(codes, self.config.quantizer.sizes)
        return self.tokenizer.quantizer.decode(checked.to(self.device), stages=stages)

    @property
    def token_positions(self) -> NDArray[np.int64]:
        """(T, rank): the grid position of each token."""
        return token_positions(self.geometry)

    @property
    def token_starts(self) -> NDArray[np.int64]:
        """(T, rank): the first frame and band, row and column, … of each token's patch in the input."""
        return token_positions(self.geometry, patch=self.geometry.patch)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything the codes or features of a file depend on."""
        config = self.config
        seen = {"geometry": config.geometry, **settings_of(config)}
        settings: dict[str, object] = {name: section.model_dump(mode="json") for name, section in seen.items()}
        settings |= {"mean": self.mean.tolist(), "std": self.std.tolist()}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for module in self._networks():
            for key, tensor in sorted(module.state_dict().items()):
                digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    @property
    def probe_spec(self) -> FeatureSpec:
        """The features that this run's probe used, which `embed` and `bridle index` take."""
        return probe_features(self.config)

    def features(self, **options: Unpack[FeatureOptions]) -> FeatureSpec:
        """The features that the arguments of `encode_file` name, checked."""
        return choose_features(self.config, self.encoder, **options)

    def codes_of(self, *, stages: int | None = None) -> Compute:
        """x, valid -> codes (B, T, M) in the smallest unsigned type."""
        books = len(self.config.quantizer.sizes)
        if stages is not None and not 1 <= stages <= books:
            raise UsageError(f"stages is {stages}; this model has {books} codebooks, so 1 to {books}.")
        dtype = np.min_scalar_type(max(self.config.quantizer.sizes) - 1)
        return lambda x, valid: self.tokenize(x, valid=valid, stages=stages).cpu().numpy().astype(dtype)

    def features_of(self, spec: FeatureSpec) -> Compute:
        """x, valid -> features (B, T, D) float32, or pooled (B, P, D), deviations behind the means."""

        @torch.no_grad()
        def compute(x: Tensor, valid: Tensor | None) -> NDArray[np.float32]:
            (z,) = zip(*(self._encoded(piece, [spec]) for piece in self._batches(x, valid, len(x))), strict=True)
            joined = torch.cat(z)
            shaped = joined if spec.pool is None else joined.unflatten(1, (-1, self.encoder.width))
            found: NDArray[np.float32] = shaped.cpu().numpy()
            return found

        return compute

    def _encoded(self, piece: Batch, specs: Sequence[FeatureSpec]) -> tuple[Tensor, ...]:
        """The features that each spec asks for, from one pass; the specs differ in their layers alone."""
        x, grid = self._normalised(piece.x).to(self.dtype), self.geometry.grid
        wanted = [self.encoder.depth if spec.layer is None else spec.layer for spec in specs]
        found = self.encoder.layers(x, wanted=wanted, valid=piece.valid)
        return tuple(
            spec.pooled(encoded, grid, piece.valid).float() for encoded, spec in zip(found, specs, strict=True)
        )

    def _batches(self, x: ArrayLike, valid: ArrayLike | None, batch: int) -> Iterator[Batch]:
        bytes_as_unit = modality_of(self.config).is_unit_range
        for piece in batches(x, valid, self.geometry, size=batch, bytes_as_unit=bytes_as_unit):
            yield piece._replace(valid=None if piece.valid is None else piece.valid.to(self.device))

    def _normalised(self, x: Tensor) -> Tensor:
        return normalise(x.cpu(), mean=self.mean, std=self.std).to(self.device)
