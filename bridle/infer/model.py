"""A trained model in the hand: features and codes of arrays and of files.

Shapes: x (B, C, *input) in the units of the data (images in 0 … 1); z (B, T, D); codes (B, T, M). Results of files are
numpy arrays with one row per token, see `files`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.config import Config
from bridle.data.build import open_reader
from bridle.data.loading.loader import moments_tensors, normalise
from bridle.data.modality import modality_of, settings_of
from bridle.data.sources import Reader
from bridle.errors import UsageError, quoted
from bridle.export.folder import write_folder
from bridle.export.hub import find_model, push
from bridle.export.load import Trained, facts_of_nets, read_trained
from bridle.geometry import Geometry
from bridle.infer.arrays import ArrayLike, Batch, batches, code_tensor, require_dtype, token_positions
from bridle.infer.files import (
    Collected,
    Compute,
    FileCodes,
    FileFeatures,
    Kept,
    OnError,
    Pool,
    collect_files,
    name_of,
    stream_file,
)
from bridle.machine import choose_device
from bridle.models.build import Nets
from bridle.models.encoder import Encoded
from bridle.models.tokenizer import Tokenizer
from bridle.nn.pooling import axis_pool, mean_pool

Pooling = Literal["mean", "axis", "class"]

BATCH = 16  # windows that go through the networks together
ARRAY_BATCH = 64  # inputs of an array that do


class Model:
    """Encoder and tokenizer of a run, frozen, with the normalisation they were trained with."""

    def __init__(
        self, nets: Nets | Trained, config: Config, *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is that of the encoders: float32, bfloat16 or float16; the quantizer is always float32."""
        self.config, self.dtype = config, require_dtype(dtype, device)
        self.geometry: Geometry = config.geometry.build()
        self.device = device
        self.encoder, self.own_tokenizer = nets.encoder, nets.own_tokenizer
        self.facts = nets.facts if isinstance(nets, Trained) else facts_of_nets(nets.own_tokenizer)
        for module in self._networks():
            module.requires_grad_(False).eval().to(device)
        self.encoder.to(dtype)
        self.tokenizer_dtype = torch.float32 if self.own_tokenizer is None else self.own_tokenizer.cast(dtype)
        if config.data.mean is None or config.data.std is None:
            raise UsageError(f"run {config.name!r} has no normalisation statistics in its config.")
        self.mean, self.std = moments_tensors(config.data.mean, config.data.std)

    @classmethod
    def from_pretrained(cls, name: str | Path, *, device: str = "auto") -> Model:
        """The same as `bridle.load`: an exported folder, a run, a model of the package, or `owner/name` on the hub."""
        return load(name, device=device)

    def save_pretrained(
        self, out: str | Path, *, data_licence: str | None = None, half: bool = False, overwrite: bool = False
    ) -> Path:
        """Write the model as a folder that `load` reads and others may use; see `folder` for what is in it."""
        write_folder(Path(out), self.trained(data_licence=data_licence), half=half, overwrite=overwrite)
        return Path(out)

    def push_to_hub(
        self, repo_id: str, *, data_licence: str | None = None, half: bool = False, private: bool = False
    ) -> str:
        """Put the model on the Hugging Face hub as `owner/name`; the address of the upload."""
        with TemporaryDirectory() as place:
            folder = self.save_pretrained(Path(place) / "model", data_licence=data_licence, half=half)
            return push(folder, repo_id, private=private)

    def trained(self, *, data_licence: str | None = None) -> Trained:
        """Networks, config and what is known of the model, for writing it down."""
        licence = data_licence or self.facts.data_licence
        return Trained(self.encoder, self.own_tokenizer, self.config, self.facts._replace(data_licence=licence))

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
        pool: Pooling | None = ...,
        axis: int | None = ...,
        batch: int = ...,
    ) -> Tensor: ...
    @overload
    def encode(
        self,
        x: ArrayLike,
        *,
        valid: ArrayLike | None = ...,
        layers: Sequence[int],
        pool: Pooling | None = ...,
        axis: int | None = ...,
        batch: int = ...,
    ) -> tuple[Tensor, ...]: ...
    @torch.no_grad()
    def encode(
        self,
        x: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        layers: int | Sequence[int] | None = None,
        pool: Pooling | None = None,
        axis: int | None = None,
        batch: int = ARRAY_BATCH,
    ) -> Tensor | tuple[Tensor, ...]:
        """Features of every token: (B, C, *input) -> (B, T, D) float32, `batch` inputs at a time; see `arrays` for x.

        `valid` (B, T) marks padding. `layers` takes the output of a block (1 to depth; only the last is normalised), or
        of several. `pool`: "mean" over the real tokens gives (B, D); "axis" keeps grid axis `axis` and gives
        (B, grid[axis] · D); "class" the class token (B, D). Token t lies at `token_positions[t]`.
        """
        kept = self._kept_axis(pool, axis)
        one = isinstance(layers, int | np.integer)
        wanted = None if layers is None else (int(layers),) if isinstance(layers, int | np.integer) else tuple(layers)
        parts = [self._encoded(part, wanted, pool, kept) for part in self._batches(x, valid, batch)]
        joined = tuple(torch.cat(same) for same in zip(*parts, strict=True))
        return joined if layers is not None and not one else joined[0]

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
        parts = (
            self.tokenizer.tokenize(self._normalised(part.x).to(self.tokenizer_dtype), valid=part.valid, stages=stages)
            for part in self._batches(x, valid, batch)
        )
        return torch.cat(list(parts))

    @torch.no_grad()
    def decode_codes(self, codes: Tensor | NDArray[Any], *, stages: int | None = None) -> Tensor:
        """The code vectors q of codes (…, M), summed over the first `stages`: (…, Dq)."""
        checked = code_tensor(codes, self.config.quantizer.sizes)
        return self.tokenizer.quantizer.decode(checked.to(self.device), stages=stages)

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
        workers: int = 0,
        on_error: OnError | None = None,
    ) -> Iterator[FileCodes]:
        """Codes of many files in order, decoded ahead by `workers` processes.

        A file that cannot be read ends it, or goes to `on_error(name, error)`.
        """
        for name, kept in self._collected(paths, self.codes_of(stages=stages), Kept, batch, workers, on_error):
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
        workers: int = 0,
        on_error: OnError | None = None,
    ) -> Iterator[FileFeatures]:
        """Features of many files in order, decoded ahead by `workers` processes.

        A file that cannot be read ends it, or goes to `on_error(name, error)`.
        """
        compute = self.features_of(layer=layer, class_token=pool == "class")
        if pool is not None:
            new_pool = partial(self.file_pool, pool, axis)
            for name, mean in self._collected(paths, compute, new_pool, batch, workers, on_error):
                yield FileFeatures(mean.mean(), None, None, name)
            return
        for name, kept in self._collected(paths, compute, Kept, batch, workers, on_error):
            rows = kept.joined()
            yield FileFeatures(rows.values, rows.times, rows.positions, name)

    def stream_codes(self, path: str | Path, *, stages: int | None = None, batch: int = BATCH) -> Iterator[FileCodes]:
        """Codes of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        for rows in stream_file(Path(path), self.reader, self.geometry, self.codes_of(stages=stages), batch=batch):
            yield FileCodes(rows.values, rows.times, rows.positions, name_of(Path(path)))

    def stream_features(
        self, path: str | Path, *, layer: int | None = None, batch: int = BATCH
    ) -> Iterator[FileFeatures]:
        """Features of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        for rows in stream_file(Path(path), self.reader, self.geometry, self.features_of(layer=layer), batch=batch):
            yield FileFeatures(rows.values, rows.times, rows.positions, name_of(Path(path)))

    @property
    def token_positions(self) -> NDArray[np.int64]:
        """(T, rank): the place of each token in the grid."""
        return token_positions(self.geometry)

    @property
    def token_starts(self) -> NDArray[np.int64]:
        """(T, rank): the first frame and band, row and column, … of each token's patch in the input."""
        return token_positions(self.geometry, patch=self.geometry.patch)

    @property
    def token_times(self) -> NDArray[np.float64] | None:
        """(T,) seconds into the input at which each token begins; None where frames have no rate of their own."""
        if modality_of(self.config).open_reader is None or self.reader.frame_seconds is None:
            return None
        return self.token_starts[:, 0].astype(np.float64) * self.reader.frame_seconds

    @cached_property
    def reader(self) -> Reader:
        """Reads files as this model's data was read."""
        return open_reader(self.config)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything the codes or features of a file depend on."""
        config = self.config
        seen = {"geometry": config.geometry, **settings_of(config)}
        settings: dict[str, Any] = {name: section.model_dump(mode="json") for name, section in seen.items()}
        settings["mean"], settings["std"] = self.mean.tolist(), self.std.tolist()
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for module in self._networks():
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

    def _collected(
        self,
        paths: Iterable[str | Path],
        compute: Compute,
        collector: Callable[[], Collected],
        batch: int,
        workers: int,
        on_error: OnError | None,
    ) -> Iterator[tuple[str, Collected]]:
        if isinstance(paths, str | Path):
            raise UsageError(f"{quoted(paths)} is a single path; give a list of them, or use the call for one file.")
        return collect_files(
            [Path(path) for path in paths],
            self.reader,
            self.geometry,
            compute,
            collector=collector,
            batch=batch,
            workers=workers,
            on_error=on_error,
        )

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

    def _encoded(
        self, part: Batch, wanted: tuple[int, ...] | None, pool: Pooling | None, axis: int | None
    ) -> tuple[Tensor, ...]:
        x = self._normalised(part.x).to(self.dtype)
        if wanted is None:
            found = [self.encoder(x, valid=part.valid)]
        else:
            found = self.encoder.layers(x, wanted=wanted, valid=part.valid)
        return tuple(self._pooled(encoded, part.valid, pool, axis).float() for encoded in found)

    def _batches(self, x: ArrayLike, valid: ArrayLike | None, batch: int) -> Iterator[Batch]:
        bytes_as_unit = modality_of(self.config).is_unit_range
        for part in batches(x, valid, self.geometry, size=batch, bytes_as_unit=bytes_as_unit):
            yield part._replace(valid=None if part.valid is None else part.valid.to(self.device))

    def _normalised(self, x: Tensor) -> Tensor:
        return normalise(x.cpu(), mean=self.mean, std=self.std).to(self.device)


def load(
    path: str | Path, *, iteration: int | None = None, device: str = "auto", dtype: torch.dtype = torch.float32
) -> Model:
    """The model of a run directory after its last finished encoder phase, or after that of `iteration`.

    `path` may also be an exported folder, the name of a model that comes with the package (`digits-tiny`), or the id
    `owner/name` of a model on the Hugging Face hub. `dtype` is that of the encoders, see `Model`.
    """
    trained = read_trained(find_model(path), iteration=iteration)
    return Model(trained, trained.config, device=choose_device(device), dtype=dtype)
