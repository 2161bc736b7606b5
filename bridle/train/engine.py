"""One engine for every phase: accumulation, clipping, schedule, precision, logging, checkpoints, signals, bad numbers.

A phase supplies a step on a micro-batch; the engine does the rest. All randomness of a step comes from
(seed, phase, step, purpose), so a run that stops after step s and continues is the run that never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bridle import distributed, failpoints
from bridle.config.training_schema import PhaseConfig
from bridle.data.loading.loader import Batch, Loader
from bridle.errors import CheckpointError, NonFiniteError, UsageError
from bridle.machine import cpu_seconds
from bridle.models.build import Networks
from bridle.quantize import Statistics
from bridle.quantize.usage import CodeAge
from bridle.runs import checkpoint
from bridle.runs.background import BackgroundWriter, snapshot
from bridle.train.draws import Draws, is_shown
from bridle.train.optim import (
    build_optimizer,
    learning_rate,
    load_optimizer_tensors,
    named_parameters,
    optimizer_tensors,
    same_rate,
    set_rate,
)
from bridle.train.parallel import Gathered, Replicas, agree, require_equal, whole_state
from bridle.train.run import Run
from bridle.train.step_metrics import Clock, Watches, report


class StepResult(NamedTuple):
    """The result of a phase's step on one micro-batch."""

    loss: Tensor  # mean over the micro-batch
    codes: Tensor | None  # (B, T, M), for the usage figures; None in phases without codes
    values: dict[str, Tensor]  # further figures to log, scalars or one per stage
    statistics: Statistics | None = None  # for the codebook update


@dataclass
class Phase:
    """One training phase: a turn of Algorithm 1, or another step the engine can run."""

    index: int  # position among the run's phases
    iteration: int  # r
    name: str  # encoder, tokenizer, joint, finetune
    steps: int
    warmup: int
    settings: PhaseConfig
    trained: Mapping[str, nn.Module]  # these learn; everything else is frozen
    step: Callable[[Batch, Draws], StepResult]
    start: Callable[[], None] = field(default=lambda: None)  # once, before step 0: codebook start
    before_step: Callable[[int, Sequence[Batch]], None] = field(default=lambda step, batches: None)
    after_update: Callable[[Statistics], None] = field(default=lambda statistics: None)
    after_step: Callable[[], None] = field(default=lambda: None)  # whenever the weights have moved
    after_skip: Callable[[], None] = field(default=lambda: None)  # undo what before_step changed: the step was skipped
    # With the steps done, the step's batches and when each code was last used.
    after_codes: Callable[[int, Sequence[Batch], CodeAge], None] = field(default=lambda done, batches, ages: None)
    rate_scale: Callable[[str], float] = same_rate  # of the learning rate, by the parameter's dotted name
    has_codes: bool = True  # do steps report codes?
    some_steps_only: bool = False  # are there steps that leave some parameters without a gradient?
    repeats: int = 1  # steps for which the same batch stays, with other draws
    operations: Callable[[], int] | None = None  # counts those of a step on one sample

    @property
    def key(self) -> str:
        """Names the phase in seeds and checkpoints."""
        return phase_key(self.iteration, self.name)


def phase_key(iteration: int, name: str) -> str:
    return f"iter{iteration}-{name}"


