"""A trained model: features and codes of arrays and of files of any length, exports, the hub.

Shapes: x (B, C, *input) in the units of the data (images in 0 … 1); z (B, T, D); codes (B, T, M). Results of files are
numpy arrays with one row per token, see `file_rows`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.config import Config
from bridle.data.build import open_reader
from bridle.data.loading.loader import moments_tensors, normalise
from bridle.data.modality import modality_of, settings_of
from bridle.data.sources import Reader
from bridle.errors import UsageError, quoted
from bridle.export.folder import write_folder
from bridle.export.hub import find_model, push
from bridle.export.trained import Trained, facts_of_nets, read_trained, with_scores
from bridle.geometry import Geometry
from bridle.infer import arrays
from bridle.infer.arrays import ArrayLike, FileLike
from bridle.infer.feature_spec import FeatureOptions, FeatureSpec, Layer, PoolOptions, choose_features, probe_features
from bridle.infer.file_rows import Compute, FileCodes, FileFeatures, OnError, Rows, rows_of_files
from bridle.machine import choose_device
from bridle.models.build import Nets
from bridle.models.detokenizer import Detokenizer
from bridle.models.tokenizer import Tokenizer

ARRAY_BATCH = 64  # inputs of an array that go through the networks together
BATCH = 16  # windows of files that do


class EncodeOptions(PoolOptions, total=False):
    """Arguments of `Model.encode` beside the layers."""

    valid: ArrayLike | None
    batch: int


class Model:
    """Encoder and tokenizer of a run, in eval mode and without gradients, with the reader of its files."""

    def __init__(
        self,
        nets: Nets | Trained,
        config: Config,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        folder: Path | None = None,
        name: str | Path | None = None,
    ) -> None:
        """`dtype` is that of the encoders: float32, bfloat16 or float16; the quantizer is always float32.

        `folder` is the run or exported folder the model was read from, where a detokenizer is looked for;
        `name` is what it was called by, for messages.
        """
        self.config, self.device, self.dtype = config, device, arrays.require_dtype(dtype, device)
        self.geometry: Geometry = config.geometry.build()
        self.encoder, self.own_tokenizer, self.folder = nets.encoder, nets.own_tokenizer, folder
        self.name = name
        self.facts = nets.facts if isinstance(nets, Trained) else facts_of_nets(nets.own_tokenizer)
        self.run = nets.run if isinstance(nets, Trained) else None
        self.codec_folder = nets.detokenizer if isinstance(nets, Trained) else None
        for module in self._trained().modules().values():
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

    @classmethod
    def from_pretrained(cls, name: str | Path, *, device: str = "auto") -> Model:
        """The same as `bridle.load`: an exported folder, a run, a model of the package, or `owner/name` on the hub."""
        return load(name, device=device)

    def save_pretrained(
        self, out: str | Path, *, data_licence: str | None = None, half: bool = False, overwrite: bool = False
    ) -> Path:
        """Write the model as a folder that `load` reads and others may use; see `export/folder.py`."""
        write_folder(Path(out), self.trained(data_licence=data_licence), half=half, overwrite=overwrite)
        return Path(out)

    def push_to_hub(
        self, repo_id: str, *, data_licence: str | None = None, half: bool = False, private: bool = False
    ) -> str:
        """Put the model on the Hugging Face hub as `owner/name`; the address of the upload."""
        with TemporaryDirectory() as temporary:
            folder = self.save_pretrained(Path(temporary) / "model", data_licence=data_licence, half=half)
            return push(folder, repo_id, private=private)

    def trained(self, *, data_licence: str | None = None) -> Trained:
        """Networks, config and what is known of the model, with the run's scores, for an export."""
        trained = with_scores(self._trained())
        licence = data_licence or self.facts.data_licence
        return trained._replace(facts=trained.facts._replace(data_licence=licence))

    def _trained(self) -> Trained:
        return Trained(self.encoder, self.own_tokenizer, self.config, self.facts, self.run, self.codec_folder)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything the codes or features of a file depend on."""
        seen = {"geometry": self.config.geometry, **settings_of(self.config)}
        settings: dict[str, object] = {name: section.model_dump(mode="json") for name, section in seen.items()}
        settings |= {"mean": self.mean.tolist(), "std": self.std.tolist()}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for module in self._trained().modules().values():
            for key, tensor in sorted(module.state_dict().items()):
                digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    @overload
    def encode(self, x: ArrayLike, *, layers: Layer | None = ..., **options: Unpack[EncodeOptions]) -> Tensor: ...
    @overload
    def encode(
        self, x: ArrayLike, *, layers: Sequence[int], **options: Unpack[EncodeOptions]
    ) -> tuple[Tensor, ...]: ...
    @torch.no_grad()
    def encode(
        self,
        x: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        layers: Layer | Sequence[int] | None = None,
        batch: int = ARRAY_BATCH,
        **pooling: Unpack[PoolOptions],
    ) -> Tensor | tuple[Tensor, ...]:
        """Features of every token: (B, C, *input) -> (B, T, D) float32, `batch` inputs at a time; see `arrays` for x.

        `valid` (B, T) is False on padding. `layers` takes the output of a block (1 to depth; only the last is
        normalised), or of several; "stem" is what encoder.stem gives, and "all", with a pool, all of them side by side.
        `pool`: "mean" over the real tokens gives (B, D); "axis" keeps grid axis `axis` and gives (B, grid[axis] · D);
        `deviation=True` puts as many standard deviations behind; "class" is the class token (B, D); "probe" is what
        the run's probe used. Token t lies at `token_positions[t]`.
        """
        several = not (layers is None or isinstance(layers, int | str))
        chosen: Sequence[Layer | None] = [layers] if layers is None or isinstance(layers, int | str) else layers
        specs = [self.features(layer=layer, **pooling) for layer in chosen]
        pieces = [self._encoded(some, marks, specs) for some, marks in self._batches(x, valid, batch)]
        joined = tuple(torch.cat(same) for same in zip(*pieces, strict=True))
        return joined if several else joined[0]

    @torch.no_grad()
    def tokenize(
        self, x: ArrayLike, *, valid: ArrayLike | None = None, stages: int | None = None, batch: int = ARRAY_BATCH
    ) -> Tensor:
        """Codes of every token, stage by stage: (B, C, *input) -> (B, T, M), or of the first `stages` only.

        `batch` inputs at a time; see `arrays` for x. Token t lies at `token_positions[t]`.
        """
        pieces = self._batches(x, valid, batch)
        dtype = self.tokenizer_dtype
        return torch.cat([self.tokenizer.tokenize(some.to(dtype), valid=v, stages=stages) for some, v in pieces])

    def _batches(self, x: ArrayLike, valid: ArrayLike | None, batch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Normalised inputs and their marks, on the device."""
        as_unit = modality_of(self.config).is_unit_range
        for some, marks in arrays.batches(x, valid, self.geometry, size=batch, bytes_as_unit=as_unit):
            normalised = normalise(some.cpu(), mean=self.mean, std=self.std).to(self.device)
            yield normalised, None if marks is None else marks.to(self.device)

    def _encoded(self, x: Tensor, valid: Tensor | None, specs: Sequence[FeatureSpec]) -> tuple[Tensor, ...]:
        """The features that each spec asks for, from one pass; the specs differ in their layers alone."""
        wanted = [self.encoder.blocks(spec.layer) for spec in specs]
        found = iter(self.encoder.layers(x.to(self.dtype), wanted=[n for own in wanted for n in own], valid=valid))
        read = [[next(found) for _ in own] for own in wanted]
        grid = self.geometry.grid
        return tuple(spec.pooled(blocks, grid, valid).float() for blocks, spec in zip(read, specs, strict=True))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; an encoder from elsewhere, or one that was trained to predict patches, has none."""
        if self.own_tokenizer is None:
            raise UsageError(
                f"model {quoted(self.config.name)} has no tokenizer, so it gives no codes; use encode or "
                "`bridle embed`, or a run with loss.target=codes."
            )
        return self.own_tokenizer

    @torch.no_grad()
    def decode_codes(self, codes: ArrayLike, *, stages: int | None = None) -> Tensor:
        """The code vectors q of codes (…, M), summed over the first `stages`: (…, Dq)."""
        checked = arrays.code_tensor(codes, self.config.quantizer.sizes)
        return self.tokenizer.quantizer.decode(checked.to(self.device), stages=stages)

    @torch.no_grad()
    def decode_to_input(
        self, codes: ArrayLike, *, valid: ArrayLike | None = None, stages: int | None = None, batch: int = ARRAY_BATCH
    ) -> Tensor:
        """Inputs (B, C, *input) in the data's own units, rebuilt from codes (B, T, m) by the run's detokenizer.

        m ≤ M stages may be given, and `stages` decodes only the first of them; `valid` (B, T) marks padding. A
        detokenizer is trained with `bridle detokenizer RUN`.
        """
        checked = arrays.code_tensor(codes, self.config.quantizer.sizes)
        books = len(self.config.quantizer.sizes)
        fits = checked.dim() == 3 and checked.shape[1] == self.geometry.tokens and 1 <= checked.shape[2] <= books
        if not fits or not len(checked):
            raise UsageError(
                f"codes have shape {list(checked.shape)}; expected (B, {self.geometry.tokens}, stages), at least one, "
                f"and 1 to {books} stages."
            )
        marks = None if valid is None else torch.as_tensor(valid).bool()
        kept, found = min(stages or checked.shape[-1], checked.shape[-1]), []
        for rows in torch.arange(len(checked)).split(batch):
            q = self.decode_codes(checked[rows], stages=stages)
            counts = torch.full((len(rows),), kept, device=self.device)
            real = None if marks is None else marks[rows].to(self.device)
            found.append(self.detokenizer(q, stages=counts, valid=real).cpu())
        shape = (-1, *[1] * self.geometry.rank)
        return torch.cat(found) * self.std.reshape(shape) + self.mean.reshape(shape)

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """The network from codes to inputs; UsageError names the command that trains one."""
        from bridle.train.detokenizer_phase import read_detokenizer

        if self.folder is None:
            raise UsageError("this model was built in memory; a detokenizer belongs to a run: use bridle.load(RUN).")
        return read_detokenizer(self.folder, self.config, self.facts.iteration, device=self.device, name=self.name)

    @property
    def token_positions(self) -> NDArray[np.int64]:
        """(T, rank): the grid position of each token."""
        return arrays.token_positions(self.geometry)

    @property
    def token_starts(self) -> NDArray[np.int64]:
        """(T, rank): the first frame and band, row and column, … of each token's patch in the input."""
        return arrays.token_positions(self.geometry) * np.array(self.geometry.patch, dtype=np.int64)

    @property
    def token_times(self) -> NDArray[np.float64] | None:
        """(T,) seconds into the input at which each token begins; None where frames have no rate of their own."""
        if modality_of(self.config).open_reader is None or self.reader.frame_seconds is None:
            return None
        return self.token_starts[:, 0].astype(np.float64) * self.reader.frame_seconds

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
        """x, valid -> features (B, T, D) float32, or pooled (B, W)."""

        @torch.no_grad()
        def compute(x: Tensor, valid: Tensor | None) -> NDArray[np.float32]:
            ((some, marks),) = self._batches(x, valid, len(x))
            (z,) = self._encoded(some, marks, [spec])
            return cast("NDArray[np.float32]", z.cpu().numpy())

        return compute

    @cached_property
    def reader(self) -> Reader:
        """Reads files as this model's data was read."""
        return open_reader(self.config)

    def embed(
        self, inputs: ArrayLike | FileLike | Iterable[FileLike], *, batch: int = BATCH, workers: int = 0
    ) -> NDArray[np.float32]:
        """One vector per input, pooled as the run's probe does: (N, W), or (W,) for a single input.

        Inputs are arrays (N, C, *input), or files: paths, bytes, or open binary files.
        """
        if isinstance(inputs, Tensor | np.ndarray):
            z: NDArray[np.float32] = self.encode(inputs, pool="probe", batch=batch).cpu().numpy()
            return z[0] if inputs.ndim == len(self.geometry.shape) else z
        if arrays.is_file(inputs):
            return self.encode_file(inputs, pool="probe", batch=batch).z
        files = cast("Iterable[FileLike]", inputs)
        vectors = [found.z for found in self.encode_files(files, pool="probe", batch=batch, workers=workers)]
        width = self.probe_spec.width(self.encoder)
        return np.stack(vectors) if vectors else np.zeros((0, width), np.float32)

    def tokenize_file(self, file: FileLike, *, stages: int | None = None, batch: int = BATCH) -> FileCodes:
        """Codes of a file of any length (a path, bytes or an open file), with the time and position of every token."""
        (found,) = self.tokenize_files([file], stages=stages, batch=batch)
        return found

    def encode_file(self, file: FileLike, *, batch: int = BATCH, **features: Unpack[FeatureOptions]) -> FileFeatures:
        """Features of a file of any length, with the time and position of every token, or pooled; see `encode`."""
        (found,) = self.encode_files([file], batch=batch, **features)
        return found

    def tokenize_waveform(self, x: ArrayLike, rate: int, *, stages: int | None = None) -> FileCodes:
        """Codes of a waveform (N,) or (channels, N) of any length, sampled at `rate` Hz."""
        with arrays.waveform_file(x, rate, self.reader) as path:
            return self.tokenize_file(path, stages=stages)._replace(name="waveform")

    def encode_waveform(self, x: ArrayLike, rate: int, **features: Unpack[FeatureOptions]) -> FileFeatures:
        """Features of a waveform (N,) or (channels, N) of any length, sampled at `rate` Hz; see `encode`."""
        with arrays.waveform_file(x, rate, self.reader) as path:
            return self.encode_file(path, **features)._replace(name="waveform")

    def tokenize_files(
        self,
        files: Iterable[FileLike],
        *,
        stages: int | None = None,
        batch: int = BATCH,
        workers: int = 0,
        on_error: OnError | None = None,
    ) -> Iterator[FileCodes]:
        """Codes of many files in order, decoded ahead by `workers` processes.

        A file that cannot be read ends it, or goes to `on_error(name, error)`.
        """
        compute = self.codes_of(stages=stages)
        for name, rows in self._rows(files, compute, batch=batch, workers=workers, on_error=on_error):
            yield FileCodes(*rows, name)

    def encode_files(
        self,
        files: Iterable[FileLike],
        *,
        batch: int = BATCH,
        workers: int = 0,
        on_error: OnError | None = None,
        **features: Unpack[FeatureOptions],
    ) -> Iterator[FileFeatures]:
        """Features of many files in order; see `tokenize_files` and `encode`."""
        spec = self.features(**features)
        compute = self.features_of(spec)
        for name, rows in self._rows(files, compute, spec, batch=batch, workers=workers, on_error=on_error):
            yield FileFeatures(*rows, name)

    def stream_codes(self, path: str | Path, *, stages: int | None = None, batch: int = BATCH) -> Iterator[FileCodes]:
        """Codes of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        for name, rows in self._rows([path], self.codes_of(stages=stages), batch=batch, stream=True):
            yield FileCodes(*rows, name)

    def stream_features(
        self, path: str | Path, *, layer: int | None = None, batch: int = BATCH
    ) -> Iterator[FileFeatures]:
        """Features of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        compute = self.features_of(self.features(layer=layer))
        for name, rows in self._rows([path], compute, batch=batch, stream=True):
            yield FileFeatures(*rows, name)

    def _rows(
        self, files: Iterable[FileLike], compute: Compute, spec: FeatureSpec | None = None, **options: Any
    ) -> Iterator[tuple[str, Rows]]:
        if isinstance(files, str | Path):
            raise UsageError(f"{quoted(files)} is a single path; give a list of them, or use the call for one file.")
        with arrays.as_paths(files, self.reader) as paths:
            pooled = None if spec is None else spec.layout(self.encoder)
            yield from rows_of_files(paths, self.reader, self.geometry, compute, pooled, **options)


def load(
    path: str | Path, *, iteration: int | None = None, device: str = "auto", dtype: torch.dtype = torch.float32
) -> Model:
    """The model of a run directory after its last finished encoder phase, or after that of `iteration`.

    `path` may also be an exported folder, the name of a model that comes with the package (`digits-tiny`), or the id
    `owner/name` of a model on the Hugging Face hub. `dtype` is that of the encoders, see `Model`.
    """
    folder = find_model(path)
    trained = read_trained(folder, iteration=iteration)
    return Model(trained, trained.config, device=choose_device(device), dtype=dtype, folder=folder, name=path)
