"""Decoding and augmentation beside the model's step: which of them a run waits for, and how many workers balance them.

Rates are samples per second of wall time: of the loader in this process (0 workers), then with workers, each measured
for a while after it has got going, and of a real encoder-phase step (targets, forward, backward, update) on a batch
that is already there. `× model` is a rate divided by the model's: above 1 the data keeps up. Samples per CPU second say
what one core can do when nothing else runs. Memory is what this process holds after each pass over the same samples.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch

from bridle.bench.quantizer import processor, resident
from bridle.config import Config
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.loading.keeper import here
from bridle.data.loading.loader import Batch, Loader
from bridle.data.sources import Source
from bridle.machine import Machine, StopRequest
from bridle.models.build import Nets, build_nets
from bridle.quantize.usage import CodeAge
from bridle.seeding import generator
from bridle.train.engine import Phase, Progress, build_replicas, take_step
from bridle.train.optim import build_optimizer, named_parameters
from bridle.train.phases import encoder_phase
from bridle.train.run import Run, open_machine

ROWS = 16  # samples a worker prepares at a time, at most
PASSES = 4
FLAT_MB = 16.0  # growth from the second pass to the last that still counts as flat
LITTLE = 0.05  # share of a run's time; whoever loads in less needs no workers
Tell = Callable[[str], None]


class DataRate(NamedTuple):
    """How fast samples come out of the loader."""

    workers: int
    per_second: float
    per_cpu_second: float | None  # of one core; None with workers, whose time is their own


class StepRate(NamedTuple):
    """How fast the model uses samples up."""

    rows: int  # in the batch that was measured
    per_second: float


@dataclass(frozen=True)
class DataTable:
    """What was measured, and what follows from it."""

    name: str
    batch: int
    configured: int  # data.workers
    data: tuple[DataRate, ...]
    model: StepRate
    memory: tuple[float, ...] | None  # MB after each pass; None where /proc does not tell
    pass_samples: int
    device: str
    cores: int
    machine: str

    @property
    def per_worker(self) -> float:
        """Samples per second that one worker adds, by the largest number of workers measured."""
        most = max(self.data, key=lambda rate: rate.workers)
        return most.per_second / max(1, most.workers)

    @property
    def balance(self) -> int:
        """Workers that keep up with the model; 0 where loading between steps costs next to nothing."""
        if self.loading_share < LITTLE:
            return 0
        enough = [rate.workers for rate in self.data if rate.workers and rate.per_second >= self.model.per_second]
        return min(enough, default=ceil(self.model.per_second / self.per_worker))

    @property
    def loading_share(self) -> float:
        """Share of its time that a run without workers spends loading."""
        return 1 / (1 + self.data[0].per_second / self.model.per_second)

    @property
    def ready(self) -> float:
        """Samples per second with the configured workers: as measured, or by what one adds as long as cores last."""
        measured = {rate.workers: rate.per_second for rate in self.data}
        return measured.get(self.configured, min(self.configured, self.cores) * self.per_worker)

    def verdict(self) -> str:
        """One line: what a run waits for."""
        ratio = self.ready / self.model.per_second
        said = f"without workers a run spends {self.loading_share:.0%} of its time loading"
        if self.configured:
            said = f"data.workers={self.configured} loads {ratio:.1f} times as fast as the model learns"
        needed = f"{self.balance} worker(s) balance the two." if self.balance else "It needs no workers."
        line = f"The bottleneck is the {'data' if ratio < 1 else 'model'}: {said}. {needed}"
        if self.device == "cpu":
            line += f" Model and workers share the {self.cores} core(s) of this machine."
        elif self.balance > self.cores:
            line += f" This machine has {self.cores} core(s): smaller files or data.cache_mb would help."
        return line

    def to_markdown(self) -> str:
        lines = ["| what | samples/s | per CPU second | × model |", "|---|---:|---:|---:|"]
        for rate in self.data:
            who = "loading, no workers" if rate.workers == 0 else f"loading, {rate.workers} worker(s)"
            cpu = "–" if rate.per_cpu_second is None else f"{rate.per_cpu_second:.1f}"
            lines.append(f"| {who} | {rate.per_second:.1f} | {cpu} | {rate.per_second / self.model.per_second:.2f} |")
        step = f"encoder step, {self.model.rows} of {self.batch} rows, {self.device}"
        lines.append(f"| {step} | {self.model.per_second:.1f} | – | 1.00 |")
        return "\n".join([*lines, "", self.verdict(), self.memory_line(), "", f"{self.name}: {self.machine}", ""])

    def memory_line(self) -> str:
        if self.memory is None:
            return "Memory cannot be measured on this system."
        growth = self.memory[-1] - self.memory[min(1, len(self.memory) - 1)]
        steady = "flat" if growth <= FLAT_MB else f"grew by {growth:.0f} MB after the second pass"
        shown = ", ".join(f"{mb:.0f}" for mb in self.memory)
        return f"Memory after passes over {self.pass_samples} samples: {shown} MB ({steady})."


def run(
    config: Config, *, seconds: float = 4.0, workers: Sequence[int] = (0, 1, 2), tell: Tell = lambda text: None
) -> DataTable:
    """Measure the data and the encoder step of a config, about `seconds` each. `tell` hears what is next."""
    tell("opening the data")
    source, machine = open_data(config).train, open_machine(config.runtime)
    rates = []
    for count in workers:
        tell(f"loading with {count} worker(s)")
        rates.append(measure_loading(source, config, workers=count, seconds=seconds))
    tell("memory over passes")
    samples = max(ROWS, min(len(source), round(rates[0].per_second * seconds / 2)))
    memory = measure_memory(source, config, samples=samples)
    tell("encoder steps")
    model = measure_step(source, config, machine, seconds=seconds)
    return DataTable(
        name=config.name,
        batch=config.encoder_phase.batch,
        configured=config.data.workers,
        data=tuple(rates),
        model=model,
        memory=memory,
        pass_samples=samples,
        device=machine.device.type,
        cores=os.cpu_count() or 1,
        machine=f"{processor()}, {os.cpu_count()} core(s), {torch.get_num_threads()} torch thread(s), "
        f"torch {version('torch')}.",
    )


def loader(source: Source, config: Config, *, workers: int, batch: int) -> Loader:
    """The loader of the encoder phase, as training has it; what it divides by does not matter here."""
    return Loader(
        source=source,
        seed=config.seed,
        phase="iter1-encoder",
        batch=batch,
        mean=config.data.mean or [0.0],
        std=config.data.std or [1.0],
        workers=workers,
        augment=config.augment.enabled,
    )


def measure_loading(source: Source, config: Config, *, workers: int, seconds: float) -> DataRate:
    """Samples per second once everything has started; what workers had ready by then counts for nothing."""
    count, wall, _ = timed_loading(source, config, workers=workers, seconds=seconds)
    if workers:
        return DataRate(workers, count / wall, None)
    with here():  # where files are decoded by a process of their own, its time would not show
        alone, _, cpu = timed_loading(source, config, workers=0, seconds=seconds / 2)
    return DataRate(workers, count / wall, alone / cpu)


def timed_loading(source: Source, config: Config, *, workers: int, seconds: float) -> tuple[int, float, float]:
    """Samples, and the wall and CPU seconds they took."""
    rows = min(ROWS, config.encoder_phase.batch)
    steps = loader(source, config, workers=workers, batch=rows).steps(0, 10**9)
    for _ in range(1 + 3 * workers):  # start-up, and the batches prepared ahead
        next(steps)
    wall, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds or count < (1 + 3 * workers) * rows:
        next(steps)
        count += rows
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps.close()  # type: ignore[attr-defined]  # ends the workers
    return count, wall, cpu


def measure_memory(source: Source, config: Config, *, samples: int) -> tuple[float, ...] | None:
    """Resident memory in MB after each of several passes over the first samples of the order."""
    if not Path("/proc/self/status").exists():
        return None
    held = []
    for _ in range(PASSES):
        with here():  # what is kept is to show in this process
            for _batch in loader(source, config, workers=0, batch=ROWS).steps(0, ceil(samples / ROWS)):
                pass
        held.append(resident("VmRSS") / 1024)
    return tuple(held)


def measure_step(source: Source, config: Config, machine: Machine, *, seconds: float) -> StepRate:
    """Samples per second of encoder-phase steps, on as many rows of the batch as a few of them fit into the time."""
    rows, rate = min(2, config.encoder_phase.batch), 0.0
    while True:
        batch = next(loader(source, config, workers=0, batch=rows).steps(0, 1))
        with trained(config, machine, source, rows=rows) as step:
            step(batch)  # the first step allocates
            start, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - start < seconds / 2:
                step(batch)
                count += 1
            rate = rows * count / (time.perf_counter() - start)
        # A batch of many rows is used better by any machine, so take the largest that is not too slow.
        larger = min(config.encoder_phase.micro_batch or config.encoder_phase.batch, 4 * rows)
        if larger == rows or larger / rate > seconds:
            return StepRate(rows, rate)
        rows = larger


@contextmanager
def trained(
    config: Config, machine: Machine, source: Source, *, rows: int
) -> Iterator[Callable[[list[Batch]], object]]:
    """Everything an encoder step needs, in a folder that is gone afterwards; gives the step."""
    settings = config.encoder_phase.model_copy(
        update={"batch": rows, "micro_batch": None, "steps": 10**6, "epochs": None}
    )
    config = config.model_copy(update={"encoder_phase": settings, "max_steps": None})
    nets = build_nets(config)
    if nets.own_tokenizer is not None:  # patches are predicted without
        start_codes(nets, config)
    for module in nets.modules().values():
        module.to(machine.device)
    with tempfile.TemporaryDirectory() as folder:
        a_run = Run(Path(folder), config, machine, source, nets, StopRequest(), ProgressLine())
        yield stepper(a_run, encoder_phase(a_run, index=0, iteration=1))


def stepper(a_run: Run[Nets], phase: Phase) -> Callable[[list[Batch]], object]:
    for module in phase.trained.values():
        module.train()
    optimizer, parameters = build_optimizer(phase.trained, phase.settings), named_parameters(phase.trained)
    progress, ages, replicas = Progress(), CodeAge(a_run.config.quantizer.sizes), build_replicas(a_run, phase)

    def step(micro_batches: list[Batch]) -> object:
        update = take_step(a_run, phase, replicas, progress, optimizer, parameters, micro_batches, ages)
        return update.values["loss"].item()  # waits for a GPU to be done

    return step


def start_codes(nets: Nets, config: Config) -> None:
    """Codebooks that can be looked up; which codes they hold does not change the time of a step."""
    sizes = config.quantizer.sizes
    points = torch.randn(4 * max(sizes), config.quantizer.width, generator=generator("bench"))
    nets.tokenizer.quantizer.start_codebooks(points, generator=generator("bench", "start"))
