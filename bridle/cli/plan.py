"""`bridle plan`: what a run will cost, as tables or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridle.cli.app import TRAIN, Overrides, Recipe, app
from bridle.console import json_output, plain_table, screen
from bridle.errors import UsageError

if TYPE_CHECKING:
    from bridle.plan import Memory, PhasePlan, Plan

UNITS = ("", "k", "M", "G", "T", "P", "E", "Z")
CHOICES = ("a100", "h100", "cpu")
MANY_FILES = 2_000.0  # opens a second over all devices, above which a shared file system is the bottleneck


@app.command(rich_help_panel=TRAIN)
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 1,
    device: Annotated[str, typer.Option(help="a100, h100, or cpu for this machine.")] = "a100",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Size of the training set, if data.root is not given.")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Share of peak speed that training reaches.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes, operations and days.")] = False,
) -> None:
    """Estimate parameters, operations, memory, steps, checkpoint size, traffic and time of a run.

    Example:  bridle plan imagenet1k --devices 64 --device a100
    """
    if device not in CHOICES:
        raise UsageError(f"--device {device!r}: expected one of {', '.join(CHOICES)}.")
    from bridle.config import load_config
    from bridle.plan import make_plan

    config = load_config(recipe, overrides or [])
    found = make_plan(config, devices=devices, device=device, samples=samples, utilisation=utilisation)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
        return
    json_output.result("plan", found.as_dict())
    show_plan(found)
    typer.echo(f"Next:  bridle pretrain {recipe} … --max-steps 5   ·   bridle bench data {recipe} …")


def show_plan(found: Plan) -> None:
    """The plan as tables; every estimate stands under a heading that says so."""
    terminal = screen()
    known = "unknown" if found.samples is None else f"{found.samples:,}"
    terminal.print(f"{found.name} on {found.devices} × {found.assumed.name}, {known} samples\n", markup=False)
    modules = plain_table("module", "parameters", title="Weights and saved buffers", title_justify="left")
    for name, count in found.parameters.items():
        modules.add_row(name, scaled(count))
    terminal.print(modules)
    for title, rows in _tables(found).items():
        phases = (f"iter{p.iteration} {p.name}" for p in found.phases)
        table = plain_table("", *phases, title=title, title_justify="left")
        for label, cells in rows.items():
            table.add_row(label, *cells)
        terminal.print()
        terminal.print(table)
    terminal.print()
    for line in conclusions(found):
        terminal.print(line, markup=False, soft_wrap=True)


def _tables(found: Plan) -> dict[str, dict[str, list[str]]]:
    phases = found.phases
    parts = list(dict.fromkeys(name for phase in phases for name in phase.operations))

    def row(cell: Any) -> list[str]:
        return [cell(phase) for phase in phases]

    def part(name: str) -> list[str]:
        return [scaled(phase.operations[name]) if name in phase.operations else "–" for phase in phases]

    return {
        "Schedule": {
            "steps": row(lambda p: f"{p.steps:,}"),
            "epochs": row(lambda p: "–" if p.epochs is None else f"{p.epochs:.4g}"),
            "global batch": row(lambda p: f"{p.batch:,}"),
            "tokens per step": row(lambda p: scaled(p.tokens_per_step)),
            "rows per device × accumulation": row(lambda p: f"{p.rows} × {p.accumulation}"),
        },
        "Operations of one sample, forward and backward": {
            **{name: part(name) for name in parts},
            "all": row(lambda p: scaled(p.operations_per_sample)),
        },
        f"Memory per device, bytes ({found.assumed.precision})": {
            "trained parameters": row(lambda p: scaled(p.trained)),
            "weights + gradients + optimizer": row(lambda p: scaled(_state(p.memory_replicated))),
            "the same, runtime.shard=full": row(lambda p: scaled(_state(p.memory_sharded))),
            "activations": row(lambda p: scaled(p.memory_replicated.activations)),
            "together, replicated": row(lambda p: scaled(p.memory_replicated.total)),
            "together, runtime.shard=full": row(lambda p: scaled(p.memory_sharded.total)),
            "rows that fit": row(lambda p: "–" if p.fitting_rows is None else str(p.fitting_rows)),
        },
        "Bytes moved and stored": {
            "traffic per step and device, replicated": row(lambda p: scaled(p.traffic_replicated)),
            "the same, runtime.shard=full": row(lambda p: scaled(p.traffic_sharded)),
            "checkpoint inside the phase": row(lambda p: scaled(p.checkpoint)),
            "checkpoint at its end": row(lambda p: scaled(p.checkpoint_end)),
        },
        "Estimated time": {
            "seconds per step": row(lambda p: f"{p.estimated_seconds_per_step:.3g}"),
            "samples per second and device": row(
                lambda p: f"{p.batch / p.estimated_seconds_per_step / found.devices:,.0f}"
            ),
            "time": row(lambda p: duration(p.estimated_days)),
        },
    }


def conclusions(found: Plan) -> list[str]:
    """What follows from the figures, in sentences."""
    device, rate, days = found.assumed, found.estimated_samples_per_second, found.estimated_days
    together = "" if found.devices == 1 else f", {duration(days * found.devices)} of all devices together"
    lines = [
        f"Estimated: {duration(days)} in all{together}. Assumed: "
        f"{scaled(device.peak)} operations/s peak ({device.precision}), {device.utilisation:.0%} of it used, data and "
        "network never waited for. Not measured; `bridle bench step` measures this machine.",
        f"Data: up to {rate:,.0f} samples/s over all devices, {rate / found.devices:,.0f} per device, "
        f"{scaled(rate * found.sample_bytes)}B/s decoded. "
        + ("Use shards (`bridle data shard`): so many single files a second wear out a shared file system."
           if rate > MANY_FILES else "Single files will do; shards save opening them."),
        f"Disk: {scaled(found.checkpoint_disk)}B of checkpoints at most: the last {found.keep} of a phase and every "
        "phase's end.",
    ]  # fmt: skip
    if (tuned := found.finetune) is not None:
        lines.append(
            f"Fine-tuning: {tuned.steps:,} steps at a global batch of {tuned.batch:,}: {tuned.epochs:.4g} epochs of "
            f"{tuned.epoch_items:,} draws (`bridle finetune`, not counted above)."
        )
    if found.devices > 1:
        lines.append(
            f"Network: from {scaled(found.estimated_bytes_per_second_and_device)}B/s per device on, traffic hides "
            "behind computing; a slower network is what the run waits for. Larger batches per device ask less of it."
        )
    fitting = [(phase, phase.fitting_rows) for phase in found.phases]
    return lines + [advice(phase) for phase, rows in fitting if rows is not None and rows < phase.rows]


def advice(phase: PhasePlan) -> str:
    """How to make a phase fit."""
    name = f"iter{phase.iteration} {phase.name}: {phase.rows} rows a device do not fit"
    key = "tokenizer_phase" if phase.name == "tokenizer" else "encoder_phase"
    if phase.fitting_rows:
        return f"{name}; set {key}.micro_batch={phase.fitting_rows}, which accumulates to the same global batch."
    return f"{name}, not even one; set runtime.shard=full, runtime.checkpoint_activations=true, or a smaller size."


def duration(days: float) -> str:
    """A time in the unit that fits it: minutes, hours or days."""
    unit, size = next((u, s) for u, s, least in (("days", 1, 1.0), ("hours", 24, 1 / 24), ("minutes", 1440, 0.0))
                      if days >= least)  # fmt: skip
    return f"{days * size:.3g} {unit}"


def _state(memory: Memory) -> float:
    return memory.total - memory.activations


def scaled(number: float) -> str:
    """1234567 as 1.23M."""
    power = 0
    while abs(number) >= 999.5 and power < len(UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{UNITS[power]}"
