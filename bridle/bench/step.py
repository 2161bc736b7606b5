"""The encoder-phase step: where its time goes, what part of the machine's speed it uses, and beside a plain step.

Three ways through the same networks take turns in one process, on one thread: the plain step (`reference.py`), ours
with the tokenizer at every step (live), and ours with codes that are already there (reused, as with
`encoder_phase.masks`). Times are CPU seconds, medians over the turns; ratios are taken within a turn, then their
median. `GEMM` is the share of the speed of a bare float32 product that a step reaches with its counted
operations. The tokenizer is a ViT, as from iteration 2 on. Inputs are random numbers of the modality's shape.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from bridle.bench.cost import encoder_step
from bridle.bench.data import start_codes
from bridle.bench.quantizer import Call, cpu_seconds, describe_machine, extra_memory, one_thread
from bridle.bench.reference import PlainStep
from bridle.config import Config, load_config
from bridle.console import ProgressLine
from bridle.data.arrays.memory import TensorSource
from bridle.data.loading.loader import Batch, Loader
from bridle.machine import StopRequest
from bridle.models.build import Nets, build_nets
from bridle.models.losses import encoder_loss
from bridle.quantize.usage import CodeAge
from bridle.seeding import generator
from bridle.train.engine import Draws, Progress, build_replicas, take_step
from bridle.train.optim import build_optimizer, named_parameters
from bridle.train.phases import encoder_phase, hidden_positions, targets
from bridle.train.run import Run, open_machine

SIZES = ("tiny", "small", "base")
PAPER = {"audio": "audioset2m", "image": "imagenet1k", "video": "kinetics400"}  # the shapes of base models, by recipe
MODALITIES = tuple(PAPER)
ROWS = {"tiny": 32, "small": 4, "base": 2}
REPEATS = {"tiny": 11, "small": 7, "base": 3}
DEFAULT = tuple((modality, size) for size in SIZES for modality in MODALITIES)
BUDGETS = {"live": 0.90, "reused": 0.60}  # of the plain step
PARTS = ("data", "tokenizer", "encoder", "decoder", "heads, loss", "backward", "optimizer")
GEMM_SIZE = 768
Tell = Callable[[str], None]


class StepRow(NamedTuple):
    """One model."""

    name: str
    rows: int
    turns: dict[str, list[float]]  # CPU seconds of the plain, live and reused step, turn by turn
    parts: dict[str, float]  # CPU seconds of the live step's parts
    operations: int  # of the live step
    gemm: float  # operations a CPU second of a bare product
    extra_mb: float | None  # peak memory a live step adds to weights and optimizer; None where it cannot be measured

    def seconds(self, who: str) -> float:
        return statistics.median(self.turns[who])

    def ratio(self, who: str, to: str = "plain") -> float:
        """Median over turns: what loads the machine then loads both alike."""
        return statistics.median(a / b for a, b in zip(self.turns[who], self.turns[to], strict=True))

    @property
    def utilisation(self) -> float:
        """Share of a bare product's speed."""
        return self.operations / self.seconds("live") / self.gemm

    def verdict(self, who: str) -> str:
        return f"{self.ratio(who):.2f} ({'met' if self.ratio(who) <= BUDGETS[who] else 'missed'})"


