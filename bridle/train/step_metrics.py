"""What a step leaves for people: one row of metrics.jsonl, one live line, and warnings when a run goes wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bridle import distributed
from bridle.console import clock as clock_text
from bridle.machine import cpu_seconds
from bridle.models.build import Networks
from bridle.models.tokenizer import Tokenizer
from bridle.quantize.dimension import NarrowWatch, code_spreads
from bridle.quantize.usage import CodeAge, CollapseWatch, top_share
from bridle.runs.callbacks import Row
from bridle.runs.reference_curves import CurveWatch
from bridle.train.run import Run

if TYPE_CHECKING:
    from bridle.train.engine import Phase, Progress, Update

UTILISATION_FROM = 50  # steps; counting the operations of a step takes about a second
WAITING = ("data", "checkpoint", "ranks")
MUCH = 0.25  # share of the time; less waiting is not shown
# Of a row: how fast and from where, which is no part of the experiment.
TIMINGS = (
    *("samples_per_second", "tokens_per_second", "flop_utilisation", *(f"waiting_{cause}" for cause in WAITING)),
    *("cpu_seconds", "resumed_from"),
)
USAGE_WINDOW = 50  # steps; a code not seen for longer does not count as used in the live figures


class Clock:
    """Rates and shares of waiting, measured between two looks, and the CPU time of training so far.

    Interruptions and evaluations do not count: `spent` is what earlier phases and processes noted (None: they did not),
    `began` the CPU time of this process when the phase began.
    """

    def __init__(self, run: Run[Networks], phase: Phase, *, step: int, spent: float | None, began: float) -> None:
        self.step, self.spent, self.began = step, spent, began
        self.time = self.asked = time.perf_counter()
        self.batch, self.tokens = phase.settings.batch, run.config.geometry.build().tokens
        self.machine, self.count_operations = run.machine, phase.operations
        self.operations: int | None = None  # of a step on one sample, once they are counted
        self.waited = dict.fromkeys(WAITING, 0.0)

    def start(self) -> None:
        """What was done before the first step is no part of the rate."""
        self.time = self.asked = time.perf_counter()
        distributed.waited_seconds()

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time inside the block as waiting for `cause`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited[cause] += time.perf_counter() - began

    def ask(self) -> None:
        """The step is done; what passes until `arrive` is waiting for data."""
        self.asked = time.perf_counter()

    def arrive(self) -> None:
        """The next batch is there."""
        self.waited["data"] += time.perf_counter() - self.asked

    def cpu_seconds(self, device: torch.device) -> float | None:
        """Of all ranks together; None where what was before is not known. Collective."""
        own = torch.tensor(cpu_seconds() - self.began, dtype=torch.float64, device=device)
        total = float(distributed.sum_over_ranks(own))
        return None if self.spent is None else round(self.spent + total, 2)

    def look(self, step: int) -> dict[str, float | None]:
        """What the steps since the last look took: rates, utilisation, and shares of the time spent waiting.

        The utilisation is against bare matrix products on the devices of all ranks; None in the first steps of a phase
        and in phases whose operations are not counted.
        """
        now = time.perf_counter()
        seconds = max(now - self.time, 1e-9)
        rate = (step - self.step) * self.batch / seconds
        self.waited["ranks"] += distributed.waited_seconds()
        waited = {f"waiting_{cause}": round(spent / seconds, 4) for cause, spent in self.waited.items()}
        self.waited = dict.fromkeys(WAITING, 0.0)
        used = None
        if self.count_operations is not None and step >= UTILISATION_FROM:
            self.operations = self.operations or self.count_operations()
            peak = self.machine.product_rate * distributed.world_size()
            used = round(rate * self.operations / peak, 4)
        self.step, self.time = step, time.perf_counter()  # counting is no part of the next rate
        rates = {"samples_per_second": round(rate, 1), "tokens_per_second": round(rate * self.tokens, 1)}
        return {**rates, "flop_utilisation": used, **waited}


class Watches(NamedTuple):
    """Checks of every logged row that may print a warning."""

    collapse: CollapseWatch
    curve: CurveWatch
    narrow: NarrowWatch

    @classmethod
    def of(cls, run: Run[Networks], phase: Phase) -> Watches:
        collapse = CollapseWatch(run.config.quantizer.sizes, window=USAGE_WINDOW)
        tokenizer = tokenizer_of(run)
        # A cold start that is whitened already is as wide as its patches allow.
        can_widen = tokenizer is not None and (tokenizer.is_trained or run.config.tokenizer.whiten is None)
        narrow = NarrowWatch(tokenizer.directions if tokenizer and can_widen else None, from_step=USAGE_WINDOW)
        return cls(collapse, CurveWatch.of(run.config, phase.key), narrow)


def report(
    run: Run[Networks],
    phase: Phase,
    progress: Progress,
    update: Update,
    ages: CodeAge | None,
    clock: Clock,
    watches: Watches,
) -> None:
    """One row for metrics.jsonl and the callbacks, one line for people."""
    figures: dict[str, Any] = {key: rounded(value) for key, value in update.values.items()}
    if not all(torch.isfinite(value).all() for value in update.values.values()):
        figures = {key: None for key in figures}  # JSON has no NaN; the step was skipped
    usage = usage_figures(update.counts, ages, tokenizer_of(run))
    speed = clock.look(progress.step)
    row = {
        "iteration": phase.iteration,
        "phase": phase.name,
        "phase_index": phase.index,
        "step": progress.step,
        "steps": phase.steps,
        **figures,
        **usage,
        "learning_rate": update.learning_rate,
        "skipped": progress.skipped,
        **speed,
        "cpu_seconds": clock.cpu_seconds(run.machine.device),
        "world_size": distributed.world_size(),
        "resumed_from": run.resumed_from,
    }
    if distributed.rank():
        return  # rank 0 speaks for all
    run.folder.add_metrics(row)
    for callback in run.callbacks:
        callback.on_metrics(row)
    if figures["loss"] is not None:
        eta = (phase.steps - progress.step) * phase.settings.batch / max(row["samples_per_second"], 1e-9)
        R = run.config.schedule.iterations
        long, short = (describe(row, iterations=R, eta_seconds=eta, brief=brief) for brief in (False, True))
        run.progress.show(long, short, final=progress.step == phase.steps)
    if usage:
        for text in watches.collapse.look(step=progress.step, usage=usage["code_usage"], top=usage["top_share"]):
            run.progress.note(f"{phase.key} step {progress.step}: {text}")
    for text in watches.narrow.look(step=progress.step, dimensions=usage.get("code_dimension", ())):
        run.progress.note(f"{phase.key} step {progress.step}: {text}")
    for text in watches.curve.look(row):
        run.progress.note(text)


def describe(row: Row, *, iterations: int, eta_seconds: float, brief: bool = False) -> str:
    """A row of metrics as a line; `brief` fits 80 columns: accuracy of the first stage, use of the least used book."""
    rate, eta = f"{row['samples_per_second']:,.0f}", f"ETA {clock_text(eta_seconds)}"
    accuracy, usage, step = row.get("token_accuracy"), row.get("code_usage"), f"{row['step']}/{row['steps']}"
    if brief:
        parts = [f"{row['iteration']}/{iterations} {row['phase']} {step}", f"loss {row['loss']:.3f}"]
        parts += [f"acc {_stages(accuracy[:1])}"] if accuracy else []
        parts += [f"acc {row['accuracy']:.2f}"] if "accuracy" in row else []
        parts += [f"codes {_stages([min(usage)])}"] if usage else []
        return " · ".join([*parts, f"{rate}/s", eta])
    turn = f"iter {row['iteration']}/{iterations}" if row["iteration"] else "scratch"
    parts = [f"{turn} {row['phase']:<9} {row['step']:>5}/{row['steps']}", f"loss {row['loss']:.3f}"]
    parts += [f"accuracy {_stages(accuracy)}"] if accuracy else []
    parts += [f"accuracy {row['accuracy']:.2f}"] if "accuracy" in row else []
    parts += [f"cosine loss {row['cosine']:.3f}"] if "cosine" in row else []
    parts += [f"codes used {_stages(usage)}"] if usage else []
    if "code_dimension" in row:
        parts.append(f"directions {'/'.join(f'{value:.0f}' for value in row['code_dimension'])}")
    parts += [f"skipped {row['skipped']}"] if row["skipped"] else []
    parts += [f"waits for {cause} {row[key]:.0%}" for cause in WAITING if row.get(key := f"waiting_{cause}", 0) > MUCH]
    return " · ".join([*parts, f"{rate} samples/s", eta])


def _stages(values: Sequence[float]) -> str:
    shown = (f"{value:.2f}" for value in values)
    return "/".join("1.0" if text == "1.00" else text.removeprefix("0") for text in shown)


def tokenizer_of(run: Run[Networks]) -> Tokenizer | None:
    """The tokenizer whose codes a phase reports, where its code vectors are whole on this process."""
    tokenizer = getattr(run.nets, "own_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer) or any(isinstance(p, DTensor) for p in tokenizer.quantizer.parameters()):
        return None
    return tokenizer


def usage_figures(
    chosen: Tensor | None, ages: CodeAge | None, tokenizer: Tokenizer | None = None
) -> dict[str, list[float]]:
    """How evenly a step's codes were used, one number per stage, from counts (ΣK_m,); empty in phases without codes."""
    if chosen is None or ages is None:
        return {}
    counts = chosen.split(list(ages.sizes))
    found = {
        "top_share": [round(float(top_share(count)), 6) for count in counts],
        "code_usage": [round(float(v), 6) for v in ages.used_within(USAGE_WINDOW)],
    }
    if tokenizer is not None:
        spreads = code_spreads(counts, tokenizer.quantizer.code_vectors())
        found["code_dimension"] = [0.0 if spread is None else round(spread.dimension, 3) for spread in spreads]
    return found


def rounded(value: Tensor) -> float | list[float]:
    return [round(v, 6) for v in value.tolist()] if value.dim() else round(value.item(), 6)