@dataclass
class Progress:
    """How far a phase is; saved with every checkpoint."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


def fit(run: Run[Networks], phase: Phase, restored: checkpoint.Loaded | None) -> None:
    """Train one phase to its end, from its beginning or from a checkpoint inside it."""
    began = cpu_seconds()
    unfreeze(run.nets, phase.trained)
    if restored is None:
        phase.start()
    require_equal(run.nets.state(), where=f"{phase.key}, at its beginning")
    replicas = build_replicas(run, phase)
    parameters = named_parameters(phase.trained)
    optimizer = build_optimizer(phase.trained, phase.settings, phase.rate_scale)
    ages = CodeAge(run.config.quantizer.sizes) if phase.has_codes else None
    progress = Progress() if restored is None else restore(restored, optimizer, parameters, ages)
    loader = phase_loader(run, phase)
    clock, watches = begin_clock(run, phase, progress.step, began), Watches.of(run, phase)

    def save(writer: BackgroundWriter | None = None, *, end: bool = False) -> dict[str, Tensor]:
        tensors = {"model": whole_state(run.nets.state())}
        if ages is not None:
            tensors["ages"] = ages.state()
        if not end:  # the next phase starts with an optimizer of its own
            tensors["optimizer"] = whole_state(optimizer_tensors(optimizer, parameters))
        save_checkpoint(run, phase, progress, tensors, end=end, writer=writer)
        note_cost(run, phase, progress, clock)
        return tensors["model"]

    if restored is None:
        save()  # a codebook start is not done twice
    clock.start()
    with BackgroundWriter() as writer:
        for micro_batches in loader.steps(progress.step, phase.steps):
            clock.arrive()
            writer.check()
            update = take_step(run, phase, replicas, progress, optimizer, parameters, micro_batches, ages)
            finished = progress.step == phase.steps
            if is_shown(run, phase, progress.step):
                report(run, phase, progress, update, ages, clock, watches)
            if finished or progress.step % run.config.runtime.compare_every == 0:
                require_equal(run.nets.state(), where=f"{phase.key} step {progress.step}")
            due = progress.step % run.config.runtime.checkpoint_every == 0
            stop = update.stop if distributed.is_active() else run.stop.received is not None  # alone: seen at once
            if not finished and (due or stop):
                with clock.waiting("checkpoint"):
                    save(writer)
                if stop:  # a signal that came meanwhile ends the next step
                    writer.wait()
                    run.leave(f"saved at step {progress.step} of {phase.key}.")
            clock.ask()
    replicas.dissolve(run.nets, save(end=True))
    run.leave(f"the end of {phase.key} is saved.")


def phase_loader(run: Run[Networks], phase: Phase) -> Loader:
    """The batches of a phase, in its order."""
    settings = phase.settings
    return run.loader(phase=phase.key, batch=settings.batch, micro_batch=settings.micro_batch, repeats=phase.repeats)


def begin_clock(run: Run[Networks], phase: Phase, step: int, began: float) -> Clock:
    """A clock that goes on from the CPU time noted at this step; `began` is the process's own when the phase began."""
    is_first = phase.index == step == 0
    spent = 0.0 if is_first else run.folder.cpu_seconds_at(phase_index=phase.index, step=step)
    return Clock(run, phase, step=step, spent=spent, began=began)


def unfreeze(nets: Networks, trained: Mapping[str, nn.Module]) -> None:
    """Let the modules of a phase learn and freeze all others."""
    for module in nets.modules().values():
        module.requires_grad_(False).eval()
    for module in trained.values():
        module.requires_grad_(True).train()


def restore(
    loaded: checkpoint.Loaded,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    ages: CodeAge | None,
) -> Progress:
    """Optimizer and ages as a checkpoint inside a phase holds them, and how far the phase was."""
    try:
        # The end of a phase, from which a lengthened run goes on, holds no optimizer.
        if not loaded.state.get("finished"):
            load_optimizer_tensors(optimizer, parameters, loaded.group("optimizer"))
        if ages is not None:
            ages.load_state(loaded.group("ages"))
    except (UsageError, ValueError) as error:
        raise CheckpointError(f"{loaded.path}: damaged or made by other software ({error}).") from error
    return Progress(**loaded.state["progress"])


def build_replicas(run: Run[Networks], phase: Phase) -> Replicas:
    runtime = run.config.runtime
    return Replicas(
        phase.trained,
        phase.step,
        shard=runtime.shard,
        shard_groups=runtime.shard_groups,
        compiled=runtime.compile,
        some_steps_only=phase.some_steps_only,
    )


class Update(NamedTuple):
    """What one optimizer step did, for the log."""

    values: dict[str, Tensor]
    learning_rate: float
    counts: Tensor | None  # (ΣK_m,): how often each code was chosen, by all ranks
    stop: bool  # was any rank asked to stop?


def take_step(
    run: Run[Networks],
    phase: Phase,
    replicas: Replicas,
    progress: Progress,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    micro_batches: list[Batch],
    ages: CodeAge | None,
) -> Update:
    """Accumulate, check, update. A step with non-finite loss or gradient changes nothing but the skip counters."""
    failpoints.hit("step.begin")
    settings, draws = phase.settings, Draws(run, phase, progress.step, micro_batches)
    rate = learning_rate(
        progress.step,
        steps=phase.steps,
        warmup=phase.warmup,
        peak=settings.learning_rate,
        final=settings.final_learning_rate,
    )
    set_rate(optimizer, rate)
    phase.before_step(progress.step, micro_batches)
    gathered = accumulate(run, phase, replicas, draws, micro_batches)
    if failpoints.hit("step.gradient"):
        next(p.grad for p in parameters.values() if p.grad is not None).fill_(float("inf"))
    norm = replicas.clip(parameters.values(), settings.clip or float("inf"))
    # The norm too is agreed on: what went bad on one rank after the exchange must not be skipped there alone.
    figures = {**gathered.total, "grad_norm": norm / replicas.scale}
    counts = None if ages is None or not gathered.codes else ages.count(torch.cat(gathered.codes))
    own = Gathered(figures, gathered.statistics, counts)
    agreed = agree(own, [sample for batch in micro_batches for sample in batch.bad], run.stop)
    run.quarantine(agreed.bad, phase=phase.key)
    total, statistics, counts = agreed.gathered
    failpoints.hit("step.after_backward")
    if agreed.is_finite:
        optimizer.step()
        if statistics is not None:
            phase.after_update(statistics)
        phase.after_step()
        progress.skipped_in_a_row = 0
    else:
        phase.after_skip()
        skip(run, phase, progress)
    optimizer.zero_grad(set_to_none=True)
    if ages is not None and counts is not None and not progress.skipped_in_a_row:  # a skipped step changes nothing
        ages.update(counts)
        phase.after_codes(progress.step + 1, micro_batches, ages)
    failpoints.hit("step.after_update")
    progress.step += 1
    return Update(total, rate, counts, agreed.stop)