@dataclass(frozen=True)
class StepTable:
    """Rows in the order measured, and what they were measured on."""

    rows: tuple[StepRow, ...]
    machine: str

    def to_markdown(self) -> str:
        lines = [
            f"| model | rows | live / plain (≤ {BUDGETS['live']}) | reused / plain (≤ {BUDGETS['reused']}) "
            "| reused / live | live, CPU s | GEMM | extra MB |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in self.rows:
            extra = "–" if row.extra_mb is None else f"{row.extra_mb:.0f}"
            cells = (
                row.name, str(row.rows), row.verdict("live"), row.verdict("reused"),
                f"{row.ratio('reused', 'live'):.2f}", f"{row.seconds('live'):.3f}", f"{row.utilisation:.2f}", extra,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", f"| share of the live step, % | {' | '.join(PARTS)} |", "|---|" + "---:|" * len(PARTS)]
        for row in self.rows:
            whole = sum(row.parts.values())
            shares = (f"{100 * row.parts[part] / whole:.1f}" for part in PARTS)
            lines.append(f"| {row.name} | {' | '.join(shares)} |")
        return "\n".join([*lines, "", self.machine, ""])


def run(
    chosen: Sequence[tuple[str, str]] = DEFAULT, *, repeats: int | None = None, tell: Tell = lambda text: None
) -> StepTable:
    """Measure models given as (modality, size); `tell` hears what is next."""
    rows = []
    with one_thread():
        for modality, size in chosen:
            tell(f"{modality} {size}, {ROWS[size]} rows, {repeats or REPEATS[size]} turns")
            config = model_config(modality, size)
            rows.append(measure(config, f"{modality} {size}", rows=ROWS[size], repeats=repeats or REPEATS[size]))
    return StepTable(tuple(rows), describe_machine())


def run_recipe(config: Config, *, rows: int, repeats: int, tell: Tell = lambda text: None) -> StepTable:
    """Measure the model of a config."""
    with one_thread():
        tell(f"{config.name}, {rows} rows, {repeats} turns")
        return StepTable((measure(config, config.name, rows=rows, repeats=repeats),), describe_machine())


def model_config(modality: str, size: str) -> Config:
    """The user's recipe of a modality in a size; base models have the paper's inputs."""
    return load_config(PAPER[modality] if size == "base" else modality, [] if size == "base" else [f"size={size}"])


def measure(config: Config, name: str, *, rows: int, repeats: int) -> StepRow:
    """One model: alternate plain, live and reused steps with a bare product between them."""
    with prepared(config, rows) as ready:
        ways: dict[str, Call] = {
            "plain": lambda: ready.plain(ready.batch.x),
            "live": ready.live,
            "reused": ready.reused,
        }
        for call in ways.values():
            call()  # the first step allocates; the first reused one finds the codes
        extra = extra_memory(ready.live)
        a = torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator("bench"))
        out = torch.empty_like(a)
        times: dict[str, list[float]] = {who: [] for who in (*ways, "gemm")}
        for _ in range(repeats):
            for who, call in ways.items():
                times["gemm"].append(cpu_seconds(lambda: torch.mm(a, a, out=out)))
                times[who].append(cpu_seconds(call))
        parts = [ready.parts() for _ in range(repeats)]
        parts[0]["data"] = cpu_seconds(lambda: next(ready.loader.steps(0, 1)))
    return StepRow(
        name=name,
        rows=rows,
        turns={who: times[who] for who in ways},
        parts={part: statistics.median(p[part] for p in parts if part in p) for part in PARTS},
        operations=encoder_step(config, rows=rows).total.operations,
        gemm=2 * GEMM_SIZE**3 / statistics.median(times["gemm"]),
        extra_mb=extra,
    )


class Ready(NamedTuple):
    """Everything that is timed, on one batch."""

    plain: PlainStep
    live: Callable[[], object]
    reused: Callable[[], object]
    parts: Callable[[], dict[str, float]]
    loader: Loader
    batch: Batch


@contextmanager
def prepared(config: Config, rows: int) -> Iterator[Ready]:
    """Networks, optimizers and a batch, in a run folder that is gone afterwards."""
    source = TensorSource(x=torch.randn(rows, *config.geometry.build().shape, generator=generator("bench", "x")))
    loader = Loader(source=source, seed=0, phase="bench", batch=rows, mean=[0.0], std=[1.0])
    batch = next(loader.steps(0, 1))[0]
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    start_codes(nets, config)
    for module in nets.modules().values():
        module.requires_grad_(False).eval()
    for module in (nets.encoder, nets.decoder, nets.heads):
        module.requires_grad_(True).train()
    with tempfile.TemporaryDirectory() as folder:
        live, reused = (bench_run(config, nets, source, Path(folder), rows=rows, masks=m) for m in (1, 10**9))
        optimizer = build_optimizer(encoder_phase(live, index=0, iteration=2).trained, live.config.encoder_phase)
        yield Ready(
            plain=PlainStep(nets, config, generator=generator("bench", "mask")),
            live=stepper(live, optimizer, batch),
            reused=stepper(reused, optimizer, batch),
            parts=lambda: timed_parts(live, optimizer, batch),
            loader=loader,
            batch=batch,
        )


def bench_run(config: Config, nets: Nets, source: TensorSource, folder: Path, *, rows: int, masks: int) -> Run[Nets]:
    """A run of encoder steps on `rows` rows whose codes stay for `masks` steps."""
    changes = {"batch": rows, "micro_batch": None, "steps": 10**9, "epochs": None, "masks": masks}
    settings = config.encoder_phase.model_copy(update=changes)
    runtime = config.runtime.model_copy(update={"device": "cpu", "precision": "fp32", "threads": 0})
    own = config.model_copy(update={"encoder_phase": settings, "max_steps": None, "runtime": runtime})
    return Run(folder, own, open_machine(runtime), source, nets, StopRequest(), ProgressLine())


def stepper(a_run: Run[Nets], optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], object]:
    """The engine's own step on one batch."""
    phase = encoder_phase(a_run, index=0, iteration=2)
    parameters, replicas = named_parameters(phase.trained), build_replicas(a_run, phase)
    progress, ages = Progress(), CodeAge(a_run.config.quantizer.sizes)
    return lambda: take_step(a_run, phase, replicas, progress, optimizer, parameters, [batch], ages)


def timed_parts(a_run: Run[Nets], optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
    """One live step in pieces: CPU seconds of each."""
    nets, phase = a_run.nets, encoder_phase(a_run, index=0, iteration=2)
    draws = Draws(a_run, phase, 0, [batch])
    times, last = dict[str, float](), time.process_time()

    def done(part: str) -> None:
        nonlocal last
        now = time.process_time()
        times[part], last = now - last, now

    found = targets(nets, batch.x, None)
    done("tokenizer")
    mask = draws.mask(batch)
    z = nets.encoder(batch.x, mask=mask).z
    done("encoder")
    hidden = hidden_positions(mask)
    features = nets.decoder(z, mask=mask, only=hidden.at)
    done("decoder")
    wanted = found.at(hidden)
    loss = encoder_loss(nets.heads(features, wanted.codes), wanted, hidden.counted)
    done("heads, loss")
    loss.backward()
    done("backward")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    done("optimizer")
    return times
