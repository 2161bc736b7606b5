"""Token maps, dictionary of codes, decoded samples and nearest neighbours: a run's last model on some of its data.

Shapes: N samples (C, *input), T tokens, M stages, K_m codes, Dq code width, D features.

Every picture and sound is a `data:` address. Everything is a function of the run: samples are chosen by the run's seed,
nothing is random. Data that cannot be opened (moved, given from Python, unreadable) leaves a sentence instead.
"""

from __future__ import annotations

import collections
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.config import Config
from bridle.config.data_schema import AugmentConfig
from bridle.data.build import open_data
from bridle.data.loading.loader import load_samples, moments_tensors, normalise, stack_valid
from bridle.data.loading.order import Order
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import modality_of
from bridle.data.sources import Audible, Sample, Sound, Source
from bridle.errors import BridleError, CheckpointError, DataError, UsageError
from bridle.evaluate.reconstruction.rate import Codec, open_codec
from bridle.models.build import require_tokenizer
from bridle.models.encoder import Encoder
from bridle.models.tokenizer import Tokenizer
from bridle.nn.pooling import mean_pool
from bridle.quantize import ResidualQuantizer
from bridle.quantize.rules import stage_inputs
from bridle.report.decoded import SOUND_BYTES as DECODED_BYTES
from bridle.report.decoded import CodeAlone, Decoder, SideBySide, place_map
from bridle.report.sample_pictures import Canvas, Picture, code_colors, data_uri, limits_of, sound_uri
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RESULT
from bridle.runs.trackers import Picture as TrackedPicture
from bridle.train.algorithm1 import restore_frozen

POOL = (24, 384)  # fewest and most samples looked at
POOL_VALUES = 8_000_000  # numbers in all of them, between those bounds
BATCH = 32
MAPS, CODES, PATCHES, QUERIES, HITS = 4, 6, 8, 4, 5
DECODED, LABELS = 3, 2  # samples side by side with their reconstructions; labels named for a code
MAP_SIZE, THUMBNAIL, STRIP = 480, 160, 512  # pixels, the longest side
SOUND_BYTES = 200_000
CRISP = 64  # pixels; smaller pictures are enlarged without smoothing


class Shown(NamedTuple):
    """One sample."""

    name: str
    label: str  # empty where there is none
    picture: str
    sound: str = ""  # empty where there is nothing to play
    score: float | None = None  # cosine similarity with the query
    same: bool | None = None  # has it the query's label? None where there are no labels


class TokenMap(NamedTuple):
    """A sample and, for every stage, the sample with its patches in the colours of their codes."""

    sample: Shown
    stages: list[str]


class CodeStrip(NamedTuple):
    """One code: the patches nearest to it, how often and where it occurs, with which labels, and what it decodes to."""

    code: int
    share: float  # of the tokens looked at
    color: str  # "#rrggbb", as in the token maps
    patches: str
    where: str = ""  # how often at each place of the grid
    labels: str = ""  # the commonest labels of its samples; empty without labels
    alone: CodeAlone | None = None  # None without a detokenizer


class Neighbours(NamedTuple):
    """A sample and those whose features are most like its own, the most similar first."""

    query: Shown
    hits: list[Shown]


class Gallery(NamedTuple):
    """All there is to see of a run's data, or in `note` why there is nothing."""

    note: str = ""
    about: str = ""  # which samples, and which tokenizer and encoder
    wide: bool = False  # pictures are much wider than high
    crisp: bool = False  # pictures are so small that their pixels should show
    maps: list[TokenMap] = []  # noqa: RUF012 - never changed
    codes: list[list[CodeStrip]] = []  # noqa: RUF012 - one list per stage
    neighbours: list[Neighbours] = []  # noqa: RUF012
    decoded: list[SideBySide] = []  # noqa: RUF012


def gallery_of(folder: Path) -> Gallery:
    """Pictures of a run's tokens, or why there are none."""
    try:
        config = RunFolder(folder).config()
        encoder, tokenizer, iteration = last_networks(folder, config)
        codec = None
        if (RunFolder(folder).detokenizer(iteration).path / RESULT).is_file():
            codec = open_codec(folder, config, tokenizer, iteration)
        return make_gallery(config, encoder, tokenizer, iteration=iteration, codec=codec)
    except (BridleError, OSError) as error:
        return Gallery(note=f"No samples are shown: {error}")


