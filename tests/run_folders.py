"""Run directories written without training (networks with started codebooks), and a callback that stops a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bridle.config import Config, with_statistics
from bridle.data.build import open_data
from bridle.data.loading.loader import Loader
from bridle.models.build import Nets, build_nets
from bridle.runs.checkpoint import publish
from bridle.runs.folder import RunFolder


def write_run(
    folder: Path,
    config: Config,
    *,
    ends: tuple[tuple[int, str], ...] = ((1, "encoder"),),
    spoil: Callable[[Nets], None] | None = None,
) -> Path:
    """A run whose finished phases are `ends`; `spoil` may change its networks before they are saved."""
    config = with_statistics(config, [0.3] * config.geometry.channels, [0.4] * config.geometry.channels)
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).write_settings(config, command="bridle pretrain")
    source = open_data(config).train
    loader = Loader(source=source, seed=0, phase="start", batch=1, mean=[0.3], std=[0.4])
    x = torch.cat([batch.x for batch in loader.first(200, rows=200)])  # a file that cannot be read is replaced
    for index, (iteration, phase) in enumerate(ends):
        nets = build_nets(config, iteration=iteration, later_tokenizer=iteration > 1)
        with torch.no_grad():
            z_tilde = nets.tokenizer.encode(x)
        nets.tokenizer.quantizer.start_codebooks(z_tilde, generator=torch.Generator().manual_seed(0))
        nets.norms_start = [book.norm(dim=-1).tolist() for book in nets.tokenizer.quantizer.code_vectors()]
        if spoil is not None:
            spoil(nets)
        state = {"phase_index": index, "phase": phase, "iteration": iteration, "finished": True, **nets.record()}
        name = f"p{index:04}-iter{iteration}-{phase}-00000004-end"
        publish(folder / "checkpoints", name, {"model": nets.state()}, state, keep=2)
    return folder


class StopAt:
    """A callback that signals the process when the run logs one of the places (phase, iteration, step)."""

    def __init__(self, *places: tuple[str, int, int], number: int = signal.SIGTERM) -> None:
        self.places, self.number, self.fired = set(places), number, 0

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None: ...

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        if (row["phase"], row["iteration"], row["step"]) in self.places:
            self.fired += 1
            os.kill(os.getpid(), self.number)

    def on_evaluation(self, result: Mapping[str, Any]) -> None: ...

    def on_end(self) -> None: ...
