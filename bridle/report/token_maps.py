"""Token maps, typical patches and nearest neighbours of a run, from its last model and some of its data.

Shapes: N samples (C, *input), T tokens, M stages, K_m codes, Dq code width, D features.

Everything is a function of the run: samples are chosen by the run's seed, nothing is random. Data that cannot be opened
(moved, given from Python, unreadable) leaves a sentence instead of pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.config import Config
from bridle.config.schema import AugmentConfig
from bridle.data.build import open_data
from bridle.data.loading.loader import load_samples, moments_tensors, normalise, stack_valid
from bridle.data.loading.order import Order
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import modality_of
from bridle.data.sources import Audible, Sample, Sound, Source
from bridle.errors import BridleError, CheckpointError, DataError, UsageError
from bridle.models.build import Nets
from bridle.nn.pooling import mean_pool
from bridle.quantize.rules import stage_inputs
from bridle.report.gallery import CodeStrip, Gallery, Neighbours, Shown, TokenMap
from bridle.report.sample_pictures import Canvas, Limits, Picture, code_colors, data_uri, sound_uri
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.train.algorithm1 import restore_nets

POOL = (24, 384)  # fewest and most samples looked at
POOL_VALUES = 8_000_000  # numbers in all of them, between those bounds
BATCH = 32
MAPS, CODES, PATCHES, QUERIES, HITS = 4, 6, 8, 4, 5
MAP_SIZE, THUMBNAIL, STRIP = 480, 160, 512  # pixels, the longest side
SOUND_BYTES = 200_000
CRISP = 64  # pixels; smaller pictures are enlarged without smoothing


class Pool(NamedTuple):
    """The samples looked at, what they are called, and what the model says of them."""

    indices: list[int]
    samples: list[Sample]
    codes: Tensor  # (N, T, M)
    distances: Tensor  # (N, T, M), ‖v_m − c_m‖² of each stage's own input and code
    features: Tensor  # (N, D), mean over real tokens
    valid: Tensor | None  # (N, T)


def gallery_of(folder: Path) -> Gallery:
    """Pictures of a run's tokens, or why there are none."""
    try:
        config = RunFolder(folder).config()
        nets, iteration = last_nets(folder, config)
        return make_gallery(config, nets, iteration=iteration)
    except (BridleError, OSError) as error:
        return Gallery(note=f"No samples are shown: {error}")


def last_nets(folder: Path, config: Config) -> tuple[Nets, int]:
    """The networks of the last finished encoder phase that is whole, and its iteration."""
    problem: CheckpointError | None = None
    for path in reversed(RunFolder(folder).encoder_checkpoints(ends=True)):
        try:
            loaded = load_checkpoint(path)
            return restore_nets(config, loaded), int(loaded.state["iteration"])
        except CheckpointError as error:
            problem = error
    raise problem or UsageError("no encoder phase is finished yet.")


def make_gallery(config: Config, nets: Nets, *, iteration: int) -> Gallery:
    """Token maps, typical patches and neighbours of a run's own data."""
    geometry = config.geometry.build()
    kind = modality_of(config).drawing_of(geometry)
    if kind is None:
        return Gallery(note=f"No samples are shown: inputs with {geometry.rank} axes cannot be drawn.")
    plain = AugmentConfig(enabled=False)  # nothing is mixed either
    splits = open_data(config.model_copy(update={"augment": plain}))
    source = splits.train if splits.test is None else splits.test
    pool = look(config, nets, source)
    canvas = Canvas(geometry, kind=kind, limits=Limits.of(torch.stack([s.x for s in pool.samples]), kind))
    pictures = [canvas.draw(sample.x) for sample in pool.samples]
    gallery = Gallerist(nets, source, pool, canvas, pictures, root=config.data.root)
    part = "training" if splits.test is None else "test"
    return Gallery(
        about=f"{len(pool.samples)} {part} samples, model at the end of iter{iteration}",
        wide=canvas.width > 2 * canvas.height,
        crisp=kind != "line" and min(canvas.width, canvas.height) <= CRISP,
        maps=gallery.maps(),
        codes=gallery.codes(),
        neighbours=gallery.neighbours(),
    )