def last_networks(folder: Path, config: Config) -> tuple[Encoder, Tokenizer, int]:
    """Encoder and tokenizer of the last finished encoder phase that is whole, and its iteration."""
    problem: CheckpointError | None = None
    for path in reversed(RunFolder(folder).encoder_checkpoints(ends=True)):
        try:
            loaded = load_checkpoint(path)
            encoder, tokenizer = restore_frozen(config, loaded)
        except CheckpointError as error:
            problem = error
            continue
        return encoder.eval(), require_tokenizer(tokenizer).eval(), int(loaded.state["iteration"])
    raise problem or UsageError("no encoder phase is finished yet.")


def token_pictures(folder: Path) -> list[tuple[str, TrackedPicture]]:
    """Some samples for a tracker, each beside its token map of every stage; none where they cannot be shown."""
    try:
        config = RunFolder(folder).config()
        encoder, tokenizer, _ = last_networks(folder, config)
        found = open_pool(config, encoder, tokenizer, most=POOL[0])
    except (BridleError, OSError):
        return []
    if isinstance(found, str):
        return []
    pool = found[0]
    return [(f"token_maps/{n + 1}", TrackedPicture(*pool.map_row(at))) for n, at in enumerate(pool.varied(MAPS))]


def open_pool(config: Config, encoder: Encoder, tokenizer: Tokenizer, *, most: int = POOL[1]) -> tuple[Pool, str] | str:
    """Samples of a run's own data and of which part they are, or why they cannot be drawn."""
    geometry = config.geometry.build()
    kind = modality_of(config).drawing_of(geometry)
    if kind is None:
        return f"inputs with {geometry.rank} axes cannot be drawn."
    plain = AugmentConfig(enabled=False)  # nothing is mixed either
    splits = open_data(config.model_copy(update={"augment": plain}))
    source, part = (splits.train, "training") if splits.test is None else (splits.test, "test")
    chosen = choose_samples(config, source, most=most)
    canvas = Canvas(geometry, kind=kind, limits=limits_of(torch.stack([s.x for s in chosen.values()]), kind))
    return Pool(config, encoder, tokenizer, source, chosen, canvas), part


def make_gallery(
    config: Config, encoder: Encoder, tokenizer: Tokenizer, *, iteration: int, codec: Codec | None = None
) -> Gallery:
    """Token maps, dictionary of codes and neighbours of a run's own data; with a codec also decoded samples."""
    found = open_pool(config, encoder, tokenizer)
    if isinstance(found, str):
        return Gallery(note=f"No samples are shown: {found}")
    (pool, part), canvas = found, found[0].canvas
    decoder = None if codec is None else Decoder(config, codec, canvas)
    return Gallery(
        about=f"{len(pool.samples)} {part} samples, model at the end of iter{iteration}",
        wide=canvas.width > 2 * canvas.height,
        crisp=canvas.kind != "line" and min(canvas.width, canvas.height) <= CRISP,
        maps=pool.maps(),
        codes=[pool.strips(m, decoder) for m in range(tokenizer.quantizer.codebooks)],
        neighbours=pool.neighbours(),
        decoded=[] if decoder is None else pool.side_by_side(decoder),
    )


