"""`bridle plan`: what a run will cost, before it costs anything. Nothing is trained.

Counted exactly: parameters, operations, activations, steps, checkpoint bytes (`models/cost.py`; fp32 state, AdamW's two
moments). Estimated, and marked so: time, from the device's published peak and an assumed utilisation.

With P_t trained and P_f frozen parameters, N devices, b rows a device and micro-batch, a(b) kept activations:

    memory, replicated = 4·(P_f + 4·P_t) + a(b)         weights, gradients and two moments are 4 numbers each
    memory, sharded    = 4·(P_f + 4·P_t/N + 2·P_block) + a(b)     two blocks gathered at a time
    traffic, replicated = 2·(N−1)/N · 4·P_t             all-reduce of the gradients, bytes per device and step
    traffic, sharded    = 3·(N−1)/N · 4·P_t             weights gathered twice, gradients scattered once
    time of a step = operations / (N · peak · utilisation)
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bridle.config import Config
from bridle.config.schema import FinetuneConfig, PhaseConfig
from bridle.data.build import open_data
from bridle.data.modality import modality_of
from bridle.errors import ConfigError, UsageError
from bridle.models.build import Nets
from bridle.models.cost import StepCosts, encoder_step, pretend_nets, tokenizer_step
from bridle.nn.transformer import Block
from bridle.train.algorithm1 import Turn, has_later_tokenizer, schedule

NUMBER = 4  # bytes of a float32
SECONDS_PER_DAY = 86_400.0
# Samples of the published training sets; what can still be downloaded is fewer.
PUBLISHED = {
    "audioset2m": 2_084_320, "audioset20k": 22_160, "esc50": 2_000, "esc50-tiny": 2_000, "imagenet1k": 1_281_167,
    "kinetics400": 246_534, "cifar10-tiny": 50_000,
}  # fmt: skip
MANY_FILES = 2_000.0  # opens a second over all devices, above which a shared file system is the bottleneck


class Device(NamedTuple):
    """One accelerator, by its data sheet."""

    name: str
    peak: float  # operations a second in `precision`, dense
    memory: float | None  # bytes; None: not known here
    precision: str
    utilisation: float  # assumed share of the peak that training reaches


DEVICES = {
    "a100": Device("A100 80 GB", 312e12, 80e9, "bf16", 0.35),
    "h100": Device("H100 80 GB", 989e12, 80e9, "bf16", 0.35),
}


class Memory(NamedTuple):
    """Bytes on one device at the height of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float = 0.0  # whole blocks, while weights are sharded

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class PhasePlan:
    """One phase of the schedule."""

    iteration: int
    name: str
    steps: int
    epochs: float | None  # None without a number of samples
    batch: int
    tokens_per_step: int
    operations: dict[str, int]  # of one sample, by part, forward and backward
    trained: int  # parameters
    frozen: int
    rows: int  # that go through a device at once
    accumulation: int  # micro-batches a step and device
    replicated: Memory
    sharded: Memory
    fitting_rows: int | None  # the largest power of two of rows that fits; None where the device's memory is not known
    traffic_replicated: float  # bytes per device and step
    traffic_sharded: float
    checkpoint: int  # bytes, inside the phase
    checkpoint_end: int
    seconds_per_step: float  # estimated

    @property
    def operations_per_sample(self) -> int:
        return sum(self.operations.values())

    @property
    def days(self) -> float:
        return self.steps * self.seconds_per_step / SECONDS_PER_DAY


class FinetunePlan(NamedTuple):
    """How long `bridle finetune` will be."""

    steps: int
    batch: int
    epochs: float
    epoch_items: int  # draws that count as one epoch

    @classmethod
    def of(cls, settings: FinetuneConfig, samples: int | None) -> FinetunePlan | None:
        """None where the number of training items is not known and decides."""
        items = settings.epoch_items or samples
        if items is None:
            return None
        steps = settings.step_count(items)
        return cls(steps, settings.batch, steps * settings.batch / items, items)