@torch.no_grad()
def look(config: Config, nets: Nets, source: Source) -> Pool:
    """Load some samples, evenly chosen, and run the model on them."""
    nets.encoder.eval()
    nets.tokenizer.eval()
    chosen = list(_readable(config, source))
    samples = [sample for _, sample in chosen]
    if not samples:
        raise DataError("none of the samples tried can be read.")
    mean, std = moments_tensors(*config.data.statistics)
    valid = stack_valid(samples)
    codes, distances, features = list[Tensor](), list[Tensor](), list[Tensor]()
    for at in range(0, len(samples), BATCH):
        x = normalise(torch.stack([sample.x for sample in samples[at : at + BATCH]]), mean=mean, std=std)
        real = None if valid is None else valid[at : at + BATCH]
        z_tilde = nets.tokenizer.encode(x, valid=real)  # (B, T, Dq)
        found = nets.tokenizer.quantizer.assign(z_tilde)  # (B, T, M)
        codes.append(found)
        distances.append(stage_distances(nets, z_tilde, found))
        features.append(mean_pool(nets.encoder(x, valid=real).z, real))
    indices = [index for index, _ in chosen]
    return Pool(indices, samples, torch.cat(codes), torch.cat(distances), torch.cat(features), valid)


def _readable(config: Config, source: Source) -> Iterator[tuple[int, Sample]]:
    fewest, most = POOL
    wanted = min(len(source), max(fewest, min(most, POOL_VALUES // prod(config.geometry.build().shape))))
    indices = Order(size=len(source), seed=config.seed, phase="report").at(range(wanted)).tolist()
    for index, sample in zip(indices, load_samples(source, indices, workers=config.data.workers), strict=True):
        if isinstance(sample, Sample):  # the quarantine list names files that cannot be read
            yield index, sample


def stage_distances(nets: Nets, z_tilde: Tensor, codes: Tensor) -> Tensor:
    """(B, T, M): how far each stage's input is from the code it was given."""
    quantizer = nets.tokenizer.quantizer
    rows, flat, vectors = z_tilde.flatten(0, 1), codes.flatten(0, 1), quantizer.code_vectors()

    def chosen(stage: int, v: Tensor) -> Tensor:
        return vectors[stage][flat[:, stage]]

    inputs = stage_inputs(rows, chosen, quantizer.residual, quantizer.codebooks)
    far = [(v - chosen(m, v)).square().sum(-1) for m, v in enumerate(inputs)]
    return torch.stack(far, -1).view(codes.shape)


class Gallerist:
    """Chooses what to show of a pool and draws it."""

    def __init__(
        self, nets: Nets, source: Source, pool: Pool, canvas: Canvas, pictures: list[Picture], *, root: str | None
    ) -> None:
        # A page that is passed on need not tell where on somebody's disk the data lies.
        self.prefix = "" if root is None else str(Path(root)) + "/"
        self.source, self.pool, self.canvas, self.pictures = source, pool, canvas, pictures
        self.colors = [code_colors(vectors) for vectors in nets.tokenizer.quantizer.code_vectors()]  # M of (K_m, 3)
        self.labels = [label_text(source, sample) for sample in pool.samples]

    def maps(self) -> list[TokenMap]:
        """The first samples of different labels, each with one tinted picture per stage."""
        found, chosen = [], self._varied(MAPS)
        for n, sound in zip(chosen, self._sounds(chosen), strict=True):
            valid = None if self.pool.valid is None else self.pool.valid[n]
            tinted = [
                self.canvas.tint(self.pictures[n], colors[self.pool.codes[n, :, m].numpy()], valid)
                for m, colors in enumerate(self.colors)
            ]
            shown = self._shown(n, size=MAP_SIZE)._replace(sound=sound)
            found.append(TokenMap(shown, [data_uri(picture, longest=MAP_SIZE) for picture in tinted]))
        return found

    def codes(self) -> list[list[CodeStrip]]:
        """For each stage some codes, from the most used to the rarest that have enough patches."""
        return [self._strips(m) for m in range(len(self.colors))]

    def neighbours(self) -> list[Neighbours]:
        """A few samples, and the others whose centred features point most nearly the same way."""
        if len(self.pool.samples) <= HITS:
            return []
        centred = self.pool.features - self.pool.features.mean(0)
        unit = torch.nn.functional.normalize(centred, dim=-1)
        found = []
        for n in self._varied(QUERIES):
            likeness = unit @ unit[n]
            likeness[n] = -torch.inf
            best = likeness.argsort(descending=True, stable=True)[:HITS].tolist()
            hits = [
                self._shown(hit)._replace(
                    score=float(likeness[hit]),
                    same=self.labels[hit] == self.labels[n] if self.labels[n] else None,
                )
                for hit in best
            ]
            found.append(Neighbours(self._shown(n), hits))
        return found

    def _varied(self, count: int) -> list[int]:
        """Samples of different labels first, then in order."""
        first = list({label: n for n, label in reversed(list(enumerate(self.labels)))}.values())
        rest = [n for n in range(len(self.labels)) if n not in set(first)]
        return [*sorted(first), *rest][:count]

    def _sounds(self, chosen: list[int]) -> list[str]:
        """What can be heard of some samples; files are decoded by a worker."""
        source = self.source
        if not isinstance(source, Audible):
            return [""] * len(chosen)
        sounds = map_in_order(source.listen, [self.pool.indices[n] for n in chosen], workers=1, records=(Sound,))
        return [sound_uri(wave, rate=rate, limit=SOUND_BYTES) for wave, rate in sounds]

    def _shown(self, n: int, *, size: int = THUMBNAIL) -> Shown:
        index = self.pool.indices[n]
        name = self.source.describe(index).removeprefix(self.prefix)
        return Shown(name, self.labels[n], data_uri(self.pictures[n], longest=size))

    def _strips(self, m: int) -> list[CodeStrip]:
        real = torch.ones(self.pool.codes.shape[:2], dtype=torch.bool) if self.pool.valid is None else self.pool.valid
        counts = torch.bincount(self.pool.codes[..., m][real], minlength=len(self.colors[m]))
        # Of a code that hardly any sample has there are no typical patches.
        order = [int(c) for c in counts.argsort(descending=True, stable=True) if counts[c] >= PATCHES]
        spread = sorted({round(i * (len(order) - 1) / max(1, CODES - 1)) for i in range(CODES)}) if order else []
        found = []
        for code in (order[place] for place in spread):
            patches = [(self.pictures[n], t) for n, t in self._nearest(m, code, real)]
            color = "#" + "".join(f"{v:02x}" for v in self.colors[m][code].tolist())
            share = float(counts[code] / counts.sum())
            found.append(CodeStrip(code, share, color, data_uri(self.canvas.strip(patches), longest=STRIP)))
        return found

    def _nearest(self, m: int, code: int, real: Tensor) -> list[tuple[int, int]]:
        """Sample and token of the patches nearest to a code, of each sample at most one while there are others."""
        away = self.pool.distances[..., m].masked_fill((self.pool.codes[..., m] != code) | ~real, torch.inf)
        closest, token = away.min(1)
        samples = closest.argsort(stable=True)[:PATCHES].tolist()
        found = [(n, int(token[n])) for n in samples if closest[n] < torch.inf]
        if len(found) < PATCHES:
            taken = set(found)
            for flat in away.flatten().argsort(stable=True).tolist():
                place = divmod(flat, away.shape[1])
                if len(found) == PATCHES or away[place] == torch.inf:
                    break
                if place not in taken:
                    found.append(place)
        return found


def label_text(source: Source, sample: Sample) -> str:
    """The names of a sample's labels; empty without any."""
    if sample.label is None:
        return ""
    numbers = [sample.label] if isinstance(sample.label, int) else np.flatnonzero(sample.label.numpy()).tolist()
    names = source.classes
    return ", ".join(str(n) if names is None or n >= len(names) else str(names[n]) for n in numbers)
