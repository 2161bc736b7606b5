"""`bridle probe`: evaluate the encoders of a run, on its own data or another folder, and write probe.json beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bridle.config import Config, differences, read_config
from bridle.data.build import is_labelled, open_data
from bridle.errors import ConfigError, DataError, UsageError
from bridle.evaluate.judge import Judge
from bridle.train.checkpoint import load as load_checkpoint
from bridle.train.interleave import finished_phases, restore_nets
from bridle.train.log import ProgressLine
from bridle.train.run import Results, results_header
from bridle.train.runtime import Machine

MAY_CHANGE = ("probe.", "data.root", "data.workers", "runtime.", "seed")


def probe_run(folder: Path, overrides: Sequence[str]) -> Path:
    """Probe the encoder after each finished iteration. Asking again with the same settings computes nothing anew."""
    stored = folder / "config.yaml"
    if not stored.is_file():
        raise UsageError(f"{folder}: not a run directory (no config.yaml); give the folder that --out named.")
    trained, config = read_config(stored), read_config(stored, overrides)
    _require_probe_keys(trained, config)
    ends = finished_phases(folder)
    if not ends:
        raise UsageError(
            f"{folder}: no finished encoder phase yet; run `bridle pretrain` with the same arguments to go on."
        )
    splits = open_data(config)
    if not is_labelled(splits.train):
        raise DataError(
            f"{config.data.root or config.data.source}: a probe needs labels, one folder per class; "
            "point data.root=… to a labelled folder."
        )
    # A probe computes in fp32, whatever the run was trained in.
    machine, progress = Machine(config.runtime.model_copy(update={"precision": "fp32"})), ProgressLine()
    results = Results(folder / "probe.json", _header(config))
    if results.value.get("protocol") != _header(config)["protocol"]:
        results = Results.anew(folder / "probe.json", _header(config))
    if _header(config)["protocol"] == _header(trained)["protocol"]:
        take_over(folder / "results.json", results)
    judge = Judge(config, splits, machine, results, progress, strict=True)
    for path in ends:
        loaded = load_checkpoint(path)
        iteration, phase = int(loaded.state["iteration"]), str(loaded.state["phase"])
        if results.has(iteration):
            continue
        progress.note(f"probing {path.name}")
        nets = restore_nets(trained, loaded)
        for module in nets.modules().values():
            module.to(machine.device).eval()
        results.add({"iteration": iteration, "phase": phase, **judge(nets)})
    return results.path


def take_over(path: Path, results: Results) -> None:
    """Use what the run itself has already measured by the same protocol."""
    if not path.is_file() or results.value["evaluations"]:
        return
    known = Results(path, {}).value
    if known["baselines"]:
        results.set_baselines(known["baselines"])
    for entry in known["evaluations"]:
        if entry["probe"] is not None:
            results.add(entry)


def _header(config: Config) -> dict[str, object]:
    protocol = {"probe": config.probe.model_dump(mode="json"), "root": config.data.root, "seed": config.seed}
    return {**results_header(config), "protocol": protocol}


def _require_probe_keys(trained: Config, wanted: Config) -> None:
    for line in differences(trained, wanted):
        if not line.startswith(MAY_CHANGE):
            raise ConfigError(f"{line}: a probe cannot change this; it may change {', '.join(MAY_CHANGE)}.")