@dataclass(frozen=True)
class Plan:
    """A whole run on N devices."""

    name: str
    devices: int
    device: Device
    samples: int | None
    sample_bytes: int  # of a decoded sample, float32
    parameters: dict[str, int]  # by module, of the last iteration
    phases: tuple[PhasePlan, ...]
    finetune: FinetunePlan | None
    keep: int
    checkpoint_every: int

    @property
    def days(self) -> float:
        return sum(phase.days for phase in self.phases)

    @property
    def samples_per_second(self) -> float:
        """The most that any phase asks of the data, over all devices."""
        return max(phase.batch / phase.seconds_per_step for phase in self.phases)

    @property
    def hidden_traffic(self) -> float:
        """Bytes a second and device, replicated, that take as long to move as the step takes to compute."""
        return max(phase.traffic_replicated / phase.seconds_per_step for phase in self.phases)

    @property
    def disk(self) -> int:
        """Bytes of checkpoints at the end of the run, when the last phase has not dropped its own yet."""
        return sum(p.checkpoint_end for p in self.phases) + self.keep * max(p.checkpoint for p in self.phases)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON; what is estimated sits under names that say so."""
        phases = []
        for phase in self.phases:
            row = asdict(phase)
            row["estimated_seconds_per_step"] = row.pop("seconds_per_step")
            memory = {"memory_replicated": phase.replicated, "memory_sharded": phase.sharded}
            row |= {key: {**m._asdict(), "total": m.total} for key, m in memory.items()}
            del row["replicated"], row["sharded"]
            phases.append(row | {"operations_per_sample": phase.operations_per_sample, "estimated_days": phase.days})
        return {
            "format": 1,
            "name": self.name,
            "devices": self.devices,
            "assumed": self.device._asdict(),
            "samples": self.samples,
            "sample_bytes": self.sample_bytes,
            "parameters": self.parameters,
            "phases": phases,
            "finetune": None if self.finetune is None else self.finetune._asdict(),
            "checkpoint_disk": self.disk,
            "estimated_days": self.days,
            "estimated_bytes_per_second_and_device": self.hidden_traffic,
            "estimated_samples_per_second": self.samples_per_second,
            "estimated_samples_per_second_and_device": self.samples_per_second / self.devices,
        }


def make_plan(
    config: Config, *, devices: int = 1, device: str = "a100", samples: int | None = None,
    utilisation: float | None = None,
) -> Plan:  # fmt: skip
    """Plan a run of a config."""
    chosen = this_cpu() if device == "cpu" else DEVICES[device]
    if utilisation is not None:
        chosen = chosen._replace(utilisation=utilisation)
    count = samples if samples is not None else known_samples(config)
    turns = schedule(config)
    costs = Costs(config, chosen.precision)
    phases = tuple(_phase(config, turn, devices, chosen, count, costs) for turn in turns)
    nets = _nets(config, turns[-1])
    return Plan(
        name=config.name,
        devices=devices,
        device=chosen,
        samples=count,
        sample_bytes=NUMBER * prod(config.geometry.build().shape),
        parameters={name: _numbers(module) for name, module in nets.modules().items()},
        phases=phases,
        finetune=FinetunePlan.of(config.finetune, count),
        keep=config.runtime.keep,
        checkpoint_every=config.runtime.checkpoint_every,
    )


def known_samples(config: Config) -> int | None:
    """Samples of the training set: counted where the data is at hand, else as published; None where neither is."""
    data = config.data
    if modality_of(config).open_embedded is not None or data.root is not None or data.manifest is not None:
        return len(open_data(config).train)
    return PUBLISHED.get(config.name)


def this_cpu() -> Device:
    """This machine, by the bare float32 product its threads reach in CPU time: as if nobody else were on it."""
    a, best, threads = torch.zeros(1024, 1024), 0.0, torch.get_num_threads()
    for _ in range(5):
        start = time.process_time()
        torch.mm(a, a)
        best = max(best, threads * 2 * 1024**3 / max(time.process_time() - start, 1e-9))
    return Device(f"this CPU, {threads} thread(s)", best, None, "fp32", 0.6)


class Costs:
    """What one step of each kind of phase keeps and computes; phases of the same kind are counted once."""

    def __init__(self, config: Config, precision: str) -> None:
        self.config, self.precision = config, precision
        self.known: dict[tuple[str, bool, int], StepCosts] = {}

    def of(self, turn: Turn, *, rows: int) -> StepCosts:
        """Of a step on some rows; of joint training at its fullest step."""
        own = has_later_tokenizer(self.config, turn)
        key = (turn.name, own, rows)
        if key not in self.known:
            self.known[key] = self._count(turn.name, own, rows)
        return self.known[key]

    def kept(self, turn: Turn) -> tuple[int, int]:
        """Bytes that stay whatever the rows (low-precision copies of weights), and bytes for every row."""
        # Frozen tokenizers leave nothing behind, so the first iteration's counts for all.
        like = Turn(1, "encoder") if turn.name == "encoder" else turn
        one, two = (self.of(like, rows=rows).total.kept for rows in (1, 2))
        return 2 * one - two, two - one

    def _count(self, name: str, own: bool, rows: int) -> StepCosts:
        config, precision = self.config, self.precision
        if name == "tokenizer":
            return tokenizer_step(config, rows=rows, precision=precision)
        costs = encoder_step(config, rows=rows, later_tokenizer=own, precision=precision)
        if name != "joint":
            return costs
        taught = tokenizer_step(config, rows=rows, precision=precision)
        return StepCosts(costs.parts | {f"taught {part}": cost for part, cost in taught.parts.items()})


def _phase(config: Config, turn: Turn, devices: int, device: Device, samples: int | None, costs: Costs) -> PhasePlan:
    settings: PhaseConfig = config.tokenizer_phase if turn.name == "tokenizer" else config.encoder_phase
    if settings.batch % devices:
        raise ConfigError(
            f"{turn.name}: a global batch of {settings.batch} cannot be shared evenly by {devices} devices; choose "
            f"--devices or {'tokenizer' if turn.name == 'tokenizer' else 'encoder'}_phase.batch accordingly."
        )
    steps, share = _steps(config, settings, samples, turn), settings.batch // devices
    rows = min(settings.micro_batch or share, share)
    fixed, per_row = costs.kept(turn)
    once = samples / (steps * settings.batch) if samples else 1.0  # all are tokenized once, however few are shown
    operations = _per_sample(config, turn, costs.of(turn, rows=1), stored=once)
    nets = _nets(config, turn)
    trained_modules = _trained(nets, turn)
    trained = sum(_learning(module) for module in trained_modules.values())
    frozen = sum(_numbers(module) for module in nets.modules().values()) - trained
    memory = partial(_memory, trained, frozen, _largest_block(nets), fixed, per_row)
    exchanged = NUMBER * trained * (devices - 1) / devices
    statistics = 8 * sum(k * (1 + config.quantizer.width) for k in config.quantizer.sizes)
    extra = 2 * statistics * (devices - 1) / devices if turn.name != "encoder" else 0.0
    state = sum(tensor.nbytes for tensor in nets.state().values())
    ages = 0 if nets.own_tokenizer is None else 8 * sum(config.quantizer.sizes)
    moments = sum(1 for m in trained_modules.values() for _ in m.parameters()) * NUMBER + 2 * NUMBER * trained
    return PhasePlan(
        iteration=turn.iteration,
        name=turn.name,
        steps=steps,
        epochs=None if samples is None else steps * settings.batch / samples,
        batch=settings.batch,
        tokens_per_step=settings.batch * config.geometry.build().tokens,
        operations=operations,
        trained=trained,
        frozen=frozen,
        rows=rows,
        accumulation=-(-share // rows),
        replicated=memory(rows, shards=1),
        sharded=memory(rows, shards=devices),
        fitting_rows=_fitting(memory, share, device),
        traffic_replicated=2 * exchanged + extra,
        traffic_sharded=3 * exchanged + extra,
        checkpoint=state + ages + moments,
        checkpoint_end=state + ages,
        seconds_per_step=settings.batch * sum(operations.values()) / (devices * device.peak * device.utilisation),
    )


def _steps(config: Config, settings: PhaseConfig, samples: int | None, turn: Turn) -> int:
    if settings.steps is None and samples is None:
        raise UsageError(
            f"the {turn.name} phase of {config.name} is {settings.epochs:g} epochs long and the number of samples is "
            "not known; give --samples N or data.root=PATH."
        )
    steps = settings.step_count(samples or 1)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def _per_sample(config: Config, turn: Turn, costs: StepCosts, *, stored: float) -> dict[str, int]:
    """Operations of one sample by part, on the average over steps: reused codes and rare tokenizer steps count so.

    `stored` is the share of shown samples that are tokenized where the data set is tokenized once.
    """
    every = config.schedule.joint_every
    found = {}
    for name, cost in costs.parts.items():
        share = 1.0
        if turn.name == "encoder" and name in ("tokenizer", "codes"):
            share = 1 / config.encoder_phase.masks if config.encoder_phase.codes == "live" else stored
        if name.startswith("taught "):
            share = 1 / every
        found[name] = round(cost.operations * share)
    return found


def _nets(config: Config, turn: Turn) -> Nets:
    with FakeTensorMode():
        return pretend_nets(config, later_tokenizer=has_later_tokenizer(config, turn))


def _trained(nets: Nets, turn: Turn) -> dict[str, nn.Module]:
    names = {"encoder": ("encoder", "decoder", "heads"), "tokenizer": ("tokenizer", "estimator")}
    wanted = names.get(turn.name, tuple(nets.modules()))
    return {name: module for name, module in nets.modules().items() if name in wanted}


def _numbers(module: nn.Module) -> int:
    """Parameters and saved buffers: what a checkpoint holds of a module."""
    return sum(tensor.numel() for tensor in module.state_dict().values())


def _learning(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _largest_block(nets: Nets) -> int:
    blocks = (part for module in nets.modules().values() for part in module.modules() if isinstance(part, Block))
    return max((_learning(block) for block in blocks), default=0)


def _memory(trained: int, frozen: int, block: int, fixed: int, per_row: int, rows: int, *, shards: int) -> Memory:
    own = NUMBER * trained / shards
    gathered = NUMBER * 2.0 * block if shards > 1 else 0.0
    return Memory(NUMBER * frozen + own, own, 2 * own, float(fixed + rows * per_row), gathered)


def _fitting(memory: Any, share: int, device: Device) -> int | None:
    """The largest power of two of rows, up to a device's share of the batch, whose replicated memory fits."""
    if device.memory is None:
        return None
    fitting, rows = 0, 1
    while rows <= share and memory(rows, shards=1).total <= 0.9 * device.memory:  # the rest is the framework's
        fitting, rows = rows, 2 * rows
    return fitting