class Accumulated(NamedTuple):
    """What the micro-batches of this rank add up to; their gradients are in the parameters."""

    total: dict[str, Tensor]  # loss and figures, as parts of the global batch's means
    statistics: Statistics | None
    codes: list[Tensor]  # (S, M) of each micro-batch, without padding


def accumulate(
    run: Run[Networks], phase: Phase, replicas: Replicas, draws: Draws, micro_batches: list[Batch]
) -> Accumulated:
    """Forward and backward of every micro-batch of a step."""
    total: dict[str, Tensor] = {}
    statistics: Statistics | None = None
    codes = []
    for number, batch in enumerate(micro_batches, start=1):
        on_device = move(batch, run.machine.device)
        if failpoints.hit("step.input"):
            on_device = on_device._replace(x=on_device.x * float("nan"))
        share = batch.x.shape[0] / phase.settings.batch
        with replicas.accumulating(last=number == len(micro_batches)):
            with run.machine.autocast():
                result: StepResult = replicas(on_device, draws)
            if failpoints.hit("step.loss"):
                result = result._replace(loss=result.loss * float("nan"))
            (result.loss * (share * replicas.scale)).backward()
        for key, value in {"loss": result.loss.detach(), **result.values}.items():
            total[key] = total.get(key, torch.zeros_like(value)) + value.detach() * share
        if result.statistics is not None:
            statistics = result.statistics if statistics is None else statistics + result.statistics
        if result.codes is not None:
            codes.append(result.codes.flatten(0, 1) if on_device.valid is None else result.codes[on_device.valid])
    return Accumulated(total, statistics, codes)


def skip(run: Run[Networks], phase: Phase, progress: Progress) -> None:
    """Count a non-finite step; too many in a row end the run and the last good checkpoint stays."""
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    run.progress.note(f"{phase.key} step {progress.step}: loss or gradient not finite; step skipped.")
    if progress.skipped_in_a_row >= run.config.runtime.stop_after_skips:
        raise NonFiniteError(
            f"{phase.key} step {progress.step}: {progress.skipped_in_a_row} steps in a row with a loss or gradient "
            f"that is not finite. The last good checkpoint is in {run.folder.checkpoints}. "
            "Try a lower learning_rate with another --out."
        )


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device the networks are on."""
    return batch._replace(
        x=batch.x.to(device, non_blocking=True),
        label=None if batch.label is None else batch.label.to(device, non_blocking=True),
        valid=None if batch.valid is None else batch.valid.to(device, non_blocking=True),
    )


def note_cost(run: Run[Networks], phase: Phase, progress: Progress, clock: Clock) -> None:
    """What training has cost up to a checkpoint; beside and not in it, whose bits only the experiment decides."""
    spent = clock.cpu_seconds(run.machine.device)  # collective
    if spent is not None and distributed.rank() == 0:
        run.folder.add_cost({"phase_index": phase.index, "step": progress.step, "cpu_seconds": spent})


def save_checkpoint(
    run: Run[Networks],
    phase: Phase,
    progress: Progress,
    tensors: Mapping[str, Mapping[str, Tensor]],
    *,
    end: bool,
    writer: BackgroundWriter | None = None,
) -> None:
    """Publish a checkpoint of the run as it stands; with a `writer` of a copy in memory, while training goes on."""
    if distributed.rank():
        return  # rank 0 writes for all
    name = checkpoint.CheckpointName(phase.index, phase.iteration, phase.name, progress.step, end)
    state = {
        "phase_index": phase.index,
        "phase": phase.name,
        "iteration": phase.iteration,
        "finished": end,
        "progress": dict(vars(progress)),
        **deepcopy(run.nets.record()),
        "made_with": run.made_with(),
    }
    kept = run.config.runtime

    def write(saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        run.folder.sync_metrics()
        checkpoint.publish(
            run.folder.checkpoints, str(name), saved, state, keep=kept.keep, keep_finished=kept.keep_finished
        )

    if writer is None:
        write(tensors)
        return
    writer.wait()  # before the copy: two in memory are enough
    writer.start(partial(write, snapshot(tensors)))
