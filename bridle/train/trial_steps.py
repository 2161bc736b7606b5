"""Encoder steps outside of a run: the engine's own step again and again, as `bridle init` and benchmarks time it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from bridle.config import Config
from bridle.console import ProgressLine
from bridle.data.loading.loader import Batch
from bridle.data.sources import Source
from bridle.machine import Machine, StopRequest
from bridle.models.build import Nets
from bridle.quantize.usage import CodeAge
from bridle.runs.folder import RunFolder
from bridle.seeding import generator
from bridle.train.engine import Phase, Progress, build_replicas, take_step
from bridle.train.optim import named_parameters
from bridle.train.run import Run

Call = Callable[[], object]


def cpu_seconds(call: Call) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def trial_run(
    config: Config, nets: Nets, source: Source, folder: Path, machine: Machine, *, rows: int, masks: int = 1
) -> Run[Nets]:
    """A run of encoder steps on `rows` rows whose codes stay for `masks` steps."""
    changes = {"batch": rows, "micro_batch": None, "steps": 10**9, "epochs": None, "masks": masks}
    settings = config.encoder_phase.model_copy(update=changes)
    own = config.model_copy(update={"encoder_phase": settings, "max_steps": None})
    return Run(RunFolder(folder), own, machine, source, nets, StopRequest(), ProgressLine())


def stepper(a_run: Run[Nets], phase: Phase, batches: list[Batch], optimizer: torch.optim.Optimizer) -> Call:
    """The engine's own step on the same batches again and again; returns the loss."""
    parameters, replicas = named_parameters(phase.trained), build_replicas(a_run, phase)
    progress, ages = Progress(), CodeAge(a_run.config.quantizer.sizes)

    def step() -> object:
        update = take_step(a_run, phase, replicas, progress, optimizer, parameters, batches, ages)
        return update.values["loss"].item()  # waits for a GPU to be done

    return step


def start_codes(nets: Nets, config: Config) -> None:
    """Start the codebooks on random points; which codes they hold does not change the time of a step."""
    points = torch.randn(4 * max(config.quantizer.sizes), config.quantizer.width, generator=generator("bench"))
    nets.tokenizer.quantizer.start_codebooks(points, generator=generator("bench", "start"))
