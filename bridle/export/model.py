"""A trained model in the hand: features and codes of arrays and of files.

Shapes: x (B, C, *input) in the units of the data (images in 0 … 1); z (B, T, D); codes (B, T, M). Results of files are
numpy arrays with one row per token, see `files`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.config import Config, read_config
from bridle.data.build import open_reader
from bridle.data.loader import moments_tensors, normalise
from bridle.data.sources import Reader
from bridle.errors import CheckpointError, DataError, UsageError
from bridle.export.files import (
    Compute,
    Ended,
    FileCodes,
    FileFeatures,
    Kept,
    Pool,
    Rows,
    name_of,
    rows_of_files,
)
from bridle.export.inputs import require_readable
from bridle.geometry import Geometry
from bridle.models.build import Nets
from bridle.models.encoder import Encoded
from bridle.nn.pooling import axis_pool, mean_pool
from bridle.train.checkpoint import load as load_checkpoint
from bridle.train.interleave import finished_phases, restore_nets
from bridle.train.runtime import choose_device

Pooling = Literal["mean", "axis", "class"]
Collected = TypeVar("Collected", Kept, Pool)
OnError = Callable[[str, DataError], None]  # file, reason

BATCH = 16  # windows that go through the networks together


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

    @overload
    def encode(
        self,
        x: Tensor,
        *,
        valid: Tensor | None = ...,
        layers: int | None = ...,
        pool: Pooling | None = ...,
        axis: int | None = ...,
    ) -> Tensor: ...
    @overload
    def encode(
        self,
        x: Tensor,
        *,
        valid: Tensor | None = ...,
        layers: Sequence[int],
        pool: Pooling | None = ...,
        axis: int | None = ...,
    ) -> tuple[Tensor, ...]: ...
    @torch.no_grad()
    def encode(
        self,
        x: Tensor,
        *,
        valid: Tensor | None = None,
        layers: int | Sequence[int] | None = None,
        pool: Pooling | None = None,
        axis: int | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Features of every token: (B, C, *input) -> (B, T, D).

        `valid` (B, T) marks padding. `layers` takes the output of a block (1 to depth; only the last is normalised), or
        of several. `pool`: "mean" over the real tokens gives (B, D); "axis" keeps grid axis `axis` and gives
        (B, grid[axis] · D); "class" the class token (B, D).
        """
        x, valid, kept = self._prepare(x), self._on_device(valid), self._kept_axis(pool, axis)
        if layers is None:
            return self._pooled(self.encoder(x, valid=valid), valid, pool, kept)
        wanted = (layers,) if isinstance(layers, int) else tuple(layers)
        found = self.encoder.layers(x, wanted=wanted, valid=valid)
        pooled = tuple(self._pooled(encoded, valid, pool, kept) for encoded in found)
        return pooled[0] if isinstance(layers, int) else pooled

    @torch.no_grad()
    def tokenize(self, x: Tensor, *, valid: Tensor | None = None, stages: int | None = None) -> Tensor:
        """Codes of every token, stage by stage: (B, C, *input) -> (B, T, M), or of the first `stages` only."""
        return self.tokenizer.tokenize(self._prepare(x), valid=self._on_device(valid), stages=stages)

    @torch.no_grad()
    def decode_codes(self, codes: Tensor | NDArray[Any], *, stages: int | None = None) -> Tensor:
        """The code vectors q of codes (…, M), summed over the first `stages`: (…, Dq)."""
        if isinstance(codes, np.ndarray):
            codes = torch.from_numpy(codes.astype(np.int64))
        return self.tokenizer.quantizer.decode(codes.to(self.device), stages=stages)

    def tokenize_file(self, path: str | Path, *, stages: int | None = None, batch: int = BATCH) -> FileCodes:
        """Codes of a file of any length, with the time and place of every token."""
        (found,) = self.tokenize_files([path], stages=stages, batch=batch)
        return found

    def encode_file(
        self,
        path: str | Path,
        *,
        layer: int | None = None,
        pool: Pooling | None = None,
        axis: int | None = None,
        batch: int = BATCH,
    ) -> FileFeatures:
        """Features of a file of any length, with the time and place of every token, or pooled over the whole file."""
        (found,) = self.encode_files([path], layer=layer, pool=pool, axis=axis, batch=batch)
        return found

    def tokenize_files(
        self,
        paths: Iterable[str | Path],
        *,
        stages: int | None = None,
        batch: int = BATCH,
        on_error: OnError | None = None,
    ) -> Iterator[FileCodes]:
        """Codes of many files in order. A file that cannot be read ends it, or goes to `on_error(name, error)`."""
        for name, kept in self._files(paths, self.codes_of(stages=stages), Kept, batch, on_error):
            rows = kept.joined()
            yield FileCodes(rows.values, rows.times, rows.positions, name)

    def encode_files(
        self,
        paths: Iterable[str | Path],
        *,
        layer: int | None = None,
        pool: Pooling | None = None,
        axis: int | None = None,
        batch: int = BATCH,
        on_error: OnError | None = None,
    ) -> Iterator[FileFeatures]:
        """Features of many files in order. A file that cannot be read ends it, or goes to `on_error(name, error)`."""
        compute = self.features_of(layer=layer, class_token=pool == "class")
        if pool is not None:
            for name, mean in self._files(paths, compute, partial(self.file_pool, pool, axis), batch, on_error):
                yield FileFeatures(mean.mean(), None, None, name)
            return
        for name, kept in self._files(paths, compute, Kept, batch, on_error):
            rows = kept.joined()
            yield FileFeatures(rows.values, rows.times, rows.positions, name)

    def stream_codes(self, path: str | Path, *, stages: int | None = None, batch: int = BATCH) -> Iterator[FileCodes]:
        """Codes of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        for rows in self._stream(Path(path), self.codes_of(stages=stages), batch):
            yield FileCodes(rows.values, rows.times, rows.positions, name_of(Path(path)))

    def stream_features(
        self, path: str | Path, *, layer: int | None = None, batch: int = BATCH
    ) -> Iterator[FileFeatures]:
        """Features of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        for rows in self._stream(Path(path), self.features_of(layer=layer), batch):
            yield FileFeatures(rows.values, rows.times, rows.positions, name_of(Path(path)))

    @cached_property
    def reader(self) -> Reader:
        """Reads files as this model's data was read."""
        return open_reader(self.config)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything the codes or features of a file depend on."""
        config = self.config
        seen = {"geometry": config.geometry, "audio": config.audio, "video": config.video}
        settings: dict[str, Any] = {name: section.model_dump(mode="json") for name, section in seen.items()}
        settings["mean"], settings["std"] = self.mean.tolist(), self.std.tolist()
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for module in (self.encoder, self.tokenizer):
            for key, tensor in sorted(module.state_dict().items()):
                digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def codes_of(self, *, stages: int | None = None) -> Compute:
        """x, valid -> codes (B, T, M) in the smallest unsigned type."""
        books = len(self.config.quantizer.sizes)
        if stages is not None and not 1 <= stages <= books:
            raise UsageError(f"stages is {stages}; this model has {books} codebooks, so 1 to {books}.")
        return partial(self._codes_array, stages, np.min_scalar_type(max(self.config.quantizer.sizes) - 1))

    def features_of(self, *, layer: int | None = None, class_token: bool = False) -> Compute:
        """x, valid -> features (B, T, D) float32; with `class_token` every token carries its window's."""
        if class_token:
            self._kept_axis("class", None)
        if layer is not None and not 1 <= layer <= self.encoder.depth:
            raise UsageError(f"layer is {layer}; the blocks of this encoder are numbered 1 to {self.encoder.depth}.")
        return partial(self._features_array, layer, class_token)

    def file_pool(self, pool: Pooling, axis: int | None) -> Pool:
        """A new running mean over one file."""
        kept = self._kept_axis(pool, axis)
        return Pool(places=1, axis=0) if kept is None else Pool(places=self.geometry.grid[kept], axis=kept)

    def _codes_array(self, stages: int | None, dtype: np.dtype[Any], x: Tensor, valid: Tensor | None) -> NDArray[Any]:
        return self.tokenize(x, valid=valid, stages=stages).cpu().numpy().astype(dtype)

    def _features_array(self, layer: int | None, class_token: bool, x: Tensor, valid: Tensor | None) -> NDArray[Any]:
        z = self.encode(x, valid=valid, layers=layer, pool="class" if class_token else None)
        if class_token:
            z = z[:, None].expand(-1, self.geometry.tokens, -1)  # (B, D) -> (B, T, D)
        return z.float().cpu().numpy()

    def _files(
        self,
        paths: Iterable[str | Path],
        compute: Compute,
        collector: Callable[[], Collected],
        batch: int,
        on_error: OnError | None,
    ) -> Iterator[tuple[str, Collected]]:
        """Name and collected rows of each file that can be read."""
        listed = [Path(path) for path in paths]
        for path in listed:
            require_readable(path, self.reader)
        collected = collector()
        for found in rows_of_files(listed, reader=self.reader, geometry=self.geometry, compute=compute, batch=batch):
            if isinstance(found, Rows):
                collected.add(found)
                continue
            name = name_of(listed[found.file])
            if found.error is None:
                yield name, collected
            elif on_error is None:
                raise found.error
            else:
                on_error(name, found.error)
            collected = collector()

    def _stream(self, path: Path, compute: Compute, batch: int) -> Iterator[Rows]:
        require_readable(path, self.reader)
        kept = Kept()
        for found in rows_of_files([path], reader=self.reader, geometry=self.geometry, compute=compute, batch=batch):
            if isinstance(found, Ended):
                if found.error is not None:
                    raise found.error
                break
            kept.add(found)
            if len(kept.parts) == batch:
                yield kept.joined()
                kept = Kept()
        if kept.parts:
            yield kept.joined()

    def _kept_axis(self, pool: Pooling | None, axis: int | None) -> int | None:
        """The grid axis that pooling keeps, checked; None where it keeps none."""
        if pool not in (None, "mean", "axis", "class"):
            raise UsageError(f"pool is {pool!r}; expected 'mean', 'axis' or 'class', or nothing to keep every token.")
        if pool == "class" and self.encoder.class_token is None:
            raise UsageError("pool 'class' needs a model with encoder.class_token; use 'mean'.")
        if pool != "axis":
            if axis is not None:
                raise UsageError(f"axis {axis} is given, but only pool 'axis' keeps one.")
            return None
        if axis is None:  # as the run itself was judged, else the bands of a (time, frequency) grid
            axis = self.config.probe.axis if self.config.probe.pool == "axis" else self.geometry.rank - 1
        if not 0 <= axis < self.geometry.rank:
            raise UsageError(f"axis {axis} is not an axis of the grid {list(self.geometry.grid)}; count from 0.")
        return axis

    def _pooled(self, encoded: Encoded, valid: Tensor | None, pool: Pooling | None, axis: int | None) -> Tensor:
        if pool is None:
            return encoded.z
        if pool == "class":
            assert encoded.class_token is not None  # checked by _kept_axis
            return encoded.class_token
        return mean_pool(encoded.z, valid) if axis is None else axis_pool(encoded.z, self.geometry.grid, axis, valid)

    def _prepare(self, x: Tensor) -> Tensor:
        if x.dim() == len(self.geometry.shape):
            x = x.unsqueeze(0)
        if tuple(x.shape[1:]) != self.geometry.shape:
            raise UsageError(
                f"expected an input of shape (B, {', '.join(map(str, self.geometry.shape))}), got {tuple(x.shape)}; "
                "crop, pad or resize it, or train a model with this geometry.input."
            )
        return normalise(x.float().cpu(), mean=self.mean, std=self.std).to(self.device)

    def _on_device(self, valid: Tensor | None) -> Tensor | None:
        if valid is None:
            return None
        return valid.to(self.device).reshape(-1, self.geometry.tokens)  # (T,) of a single input is (1, T)


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
