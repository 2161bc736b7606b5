"""Resident memory over many optimizer steps, in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conftest import SMALL
from forked import LIMIT, SERVER


class Growth(NamedTuple):
    """How memory went."""

    steps: int  # between the two looks
    bytes: int  # that were held more at the second

    @property
    def per_step(self) -> float:
        return self.bytes / self.steps


class Look:
    """Notes the resident memory every so many steps."""

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, list[tuple[int, int]]()

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None: ...

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        if row["step"] % self.every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.seen.append((row["step"], pages * 4096))

    def on_evaluation(self, result: Mapping[str, Any]) -> None: ...

    def on_end(self) -> None: ...


def measure_growth(folder: Path, *, steps: int, limit: float = LIMIT) -> Growth:
    """Joint training, which does everything a step can do; the first third is warm-up."""
    report = folder / "memory.json"
    folder.mkdir(parents=True, exist_ok=True)
    process = SERVER.Process(target=_train, args=(str(folder / "run"), steps, str(report)))
    process.start()
    process.join(limit)
    seen = json.loads(report.read_text())
    warm = [held for step, held in seen if step <= steps // 3]
    return Growth(steps - steps // 3, max(0, seen[-1][1] - max(warm)))


def _train(out: str, steps: int, report: str) -> None:
    import torch

    from bridle import api
    from bridle.config import load_config

    os.dup2(os.open(f"{report}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)  # its progress is nobody's business
    torch.set_num_threads(1)
    changes = [*SMALL, "schedule.mode=joint", "schedule.iterations=1", "schedule.joint_every=2", "probe.enabled=false"]
    changes += [f"max_steps={steps}", "encoder_phase.steps=100000", "encoder_phase.epochs=null", "runtime.log_every=10"]
    look = Look(every=10)
    config = load_config("digits-tiny", [*changes, f"runtime.checkpoint_every={max(steps // 20, 1)}"])
    api.pretrain(config, out=out, callbacks=[look])
    Path(report).write_text(json.dumps(look.seen))
