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

from bench.timing import Call, Tell, describe_machine, markdown_table
from bridle.config import Config
from bridle.data.build import open_data
from bridle.data.loading.loader import Loader
from bridle.data.sources import Source
from bridle.machine import Machine
from bridle.models.build import build_nets
from bridle.train.optim import build_optimizer
from bridle.train.phases import encoder_phase
from bridle.train.run import open_machine
from bridle.train.trial_steps import start_codes, stepper, trial_run

ROWS = 16  # samples a worker prepares at a time, at most
LITTLE = 0.05  # share of a run's time; a run that loads in less needs no workers


@dataclass(frozen=True)
class DataTable:
    """Samples per second of loader and model, and what follows from them."""

    name: str
    batch: int
    configured: int  # data.workers
    loading: dict[int, float]  # by number of workers; 0 is among them
    model: float
    rows: int  # of the batch that the model was measured on
    device: str
    cores: int

    @property
    def per_worker(self) -> float:
        """Samples per second that one worker adds, by the largest number of workers measured."""
        most = max(self.loading)
        return self.loading[most] / max(1, most)

    @property
    def loading_share(self) -> float:
        """Share of its time that a run without workers spends loading."""
        return 1 / (1 + self.loading[0] / self.model)

    @property
    def balance(self) -> int:
        """Workers that keep up with the model; 0 where loading between steps costs next to nothing."""
        if self.loading_share < LITTLE:
            return 0
        enough = [workers for workers, rate in self.loading.items() if workers and rate >= self.model]
        return min(enough, default=ceil(self.model / self.per_worker))

    def verdict(self) -> str:
        """One line: what a run waits for."""
        # As measured, or by what one worker adds as long as cores last.
        ready = self.loading.get(self.configured, min(self.configured, self.cores) * self.per_worker)
        said = f"without workers a run spends {self.loading_share:.0%} of its time loading"
        if self.configured:
            said = f"data.workers={self.configured} loads {ready / self.model:.1f} times as fast as the model learns"
        needed = f"{self.balance} worker(s) balance the two." if self.balance else "It needs no workers."
        line = f"The bottleneck is the {'data' if ready < self.model else 'model'}: {said}. {needed}"
        if self.device == "cpu":
            line += f" Model and workers share the {self.cores} core(s) of this machine."
        elif self.balance > self.cores:
            line += f" This machine has {self.cores} core(s): smaller files or data.cache_mb would help."
        return line

    def to_markdown(self) -> str:
        """The table, the verdict, and what they were measured on."""
        rates = {f"loading, {workers or 'no'} worker(s)": rate for workers, rate in self.loading.items()}
        rates[f"encoder step, {self.rows} of {self.batch} rows, {self.device}"] = self.model
        rows = [(who, f"{rate:.1f}", f"{rate / self.model:.2f}") for who, rate in rates.items()]
        table = markdown_table(("what", "samples/s", "× model"), rows)
        return f"{table}\n{self.verdict()}\n\n{self.name}: {describe_machine()}\n"


def run(
    config: Config, *, seconds: float = 4.0, workers: Sequence[int] = (0, 1, 2), tell: Tell = lambda text: None
) -> DataTable:
    """Measure the data and the encoder step of a config, about `seconds` each."""
    tell("opening the data")
    source, machine, loading = open_data(config).train, open_machine(config.runtime), dict[int, float]()
    for count in workers:
        tell(f"loading with {count} worker(s)")
        loading[count] = loading_rate(source, config, workers=count, seconds=seconds)
    tell("encoder steps")
    phase, rows = config.encoder_phase, min(2, config.encoder_phase.batch)
    while True:
        model = step_rate(source, config, machine, rows=rows, seconds=seconds / 2)
        # A batch of many rows is used better by any machine, so take the largest that is not too slow.
        larger = min(phase.micro_batch or phase.batch, 4 * rows)
        if larger == rows or larger / model > seconds:
            break
        rows = larger
    cores, device = os.cpu_count() or 1, machine.device.type
    return DataTable(config.name, phase.batch, config.data.workers, loading, model, rows, device, cores)


def loader(source: Source, config: Config, *, workers: int, batch: int) -> Loader:
    """The loader of the encoder phase; mean and std do not matter for its speed."""
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
    rows, ready = min(ROWS, config.encoder_phase.batch), 1 + 3 * workers  # start-up, and batches prepared ahead
    steps = loader(source, config, workers=workers, batch=rows).steps(0, 10**9)
    for _ in range(ready):
        next(steps)
    rate = rows * calls_per_second(lambda: next(steps), seconds, least=ready)
    steps.close()  # type: ignore[attr-defined]  # ends the workers
    return rate


def step_rate(source: Source, config: Config, machine: Machine, *, rows: int, seconds: float) -> float:
    """Samples per second of encoder-phase steps on `rows` rows."""
    batches = next(loader(source, config, workers=0, batch=rows).steps(0, 1))
    nets = build_nets(config)
    if nets.own_tokenizer is not None:  # patches are predicted without
        start_codes(nets, config)
    for module in nets.modules().values():
        module.to(machine.device)
    with tempfile.TemporaryDirectory() as folder:
        a_run = trial_run(config, nets, source, Path(folder), machine, rows=rows)
        phase = encoder_phase(a_run, index=0, iteration=1)
        for module in phase.trained.values():
            module.train()
        step = stepper(a_run, phase, batches, build_optimizer(phase.trained, phase.settings))
        step()  # the first one allocates
        return rows * calls_per_second(step, seconds)


def calls_per_second(call: Call, seconds: float, *, least: int = 1) -> float:
    """How often a call fits into a second of wall time, measured for so many seconds and calls at least."""
    start, count = time.perf_counter(), 0
    while count < least or time.perf_counter() - start < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - start)