def choose_samples(config: Config, source: Source, *, most: int = POOL[1]) -> dict[int, Sample]:
    """Some samples by their index, evenly chosen; those that cannot be read are left out."""
    wanted = min(len(source), max(POOL[0], min(most, POOL_VALUES // prod(config.geometry.build().shape))))
    indices = Order(size=len(source), seed=config.seed, phase="report").at(range(wanted)).tolist()
    tried = zip(indices, load_samples(source, indices, workers=config.data.workers), strict=True)
    found = {index: sample for index, sample in tried if isinstance(sample, Sample)}
    if not found:
        raise DataError("none of the samples tried can be read.")
    return found


def stage_distances(quantizer: ResidualQuantizer, z_tilde: Tensor, codes: Tensor) -> Tensor:
    """(B, T, M): how far each stage's input is from the code it was given, ‖v_m − c_m‖²."""
    rows, flat, vectors = z_tilde.flatten(0, 1), codes.flatten(0, 1), quantizer.code_vectors()

    def chosen(stage: int, v: Tensor) -> Tensor:
        return vectors[stage][flat[:, stage]]

    inputs = stage_inputs(rows, chosen, quantizer.residual, quantizer.codebooks)
    far = [(v - chosen(m, v)).square().sum(-1) for m, v in enumerate(inputs)]
    return torch.stack(far, -1).view(codes.shape)


class Pool:
    """The samples looked at, and what the model makes of them: codes and distances (N, T, M), mean features (N, D)."""

    @torch.no_grad()
    def __init__(
        self,
        config: Config,
        encoder: Encoder,
        tokenizer: Tokenizer,
        source: Source,
        chosen: dict[int, Sample],
        canvas: Canvas,
    ) -> None:
        samples, quantizer = list(chosen.values()), tokenizer.quantizer
        self.samples, self.quantizer = samples, quantizer
        self.source, self.canvas, self.indices = source, canvas, list(chosen)
        # A page that is passed on need not tell where on somebody's disk the data lies.
        self.prefix = "" if config.data.root is None else str(Path(config.data.root)) + "/"
        self.pictures = [canvas.draw(sample.x) for sample in samples]
        self.labels = [label_text(source, sample) for sample in samples]
        self.colors = [code_colors(vectors) for vectors in quantizer.code_vectors()]  # M of (K_m, 3)
        self.valid = stack_valid(samples)  # (N, T)
        mean, std = moments_tensors(*config.data.statistics)
        codes, distances, features = list[Tensor](), list[Tensor](), list[Tensor]()
        for at in range(0, len(samples), BATCH):
            x = normalise(torch.stack([sample.x for sample in samples[at : at + BATCH]]), mean=mean, std=std)
            real = None if self.valid is None else self.valid[at : at + BATCH]
            z_tilde = tokenizer.encode(x, valid=real)  # (B, T, Dq)
            codes.append(quantizer.assign(z_tilde))
            distances.append(stage_distances(quantizer, z_tilde, codes[-1]))
            features.append(mean_pool(encoder(x, valid=real).z, real))
        self.codes, self.distances, self.features = torch.cat(codes), torch.cat(distances), torch.cat(features)

    def maps(self) -> list[TokenMap]:
        """The first samples of different labels, each with one tinted picture per stage."""
        found, chosen = [], self.varied(MAPS)
        for n, sound in zip(chosen, self._sounds(chosen), strict=True):
            shown = self._shown(n, size=MAP_SIZE)._replace(sound=sound)
            found.append(TokenMap(shown, [data_uri(picture, longest=MAP_SIZE) for picture in self._tinted(n)]))
        return found

    def map_row(self, n: int) -> tuple[NDArray[np.uint8], str]:
        """Sample n and its map of every stage side by side on white, (H, W, 3), and what the sample is called."""
        row = np.concatenate([self.pictures[n], *self._tinted(n)], axis=1)
        opaque = row[..., 3:] / 255
        pixels = (row[..., :3] * opaque + 255 * (1 - opaque)).astype(np.uint8)
        pixels = np.kron(pixels, np.ones((max(1, CRISP // len(pixels)),) * 2 + (1,), np.uint8))
        return pixels, " ".join(filter(None, (self._name(n), self.labels[n])))

    def _tinted(self, n: int) -> list[Picture]:
        valid = None if self.valid is None else self.valid[n]
        colors = [book[self.codes[n, :, m].numpy()] for m, book in enumerate(self.colors)]  # M of (T, 3)
        return [self.canvas.tint(self.pictures[n], own, valid) for own in colors]

    def neighbours(self) -> list[Neighbours]:
        """A few samples, and the others whose centred features point most nearly the same way."""
        if len(self.indices) <= HITS:
            return []
        unit = torch.nn.functional.normalize(self.features - self.features.mean(0), dim=-1)
        found = []
        for n in self.varied(QUERIES):
            likeness, label = unit @ unit[n], self.labels[n]
            likeness[n] = -torch.inf
            hits = []
            for hit in likeness.argsort(descending=True, stable=True)[:HITS].tolist():
                same = self.labels[hit] == label if label else None
                hits.append(self._shown(hit)._replace(score=float(likeness[hit]), same=same))
            found.append(Neighbours(self._shown(n), hits))
        return found

    def side_by_side(self, decoder: Decoder) -> list[SideBySide]:
        """The first samples of different labels beside their reconstructions."""
        chosen = self.varied(DECODED)
        return [
            SideBySide(self._name(n), self.labels[n], decoder.versions(self.samples[n], sound))
            for n, sound in zip(chosen, self._sounds(chosen, limit=DECODED_BYTES), strict=True)
        ]

    def strips(self, m: int, decoder: Decoder | None = None) -> list[CodeStrip]:
        """Some codes of stage m, from the most used to the rarest that have enough patches."""
        codes = self.codes[..., m] if self.valid is None else self.codes[..., m].masked_fill(~self.valid, -1)  # (N, T)
        counts = torch.bincount(codes[codes >= 0], minlength=len(self.colors[m]))
        # Of a code that hardly any sample has there are no typical patches.
        order = [int(c) for c in counts.argsort(descending=True, stable=True) if counts[c] >= PATCHES]
        spread = sorted({round(i * (len(order) - 1) / max(1, CODES - 1)) for i in range(CODES)}) if order else []
        real = codes >= 0
        earlier = self.quantizer.decode(self.codes[real], stages=m).mean(0) if m else torch.zeros(self.quantizer.width)
        found = []
        for code in (order[place] for place in spread):
            away = self.distances[..., m].masked_fill(codes != code, torch.inf)  # (N, T)
            nearest = away.flatten().argsort(stable=True)[: int(counts[code])]
            places = [divmod(flat, away.shape[1]) for flat in nearest.tolist()]  # sample and token, nearest first
            first = {n: t for n, t in reversed(places)}  # the nearest token of each sample
            # Of each sample at most one patch while there are others.
            shown = sorted(places, key=lambda place: first[place[0]] != place[1])[:PATCHES]
            patches = self.canvas.strip([(self.pictures[n], t) for n, t in shown])
            shade = tuple(self.colors[m][code].tolist())
            where = place_map((codes == code).sum(0), self.canvas.geometry, self.canvas, shade)
            strip = CodeStrip(
                code=code,
                share=float(counts[code] / counts.sum()),
                color="#" + "".join(f"{v:02x}" for v in shade),
                patches=data_uri(patches, longest=STRIP),
                where=data_uri(where, longest=STRIP),
                labels=self._label_shares((codes == code).sum(1)),
                alone=None if decoder is None else decoder.alone(code, m, earlier),
            )
            found.append(strip)
        return found

    def _label_shares(self, counts: Tensor) -> str:
        """The commonest labels of a code that occurs so often (N,) in each sample: "dog 42 %, rain 12 %"."""
        shares = collections.Counter[str]()
        for label, count in zip(self.labels, counts.tolist(), strict=True):
            shares[label] += count
        common = [(label, share) for label, share in shares.most_common(LABELS) if label and share]
        return ", ".join(
            f"{label} {100 * share / sum(shares.values()):.0f}\N{NO-BREAK SPACE}%" for label, share in common
        )

    def varied(self, count: int) -> list[int]:
        """Samples of different labels first, then in order."""
        first = list({label: n for n, label in reversed(list(enumerate(self.labels)))}.values())
        rest = [n for n in range(len(self.labels)) if n not in set(first)]
        return [*sorted(first), *rest][:count]

    def _sounds(self, chosen: list[int], *, limit: int = SOUND_BYTES) -> list[str]:
        """What can be heard of some samples; files are decoded by a worker."""
        source = self.source
        if not isinstance(source, Audible):
            return [""] * len(chosen)
        sounds = map_in_order(source.listen, [self.indices[n] for n in chosen], workers=1, records=(Sound,))
        return [sound_uri(wave, rate=rate, limit=limit) for wave, rate in sounds]

    def _shown(self, n: int, *, size: int = THUMBNAIL) -> Shown:
        return Shown(self._name(n), self.labels[n], data_uri(self.pictures[n], longest=size))

    def _name(self, n: int) -> str:
        return self.source.describe(self.indices[n]).removeprefix(self.prefix)


def label_text(source: Source, sample: Sample) -> str:
    """The names of a sample's labels; empty without any."""
    if sample.label is None:
        return ""
    numbers = [sample.label] if isinstance(sample.label, int) else np.flatnonzero(sample.label.numpy()).tolist()
    names = source.classes
    return ", ".join(str(n) if names is None or n >= len(names) else str(names[n]) for n in numbers)
