"""Run directories written without training: networks with started codebooks as checkpoints at the ends of phases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from bridle.config import Config
from bridle.data.build import open_data
from bridle.data.loading.loader import Loader
from bridle.models.build import Nets, build_nets
from bridle.runs.checkpoint import publish
from bridle.runs.folder import RunFolder
from bridle.train.run import with_statistics


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
