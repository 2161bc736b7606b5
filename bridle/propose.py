"""`bridle init`: a recipe for a user's own data, chosen by what the files are, with a reason for every choice.

Aims: input that fits nine of ten items (or a window of long ones), 64 to 256 tokens, no more codes than the tokens
support, as many steps as fit into some CPU-minutes on this machine. How a sample is drawn tells its kind.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bridle.config import Config, load_config
from bridle.console import ProgressLine
from bridle.data.arrays.memory import TensorSource
from bridle.data.audio.logmel import triangles
from bridle.data.build import open_data
from bridle.data.inspect.survey import Survey, survey_data
from bridle.data.loading.loader import Loader
from bridle.data.loading.order import Order
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import Drawing
from bridle.data.sources import Source
from bridle.errors import DataError, UsageError
from bridle.models.build import build_nets
from bridle.runs.folder import RunFolder
from bridle.seeding import generator
from bridle.train.optim import build_optimizer
from bridle.train.phases import encoder_phase
from bridle.train.run import open_machine
from bridle.train.trial_steps import cpu_seconds, start_codes, stepper, trial_run

FEWEST_TOKENS = 48  # of pictures and signals; the largest patch that gives so many is chosen
MOST_TOKENS = 256  # of clips; the smallest patch that gives no more is chosen
MOST_EPOCHS, FEWEST_STEPS = 300, 200
FEW_TEST_ITEMS, FEW_PER_CLASS, FEW_ITEMS = 100, 10, 200
CACHE_MB = 1024
MINUTES = 8.0  # of CPU time that training may take


class Choice(NamedTuple):
    """One setting and why it is so."""

    key: str
    value: Any
    reason: str

    @property
    def override(self) -> str:
        return f"{self.key}={self.value if self.key == 'data.root' else self.text}"  # a path is taken as it stands

    @property
    def text(self) -> str:
        """The value as YAML."""
        return json.dumps(self.value, ensure_ascii=False)


class Cost(NamedTuple):
    """What training will take on this machine, by a few measured steps."""

    step_seconds: float  # CPU seconds of one step, without data
    load_seconds: float  # CPU seconds to load one item
    minutes: float  # CPU-minutes of all steps with their data


class Proposal(NamedTuple):
    """A recipe for a data set."""

    survey: Survey
    recipe: str  # the shipped one that it extends
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]
    cost: Cost

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The resolved config, with overrides on top."""
        return load_config(self.recipe, [*(choice.override for choice in self.choices), *overrides])

    def to_yaml(self) -> str:
        """The recipe file, a comment behind every choice."""
        found, sections = self.survey, dict[str, list[Choice]]()
        for choice in self.choices:
            sections.setdefault(choice.key.rpartition(".")[0], []).append(choice)
        lines = [f"# Written by `bridle init` after a look at {found.looked} of {found.train + (found.test or 0):,}"
                 f" {found.modality.items}. Change what you like; `bridle show THIS.yaml` prints every setting.",
                 f"extends: {self.recipe}"]  # fmt: skip
        for section, choices in sections.items():
            indent = "  " if section else ""
            lines += [f"{section}:"] if section else []
            for choice in choices:
                setting = f"{indent}{choice.key.rpartition('.')[2]}: {choice.text}"
                lines.append(f"{setting}  # {choice.reason}" if choice.reason else setting)
        return "\n".join(lines) + "\n"


def propose(survey: Survey, *, minutes: float) -> Proposal:
    """Choose every setting for the data that was looked at; measures a few training steps."""
    recipe, *settings = survey.modality.own_recipe
    base = load_config(recipe, settings)
    drawing = survey.modality.drawing_of(base.geometry.build()) or "line"
    named = [Choice("name", survey.path.resolve().stem or "own", ""), Choice("summary", describe(survey), "")]
    where = "data.manifest" if survey.path.is_file() else "data.root"
    named.append(Choice(where, str(survey.path.absolute()), ""))
    named += [Choice("data.source", survey.modality.name, "")] if settings else []
    by_kind, warnings = CHOOSERS[drawing](survey, base)
    chosen = [*named, *by_kind]
    config = load_config(recipe, [choice.override for choice in chosen])
    chosen += choose_model(survey, config)
    config = load_config(recipe, [choice.override for choice in chosen])
    steps, cost = choose_steps(survey, config, minutes)
    return Proposal(survey, recipe, (*chosen, *steps), (*warnings, *doubts(survey), *dear(cost, minutes)), cost)


