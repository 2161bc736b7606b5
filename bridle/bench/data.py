"""Decoding and augmentation beside the model's step: which of them a run waits for, and how many workers balance them.

Rates are samples per second of wall time: of the loader in this process (0 workers), then with workers, each measured
for a while after it has got going, and of a real encoder-phase step (targets, forward, backward, update) on a batch
that is already there. `× model` is a rate divided by the model's: above 1 the data keeps up.
`benchmarks/data_memory.py` in the repository measures the loader's memory over several passes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

from bridle.bench.step import bench_run, start_codes, stepper
from bridle.bench.timing import Tell, describe_machine, markdown_table
from bridle.config import Config
from bridle.data.build import open_data
from bridle.data.loading.loader import Loader
from bridle.data.sources import Source
from bridle.machine import Machine
from bridle.models.build import build_nets
from bridle.train.optim import build_optimizer
from bridle.train.phases import encoder_phase
from bridle.train.run import open_machine

ROWS = 16  # samples a worker prepares at a time, at most
LITTLE = 0.05  # share of a run's time; a run that loads in less needs no workers


class DataRate(NamedTuple):
    """How fast samples come out of the loader."""

    workers: int
    per_second: float


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
        rates = {f"loading, {rate.workers or 'no'} worker(s)": rate.per_second for rate in self.data}
        rates[f"encoder step, {self.model.rows} of {self.batch} rows, {self.device}"] = self.model.per_second
        rows = [(who, f"{rate:.1f}", f"{rate / self.model.per_second:.2f}") for who, rate in rates.items()]
        table = markdown_table(("what", "samples/s", "× model"), rows)
        return f"{table}\n{self.verdict()}\n\n{self.name}: {self.machine}\n"


def run(
    config: Config, *, seconds: float = 4.0, workers: Sequence[int] = (0, 1, 2), tell: Tell = lambda text: None
) -> DataTable:
    """Measure the data and the encoder step of a config, about `seconds` each."""
    tell("opening the data")
    source, machine = open_data(config).train, open_machine(config.runtime)
    rates = []
    for count in workers:
        tell(f"loading with {count} worker(s)")
        rates.append(DataRate(count, loading_rate(source, config, workers=count, seconds=seconds)))
    tell("encoder steps")
    return DataTable(
        name=config.name,
        batch=config.encoder_phase.batch,
        configured=config.data.workers,
        data=tuple(rates),
        model=measure_step(source, config, machine, seconds=seconds),
        device=machine.device.type,
        cores=os.cpu_count() or 1,
        machine=describe_machine(),
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


def loading_rate(source: Source, config: Config, *, workers: int, seconds: float) -> float:
    """Samples per second once everything has started; what workers had ready by then does not count."""
    rows = min(ROWS, config.encoder_phase.batch)
    steps = loader(source, config, workers=workers, batch=rows).steps(0, 10**9)
    for _ in range(1 + 3 * workers):  # start-up, and the batches prepared ahead
        next(steps)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or count < (1 + 3 * workers) * rows:
        next(steps)
        count += rows
    passed = time.perf_counter() - start
    steps.close()  # type: ignore[attr-defined]  # ends the workers
    return count / passed


def measure_step(source: Source, config: Config, machine: Machine, *, seconds: float) -> StepRate:
    """Samples per second of encoder-phase steps, on as many rows of the batch as a few of them fit into the time."""
    rows = min(2, config.encoder_phase.batch)
    while True:
        rate = _step_rate(source, config, machine, rows=rows, seconds=seconds / 2)
        # A batch of many rows is used better by any machine, so take the largest that is not too slow.
        larger = min(config.encoder_phase.micro_batch or config.encoder_phase.batch, 4 * rows)
        if larger == rows or larger / rate > seconds:
            return StepRate(rows, rate)
        rows = larger


def _step_rate(source: Source, config: Config, machine: Machine, *, rows: int, seconds: float) -> float:
    batches = next(loader(source, config, workers=0, batch=rows).steps(0, 1))
    nets = build_nets(config)
    if nets.own_tokenizer is not None:  # patches are predicted without
        start_codes(nets, config)
    for module in nets.modules().values():
        module.to(machine.device)
    with tempfile.TemporaryDirectory() as folder:
        a_run = bench_run(config, nets, source, Path(folder), machine, rows=rows)
        phase = encoder_phase(a_run, index=0, iteration=1)
        for module in phase.trained.values():
            module.train()
        step = stepper(a_run, phase, batches, build_optimizer(phase.trained, phase.settings))
        step()  # the first one allocates
        start, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - start < seconds:
            step()
            count += 1
        return rows * count / (time.perf_counter() - start)
