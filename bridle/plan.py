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

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bridle.config import Config
from bridle.config.training_schema import PhaseConfig
from bridle.data.build import open_data
from bridle.data.modality import modality_of
from bridle.errors import ConfigError, UsageError
from bridle.machine import product_rate
from bridle.models.build import Nets, build_nets
from bridle.models.cost import Costs, StepCosts, step_costs
from bridle.train.algorithm1 import Turn, has_later_tokenizer, schedule
from bridle.train.parallel import blocks

NUMBER = 4  # bytes of a float32
SECONDS_PER_DAY = 86_400.0
# Samples of the published training sets; what can still be downloaded is fewer.
PUBLISHED = {
    "audioset2m": 2_084_320, "audioset20k": 22_160, "esc50": 2_000, "esc50-tiny": 2_000, "imagenet1k": 1_281_167,
    "kinetics400": 246_534, "cifar10-tiny": 50_000,
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """One accelerator, by its data sheet."""

    name: str
    peak: float  # operations a second in `precision`, dense
    memory: float | None  # bytes; None: not known
    precision: str
    utilisation: float  # assumed share of the peak that training reaches


DEVICES = {
    "a100": Device("A100 80 GB", 312e12, 80e9, "bf16", 0.35),
    "h100": Device("H100 80 GB", 989e12, 80e9, "bf16", 0.35),
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the height of a step."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float  # whole blocks, while weights are sharded
    activations: float
    total: float


@dataclass(frozen=True)
class PhasePlan:
    """One phase of the schedule. Traffic is in bytes per device and step, checkpoints are in bytes."""

    iteration: int
    name: str
    steps: int
    epochs: float | None  # None without a number of samples
    batch: int
    tokens_per_step: int
    operations: dict[str, int]  # of one sample, by part, forward and backward
    operations_per_sample: int
    trained: int  # parameters
    frozen: int
    rows: int  # that go through a device at once
    accumulation: int  # micro-batches a step and device
    memory_replicated: Memory
    memory_sharded: Memory
    fitting_rows: int | None  # the largest power of two of rows that fits; None where the device's memory is not known
    traffic_replicated: float
    traffic_sharded: float
    checkpoint: int  # inside the phase
    checkpoint_end: int
    estimated_seconds_per_step: float
    estimated_days: float


@dataclass(frozen=True)
class FinetunePlan:
    """The length of `bridle finetune`."""

    steps: int
    batch: int
    epochs: float
    epoch_items: int  # draws that count as one epoch


@dataclass(frozen=True)
class Plan:
    """A whole run on N devices."""

    name: str
    devices: int
    assumed: Device
    samples: int | None
    sample_bytes: int  # of a decoded sample, float32
    parameters: dict[str, int]  # by module, of the last iteration
    phases: tuple[PhasePlan, ...]
    finetune: FinetunePlan | None  # None where the number of training items is not known and decides
    keep: int  # checkpoints inside a phase
    checkpoint_disk: int  # bytes of checkpoints at the end of the run, the last phase's own included
    estimated_days: float
    estimated_bytes_per_second_and_device: float  # replicated: takes as long to move as the step takes to compute
    estimated_samples_per_second: float  # the most that any phase asks of the data, over all devices

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON; what is estimated has a name that says so."""
        per_device = self.estimated_samples_per_second / self.devices
        return {"format": 1, **asdict(self), "estimated_samples_per_second_and_device": per_device}


def make_plan(
    config: Config, *, devices: int = 1, device: str = "a100", samples: int | None = None,
    utilisation: float | None = None,
) -> Plan:  # fmt: skip
    """Plan a run of a config."""
    chosen = this_cpu() if device == "cpu" else DEVICES[device]
    if utilisation is not None:
        chosen = replace(chosen, utilisation=utilisation)
    count = samples if samples is not None else known_samples(config)
    turns, costs = schedule(config), step_costs(config, chosen.precision)
    phases = tuple(_phase(config, turn, devices, chosen, count, costs) for turn in turns)
    largest = max(phase.checkpoint for phase in phases)
    return Plan(
        name=config.name,
        devices=devices,
        assumed=chosen,
        samples=count,
        sample_bytes=NUMBER * prod(config.geometry.build().shape),
        parameters={name: _saved(module) for name, module in _nets(config, turns[-1]).modules().items()},
        phases=phases,
        finetune=plan_finetune(config, count),
        keep=config.runtime.keep,
        checkpoint_disk=sum(phase.checkpoint_end for phase in phases) + config.runtime.keep * largest,
        estimated_days=sum(phase.estimated_days for phase in phases),
        estimated_bytes_per_second_and_device=max(p.traffic_replicated / p.estimated_seconds_per_step for p in phases),
        estimated_samples_per_second=max(p.batch / p.estimated_seconds_per_step for p in phases),
    )


def plan_finetune(config: Config, samples: int | None) -> FinetunePlan | None:
    """Steps and epochs of fine-tuning on so many training items."""
    settings = config.finetune
    items = settings.epoch_items or samples
    if items is None:
        return None
    steps = settings.step_count(items)
    return FinetunePlan(steps, settings.batch, steps * settings.batch / items, items)


def known_samples(config: Config) -> int | None:
    """Number of training samples: counted where the config names data, else as published; None where neither is."""
    data = config.data
    if modality_of(config).open_embedded is not None or data.root is not None or data.manifest is not None:
        return len(open_data(config).train)
    return PUBLISHED.get(config.name)


def this_cpu() -> Device:
    """This machine, by the bare float32 product its threads reach in CPU time: as if nobody else were on it."""
    name = f"this CPU, {torch.get_num_threads()} thread(s)"
    return Device(name, product_rate(torch.device("cpu"), torch.float32), None, "fp32", 0.6)


def _phase(config: Config, turn: Turn, devices: int, device: Device, samples: int | None, costs: Costs) -> PhasePlan:
    section = "tokenizer_phase" if turn.name == "tokenizer" else "encoder_phase"
    settings: PhaseConfig = getattr(config, section)
    if settings.batch % devices:
        raise ConfigError(
            f"{section}.batch: a global batch of {settings.batch} cannot be shared evenly by {devices} devices; choose "
            f"--devices or {section}.batch accordingly."
        )
    steps, share = _steps(config, settings, samples, turn), settings.batch // devices
    rows = min(settings.micro_batch or share, share)
    later = has_later_tokenizer(config, turn)
    operations = _per_sample(config, turn, costs(turn.name, later, 1))
    seconds = settings.batch * sum(operations.values()) / (devices * device.peak * device.utilisation)
    # Frozen tokenizers keep no activations, so the first iteration's encoder phase stands for all.
    one, two = (costs(turn.name, later and turn.name != "encoder", n).total.kept for n in (1, 2))
    return PhasePlan(
        iteration=turn.iteration,
        name=turn.name,
        steps=steps,
        epochs=None if samples is None else steps * settings.batch / samples,
        batch=settings.batch,
        tokens_per_step=settings.batch * config.geometry.build().tokens,
        operations=operations,
        operations_per_sample=sum(operations.values()),
        rows=rows,
        accumulation=-(-share // rows),
        estimated_seconds_per_step=seconds,
        estimated_days=steps * seconds / SECONDS_PER_DAY,
        **_bytes(config, turn, devices, device, rows, share, lambda n: 2 * one - two + n * (two - one)),
    )


def _bytes(
    config: Config, turn: Turn, devices: int, device: Device, rows: int, share: int, activations: Callable[[int], float]
) -> dict[str, Any]:
    """Parameters, memory, traffic and checkpoints of a phase, as the fields of a PhasePlan."""
    nets = _nets(config, turn)
    modules, learning, sizes = nets.modules().values(), _trained(nets, turn), config.quantizer.sizes
    trained = sum(p.numel() for p in learning)
    frozen = sum(map(_saved, modules)) - trained
    block = max((sum(p.numel() for p in part.parameters()) for part in blocks(modules)), default=0)

    def memory(rows: int, shards: int = 1) -> Memory:
        own, gathered = NUMBER * trained / shards, NUMBER * 2.0 * block if shards > 1 else 0.0
        parts = (NUMBER * frozen + own, own, 2 * own, gathered, float(activations(rows)))
        return Memory(*parts, total=sum(parts))

    exchanged = NUMBER * trained * (devices - 1) / devices
    statistics = 0 if turn.name == "encoder" else 8 * sum(k * (1 + config.quantizer.width) for k in sizes)
    reduced = 2 * statistics * (devices - 1) / devices
    ages = 0 if nets.own_tokenizer is None else 8 * sum(sizes)
    saved = sum(tensor.nbytes for tensor in nets.state().values()) + ages
    return {
        "trained": trained,
        "frozen": frozen,
        "memory_replicated": memory(rows),
        "memory_sharded": memory(rows, devices),
        "fitting_rows": _fitting(memory, share, device),
        "traffic_replicated": 2 * exchanged + reduced,
        "traffic_sharded": 3 * exchanged + reduced,
        "checkpoint": saved + NUMBER * len(learning) + 2 * NUMBER * trained,  # AdamW: a step count and two moments
        "checkpoint_end": saved,
    }


def _steps(config: Config, settings: PhaseConfig, samples: int | None, turn: Turn) -> int:
    if settings.steps is None and samples is None:
        raise UsageError(
            f"the {turn.name} phase of {config.name} is {settings.epochs:g} epochs long and the number of samples is "
            "not known; give --samples N or data.root=PATH."
        )
    return min(settings.step_count(samples or 1), config.max_steps or 2**63)


def _per_sample(config: Config, turn: Turn, costs: StepCosts) -> dict[str, int]:
    """Operations of one sample by part, averaged over the steps; what is not done in each costs its share."""
    found = {}
    for name, cost in costs.parts.items():
        share = 1.0
        if turn.name == "encoder" and name in ("tokenizer", "codes"):
            share = 1 / config.encoder_phase.masks
        if name.startswith("taught "):
            share = 1 / config.schedule.joint_every
        found[name] = round(cost.operations * share)
    return found


def _nets(config: Config, turn: Turn) -> Nets:
    with FakeTensorMode():  # networks with shapes and no contents
        return build_nets(config, later_tokenizer=has_later_tokenizer(config, turn))


def _trained(nets: Nets, turn: Turn) -> list[nn.Parameter]:
    names = {"encoder": ("encoder", "decoder", "heads"), "tokenizer": ("tokenizer", "estimator")}
    wanted = names.get(turn.name, tuple(nets.modules()))
    return [p for name, module in nets.modules().items() if name in wanted for p in module.parameters()]


def _saved(module: nn.Module) -> int:
    """Parameters and saved buffers: what a checkpoint holds of a module."""
    return sum(tensor.numel() for tensor in module.state_dict().values())


def _fitting(memory: Callable[[int], Memory], share: int, device: Device) -> int | None:
    """The largest power of two of rows, up to a device's share of the batch, whose replicated memory fits."""
    if device.memory is None:
        return None
    fitting, rows = 0, 1
    while rows <= share and memory(rows).total <= 0.9 * device.memory:  # the rest is the framework's
        fitting, rows = rows, 2 * rows
    return fitting
