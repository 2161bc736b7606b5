"""A trained model: features and codes of arrays and of files of any length, exports, the hub.

Results of files are numpy arrays with one row per token, see `files`; methods on arrays are those of `FrozenNetworks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.config import Config
from bridle.data.build import open_reader
from bridle.data.modality import modality_of
from bridle.data.sources import Reader
from bridle.errors import UsageError, quoted
from bridle.export.folder import write_folder
from bridle.export.hub import find_model, push
from bridle.export.load import Trained, facts_of_nets, read_trained, with_scores
from bridle.infer.arrays import ArrayLike, FileLike, as_paths, code_tensor, is_file, waveform_file
from bridle.infer.features import FeatureOptions
from bridle.infer.files import (
    Collector,
    Compute,
    FileCodes,
    FileFeatures,
    MeanCollector,
    OnError,
    TokenCollector,
    collect_files,
    name_of,
    stream_file,
)
from bridle.infer.frozen import ARRAY_BATCH, FrozenNetworks
from bridle.machine import choose_device
from bridle.models.build import Nets
from bridle.models.detokenizer import Detokenizer

BATCH = 16  # windows that go through the networks together


class Model(FrozenNetworks):
    """Encoder and tokenizer of a run, with the reader of its files."""

    def __init__(
        self,
        nets: Nets | Trained,
        config: Config,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        folder: Path | None = None,
    ) -> None:
        """`dtype` is that of the encoders: float32, bfloat16 or float16; the quantizer is always float32.

        `folder` is the run or exported folder the model was read from, where a detokenizer is looked for.
        """
        super().__init__(nets, config, device=device, dtype=dtype)
        self.folder = folder
        self.facts = nets.facts if isinstance(nets, Trained) else facts_of_nets(nets.own_tokenizer)
        self.run = nets.run if isinstance(nets, Trained) else None

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
        with TemporaryDirectory() as temporary:
            folder = self.save_pretrained(Path(temporary) / "model", data_licence=data_licence, half=half)
            return push(folder, repo_id, private=private)

    def trained(self, *, data_licence: str | None = None) -> Trained:
        """Networks, config and what is known of the model, for writing it down."""
        licence = data_licence or self.facts.data_licence
        facts = self.facts._replace(data_licence=licence)
        return with_scores(Trained(self.encoder, self.own_tokenizer, self.config, facts, self.run))

    def embed(
        self, inputs: ArrayLike | FileLike | Iterable[FileLike], *, batch: int = BATCH, workers: int = 0
    ) -> NDArray[np.float32]:
        """One vector per input, pooled as the run's probe does: (N, W), or (W,) for a single input.

        Inputs are arrays (N, C, *input), or files: paths, bytes, or open binary files.
        """
        if isinstance(inputs, Tensor | np.ndarray):
            z: NDArray[np.float32] = self.encode(inputs, pool="probe", batch=batch).cpu().numpy()
            return z[0] if inputs.ndim == len(self.geometry.shape) else z
        if is_file(inputs):
            return self.encode_file(inputs, pool="probe", batch=batch).z
        files = cast("Iterable[FileLike]", inputs)
        vectors = [found.z for found in self.encode_files(files, pool="probe", batch=batch, workers=workers)]
        width = self.probe_spec.width(self.encoder.width, self.geometry.grid)
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
        with waveform_file(x, rate, self.reader) as path:
            return self.tokenize_file(path, stages=stages)._replace(name="waveform")

    def encode_waveform(self, x: ArrayLike, rate: int, **features: Unpack[FeatureOptions]) -> FileFeatures:
        """Features of a waveform (N,) or (channels, N) of any length, sampled at `rate` Hz; see `encode`."""
        with waveform_file(x, rate, self.reader) as path:
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
        for name, found in self._collected(files, compute, self._token_collector, batch, workers, on_error):
            rows = found.joined()
            yield FileCodes(rows.values, rows.times, rows.positions, name)

    def encode_files(
        self,
        files: Iterable[FileLike],
        *,
        batch: int = BATCH,
        workers: int = 0,
        on_error: OnError | None = None,
        **features: Unpack[FeatureOptions],
    ) -> Iterator[FileFeatures]:
        """Features of many files in order, decoded ahead by `workers` processes; see `encode`.

        A file that cannot be read ends it, or goes to `on_error(name, error)`.
        """
        spec = self.features(**features)
        compute = self.features_of(spec)
        if spec.pool is not None:
            collector = partial(MeanCollector, self.geometry, spec.axis)
            for name, pooled in self._collected(files, compute, collector, batch, workers, on_error):
                yield FileFeatures(pooled.mean(), None, None, name)
            return
        for name, found in self._collected(files, compute, self._token_collector, batch, workers, on_error):
            rows = found.joined()
            yield FileFeatures(rows.values, rows.times, rows.positions, name)

    def stream_codes(self, path: str | Path, *, stages: int | None = None, batch: int = BATCH) -> Iterator[FileCodes]:
        """Codes of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        for rows in stream_file(Path(path), self.reader, self.geometry, self.codes_of(stages=stages), batch=batch):
            yield FileCodes(rows.values, rows.times, rows.positions, name_of(Path(path)))

    def stream_features(
        self, path: str | Path, *, layer: int | None = None, batch: int = BATCH
    ) -> Iterator[FileFeatures]:
        """Features of a long file piece by piece, `batch` windows at a time, in memory that does not grow."""
        compute = self.features_of(self.features(layer=layer))
        for rows in stream_file(Path(path), self.reader, self.geometry, compute, batch=batch):
            yield FileFeatures(rows.values, rows.times, rows.positions, name_of(Path(path)))

    @torch.no_grad()
    def decode_to_input(
        self,
        codes: Tensor | NDArray[Any],
        *,
        valid: Tensor | NDArray[Any] | None = None,
        stages: int | None = None,
        batch: int = ARRAY_BATCH,
    ) -> Tensor:
        """Inputs (B, C, *input) in the data's own units, rebuilt from codes (B, T, m) by the run's detokenizer.

        m ≤ M stages may be given, and `stages` decodes only the first of them; `valid` (B, T) marks padding. A
        detokenizer is trained with `bridle detokenizer RUN`.
        """
        checked = code_tensor(codes, self.config.quantizer.sizes)
        if checked.dim() != 3 or checked.shape[1] != self.geometry.tokens or not len(checked):
            raise UsageError(
                f"codes have shape {list(checked.shape)}; expected (B, {self.geometry.tokens}, stages), at least one."
            )
        marks = None if valid is None else torch.as_tensor(valid).bool()
        found = []
        for rows in torch.arange(len(checked)).split(batch):
            some = checked[rows].to(self.device)
            q = self.decode_codes(some, stages=stages)
            counts = torch.full((len(some),), min(stages or some.shape[-1], some.shape[-1]), device=self.device)
            real = None if marks is None else marks[rows].to(self.device)
            found.append(self.detokenizer(q, stages=counts, valid=real).cpu())
        shape = (-1, *[1] * self.geometry.rank)
        return torch.cat(found) * self.std.reshape(shape) + self.mean.reshape(shape)

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """The network from codes to inputs; UsageError names the command that trains one."""
        from bridle.infer.detokenizer import read_detokenizer

        if self.folder is None:
            raise UsageError("this model was built in memory; a detokenizer belongs to a run: use bridle.load(RUN).")
        return read_detokenizer(self.folder, self.config, self.facts.iteration, device=self.device)

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

    def _token_collector(self) -> TokenCollector:
        return TokenCollector(self.reader, self.geometry)

    def _collected(
        self,
        files: Iterable[FileLike],
        compute: Compute,
        collector: Callable[[], Collector],
        batch: int,
        workers: int,
        on_error: OnError | None,
    ) -> Iterator[tuple[str, Collector]]:
        if isinstance(files, str | Path):
            raise UsageError(f"{quoted(files)} is a single path; give a list of them, or use the call for one file.")
        with as_paths(files, self.reader) as paths:
            yield from collect_files(
                paths,
                self.reader,
                compute,
                collector=collector,
                batch=batch,
                workers=workers,
                on_error=on_error,
            )


def load(
    path: str | Path, *, iteration: int | None = None, device: str = "auto", dtype: torch.dtype = torch.float32
) -> Model:
    """The model of a run directory after its last finished encoder phase, or after that of `iteration`.

    `path` may also be an exported folder, the name of a model that comes with the package (`digits-tiny`), or the id
    `owner/name` of a model on the Hugging Face hub. `dtype` is that of the encoders, see `Model`.
    """
    folder = find_model(path)
    trained = read_trained(folder, iteration=iteration)
    return Model(trained, trained.config, device=choose_device(device), dtype=dtype, folder=folder)