def choose_config(path: Path, out: Path, overrides: Sequence[str], *, minutes: float | None = None) -> Config:
    """The config for a run on a user's data without a recipe; a run that was begun in `out` keeps its own."""
    run, place = RunFolder(out), str(path.absolute())
    if run.exists():
        if place not in ((data := run.config().data).root, data.manifest):
            raise UsageError(f"{out} holds a run on {data.root or data.manifest}, not on {place}; use another --out.")
        return run.config(overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(f"{path} is data; for several processes write a recipe first: bridle init {path}.")
    proposal, line = propose(survey_data(path), minutes=minutes or MINUTES), ProgressLine()
    shown = ("geometry.", "audio.", "quantizer.codes", "encoder_phase.steps")
    chosen = [choice.override for choice in proposal.choices if choice.reason and choice.key.startswith(shown)]
    line.note(f"{describe(proposal.survey)}; no recipe given, so this one was chosen (bridle init shows why):")
    line.note(f"  {proposal.recipe} {' '.join(chosen)}")
    line.note(f"  about {proposal.cost.minutes:.1f} CPU-minutes of training")
    for warning in proposal.warnings:
        line.note(f"  warning: {warning}")
    return proposal.config(overrides)


def describe(survey: Survey) -> str:
    parts = [f"{survey.train:,} {survey.modality.items}"]
    parts += [] if survey.test is None else [f"{survey.test:,} for testing"]
    parts += [] if survey.classes is None else [f"{survey.classes.classes} classes"]
    return ", ".join(parts)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the ascending values do not exceed."""
    return values[min(len(values) - 1, ceil(share * len(values)) - 1)] if values else 0.0


Chosen = tuple[list[Choice], list[str]]  # and warnings


def choose_sound(survey: Survey, base: Config) -> Chosen:
    """Rate, mel bands, frames and patches of recordings."""
    audio, window, warnings = base.audio, base.geometry.input[0], []
    native = survey.rates().most_common(1)[0][0] if survey.rates() else audio.sample_rate
    rate, why = audio.sample_rate, f"of the files' {native:,} Hz; more costs time and seldom helps"
    if native <= audio.sample_rate:
        rate, why = native, "the files' own rate"
    if native < audio.sample_rate:
        warnings.append(f"the files have {native:,} Hz; read at the default {audio.sample_rate:,} Hz their upper mel "
                        f"bands would be empty. The recipe reads them at {native:,} Hz.")  # fmt: skip
    bands = next(n for n in (64, 48, 40, 32, 24, 16, 8) if has_full_bands(rate, audio.window_ms, n, audio.low_hz))
    long = quantile(survey.seconds(), 0.9)
    frames = max(1, 1 + int((1000 * long - audio.window_ms) / audio.shift_ms))
    patch, views, short = [16, 16] if bands % 16 == 0 else [8, 8], 1, False
    if frames < window:
        if frames * bands < 64 * 16 * 16:
            short, patch = True, [4, 16] if bands % 16 == 0 else [4, 8]  # time counts more than pitch
        size = patch[0] * ceil(frames / patch[0])
        fits = f"{size * audio.shift_ms / 1000:.2f} s: nine of ten recordings fit ({long:.2f} s without silence)"
        share = 1 - quantile(survey.seconds(), 0.5) * 1000 / audio.shift_ms / window
        if share > 0.3:
            warnings.append(f"in the default window of {window * audio.shift_ms / 1000:.1f} s most clips would be "
                            f"{100 * share:.0f} % padding; the recipe's has {fits.partition(':')[0]}.")  # fmt: skip
    else:
        size, views = window, min(4, ceil(frames / window))
        fits = f"windows of {window * audio.shift_ms / 1000:.2f} s; nine of ten recordings last up to {long:.1f} s"
    return [
        Choice("geometry.input", [size, bands], f"frames × mel bands; {fits}"),
        Choice("geometry.patch", patch, f"{ceil(size / patch[0]) * bands // patch[1]} tokens of "
               f"{patch[0] * audio.shift_ms:.0f} ms × {patch[1]} bands"),
        Choice("audio.sample_rate", rate, why),
        Choice("data.trim", base.data.trim, f"{100 * survey.silence:.0f} % of the sound is digital silence at "
               "the ends of files; it is left out"),
        Choice("data.views", views, "windows of a recording that are averaged in evaluation"),
        Choice("tokenizer.item_axes", [0] if short else None, "short sounds, such as words: every band loses its mean "
               "over time, so that voice, microphone and noise matter less" if short else "a recording loses its level "
               "and keeps its spectrum"),
    ], warnings  # fmt: skip


def has_full_bands(rate: int, window_ms: float, bands: int, low: float) -> bool:
    """Does every mel band hold a bin of the spectrum?"""
    fft = 1 << (int(rate * window_ms / 1000) - 1).bit_length()
    return bool((triangles(fft, rate, bands, low, torch.device("cpu")).sum(0) > 0).all())


def choose_picture(survey: Survey, base: Config) -> Chosen:
    """Size, patches, colour and crops of pictures."""
    height, width = (int(quantile(survey.sizes(axis), 0.5)) for axis in (1, 2))
    side = min(base.geometry.input[0], max(8, min(height, width)))
    patch = largest_patch(side, 2)
    side = patch * round(side / patch)
    grey = all(channels == 1 for channels in survey.sizes(0))
    scale = [0.6, 1.0] if side < base.geometry.input[0] else list(base.augment.crop_scale)
    mb = survey.train * sum(survey.sizes(0)) / len(survey.facts) * height * width / 2**20
    keeps = mb < CACHE_MB
    warnings = []
    rate = [Choice("encoder_phase.learning_rate", 2e-3, "as the recipe for CIFAR-10")] if side <= 32 else []
    if max(height, width) > 1.6 * min(height, width):
        warnings.append(f"pictures are {width}×{height}; the square in their middle is what evaluation sees. "
                        "geometry.input takes other shapes, such as [64,128].")  # fmt: skip
    return [
        Choice("geometry.channels", 1 if grey else 3, "all pictures are grey" if grey else "colour"),
        Choice("geometry.input", [side, side], f"pictures are about {width}×{height}"),
        Choice("geometry.patch", [patch, patch], f"{(side // patch) ** 2} tokens"),
        Choice("augment.crop_scale", scale, "share of the area that a random crop keeps; small pictures keep more"),
        Choice("data.cache_mb", CACHE_MB if keeps else 0, f"decoded they take about {mb:,.0f} MB"),
        *rate,
    ], warnings


def choose_frames(survey: Survey, base: Config) -> Chosen:
    """Frames, stride, size and patches of clips."""
    frames, wanted = quantile(survey.sizes(1), 0.5), base.geometry.input[0]
    stride = min(base.video.stride, max(1, int(frames // wanted)))
    short = min(quantile(survey.sizes(axis), 0.5) for axis in (2, 3))
    side = min(base.geometry.input[1], max(16, int(short) // 8 * 8))
    steps = wanted // base.geometry.patch[0]
    patch = next(n for n in (4, 8, 16, 32) if steps * (side // n) ** 2 <= MOST_TOKENS)
    side = patch * round(side / patch)
    warnings = []
    if frames < wanted * base.video.stride:
        warnings.append(f"half of the clips have {frames:.0f} frames or fewer; the default clip spans "
                        f"{wanted * base.video.stride}. The recipe's spans {wanted * stride}.")  # fmt: skip
    tokens = steps * (side // patch) ** 2
    return [
        Choice("geometry.input", [wanted, side, side], f"{wanted} frames; their short side is about {short:.0f}"),
        Choice("geometry.patch", [base.geometry.patch[0], patch, patch], f"{tokens} tokens"),
        Choice("video.stride", stride, f"one frame in {stride}; a clip spans {wanted * stride} of about {frames:.0f}"),
        Choice("data.views", 1 if frames <= wanted * stride else base.data.views, "clips averaged in evaluation"),
    ], warnings


def choose_line(survey: Survey, base: Config) -> Chosen:
    """Channels, length and patch of signals."""
    channels, warnings = survey.sizes(0), []
    common = statistics.mode(channels)
    if channels[0] != channels[-1]:
        warnings.append(f"files have {channels[0]} to {channels[-1]} channels; only those with {common} can be read.")
    long = int(quantile(survey.sizes(1), 0.9))
    if common > long:
        warnings.append(f"arrays look transposed: {common} channels of {long} samples; save array.T instead.")
    whole = long <= 2 * base.geometry.input[0]
    length = long if whole else base.geometry.input[0]
    patch = max(1, min(largest_patch(length, 1), base.geometry.patch[0]))
    length = patch * max(2, ceil(length / patch))
    fits = "nine of ten signals fit" if whole else f"a window of signals of up to {long:,} samples"
    section, rates = survey.modality.name, survey.exact_rates()
    known = [Choice(f"{section}.sample_rate", rates.pop(), "as the files say")] if len(rates) == 1 else []
    return [
        Choice("geometry.channels", common, "as the files have"),
        Choice("geometry.input", [length], fits),
        Choice("geometry.patch", [patch], f"{length // patch} tokens of {patch} samples"),
        *known,
        Choice("data.views", 1 if whole else min(4, ceil(long / length)), "windows averaged in evaluation"),
    ], warnings


CHOOSERS: dict[Drawing, Callable[[Survey, Config], Chosen]] = {
    "spectrogram": choose_sound, "picture": choose_picture, "frames": choose_frames, "line": choose_line,
}  # fmt: skip


def largest_patch(size: int, axes: int) -> int:
    """The largest power of two that cuts `size` along `axes` axes into FEWEST_TOKENS or more."""
    patch = 1
    while (size // (2 * patch)) ** axes >= FEWEST_TOKENS:
        patch *= 2
    return patch


def choose_model(survey: Survey, config: Config) -> list[Choice]:
    """Model size, batch, codes, mask and pooling."""
    geometry, items, probe = config.geometry.build(), survey.train, config.probe
    large = items >= 50_000 and torch.cuda.is_available()
    batch = min(64 if items >= 5_000 else 32, 1 << max(1, items.bit_length() - 1))
    most = items * geometry.tokens // 32
    codes = min(256 if items >= 1_000 else 64, max(16, 1 << max(0, most.bit_length() - 1)))
    hidden = geometry.tokens // geometry.grid[0] if config.mask.kind == "tube" else geometry.tokens
    ratio = config.mask.ratio if hidden >= FEWEST_TOKENS else 0.6 if hidden >= 24 else 0.5
    pool = {"axis": f"a mean for each row of axis {probe.axis}"}.get(probe.pool, "the mean of all tokens")
    chosen = [
        Choice("size", "small" if large else "tiny", f"{items:,} items" + ("" if large else "; trains on a CPU")),
        Choice("quantizer.codes", codes, f"in each of {config.quantizer.codebooks} codebooks; {items:,} items have "
               f"{items * geometry.tokens:,} tokens"),
        Choice("mask.ratio", ratio, f"share of {hidden} positions that is hidden"),
        Choice("probe.pool", probe.pool, pool + (" and their deviation" if probe.deviation else "")),
        Choice("probe.deviation", probe.deviation, ""),
    ]  # fmt: skip
    if survey.test is not None and survey.test < FEW_TEST_ITEMS and survey.classes is not None:
        chosen.append(Choice("probe.on", "folds", f"{survey.test} test items are too few to compare anything"))
    return [*chosen, Choice("encoder_phase.batch", batch, "")]


def choose_steps(survey: Survey, config: Config, minutes: float) -> tuple[list[Choice], Cost]:
    """Steps that fit into `minutes` CPU-minutes, by a few measured ones."""
    batch, cached = config.encoder_phase.batch, config.data.cache_mb > 0
    step, load = measure_step(config), measure_load(open_data(config).train)
    once = load * survey.train if cached else 0.0
    each = step + (0.0 if cached else load * batch)
    limit = ceil(MOST_EPOCHS * survey.train / batch)
    steps = max(FEWEST_STEPS, min(limit, int((60 * minutes - once) / each)))
    steps = steps if steps < 1000 else steps // 100 * 100
    epochs = steps * batch / survey.train
    reason = f"{epochs:.0f} passes over {survey.train:,} items" if epochs >= 1 else f"{epochs:.2f} of a pass"
    return [
        Choice("encoder_phase.steps", steps, reason),
        Choice("encoder_phase.warmup_steps", ceil(steps / 12), ""),
    ], Cost(step, load, (once + steps * each) / 60)


def measure_step(config: Config) -> float:
    """CPU seconds of an encoder step on random numbers, the median of three."""
    batch = config.encoder_phase.batch
    source = TensorSource(x=torch.randn(batch, *config.geometry.build().shape, generator=generator("init")))
    batches = next(Loader(source=source, seed=0, phase="init", batch=batch, mean=[0.0], std=[1.0]).steps(0, 1))
    nets = build_nets(config, later_tokenizer=False)
    start_codes(nets, config)
    with tempfile.TemporaryDirectory() as folder:
        run = trial_run(config, nets, source, Path(folder), open_machine(config.runtime), rows=batch)
        phase = encoder_phase(run, index=0, iteration=1)
        step = stepper(run, phase, batches, build_optimizer(phase.trained, run.config.encoder_phase))
        step()  # the first one allocates
        return statistics.median(cpu_seconds(step) for _ in range(3))


def measure_load(source: Source) -> float:
    """CPU seconds to load an item, the median of some; they are loaded by a worker."""
    chosen = Order(size=len(source), seed=0, phase="survey").at(range(min(17, len(source)))).tolist()
    times = [seconds for seconds in map_in_order(partial(load_seconds, source), chosen, workers=1) if seconds]
    return statistics.median(times) if times else 0.0


def load_seconds(source: Source, index: int) -> float:
    """CPU seconds to load one item; 0 for one that cannot be."""
    try:
        return cpu_seconds(lambda: source.load(index, generator("init", str(index))))
    except DataError:
        return 0.0


def doubts(survey: Survey) -> list[str]:
    """What will make training or scores worse than they could be."""
    found, classes, repeats = [], survey.classes, survey.repeats
    if survey.bad:
        found.append(f"{len(survey.bad)} of {survey.looked} files looked at cannot be used, the first: "
                     f"{survey.bad[0][0]}: {survey.bad[0][1]}; `bridle data check` lists all.")  # fmt: skip
    if survey.silent:
        found.append(f"{survey.silent} of {survey.looked} files looked at are silent or blank; `bridle data check`.")
    if len(survey.rates()) > 1:
        rates = ", ".join(f"{rate:,} Hz ({count})" for rate, count in survey.rates().most_common(3))
        found.append(f"sample rates differ: {rates}; a classifier may recognise the rate instead of the content.")
    if repeats.across:
        found.append(f"{repeats.across} of {survey.test:,} test files are in train too, byte for byte: scores will be "
                     "too good. Remove them from one side.")  # fmt: skip
    if repeats.train:
        found.append(f"{repeats.train:,} train files repeat another one; keep one of each.")
    if survey.train < FEW_ITEMS:
        found.append(f"{survey.train} items to train on are very few; start from an existing model "
                     "(encoder.weights) or add unlabelled files.")  # fmt: skip
    if classes is None:
        return [*found, "no labels: nothing will be scored. Class folders or a manifest give labels."]
    if survey.test is not None and survey.test < FEW_TEST_ITEMS:
        margin = 100 / survey.test**0.5
        found.append(f"{survey.test} test items: differences below about {margin:.0f} points are chance. The recipe "
                     "scores by cross-validation over all items (probe.on: folds).")  # fmt: skip
    if classes.smallest < FEW_PER_CLASS:
        found.append(f"the smallest class has {classes.smallest} train items; scores of such classes are chance.")
    if classes.largest > 10 * classes.smallest:
        found.append(
            f"classes have {classes.smallest:,} to {classes.largest:,} items: accuracy favours the large ones."
        )
    return found


def dear(cost: Cost, minutes: float) -> list[str]:
    """That even the fewest useful steps take longer than asked for."""
    if cost.minutes <= 1.1 * minutes:
        return []
    return [f"{FEWEST_STEPS} steps, the fewest that teach anything, take {cost.minutes:.0f} CPU-minutes, more than the "
            f"{minutes:g} asked for."]  # fmt: skip
