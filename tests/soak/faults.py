"""Whole runs with a fault in them, each in a process of its own, compared with a run that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from conftest import SMALL
from forked import LIMIT, bridle
from safetensors.torch import load_file

from bridle import failpoints
from bridle.train.step_metrics import TIMINGS

STEPS = 3
COMMON = (*SMALL, "geometry.patch=[2, 2]", f"max_steps={STEPS}", "runtime.checkpoint_every=1", "encoder.drop_path=0.1")
COMMON = (*COMMON, "quantizer.reset_every=1", "runtime.keep=1")
JOINT = ("schedule.mode=joint", "schedule.joint_every=2", "schedule.iterations=1")
FINETUNE = (
    f"finetune.steps={STEPS}",
    "finetune.epochs=null",
    "finetune.warmup_epochs=0",
    "finetune.batch=8",
    "finetune.items=40",
)


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None  # None: it hung and was killed
    said: str
    fired: list[str]  # lines of the failpoints' log


def pretrain_command(kind: str, folder: Path, *more: str) -> list[str]:
    return ["pretrain", "digits-tiny", *COMMON, *(JOINT if kind == "joint" else ()), *more, "--out", str(folder)]


def command(kind: str, folder: Path, *more: str) -> list[str]:
    """The command whose run is of this kind; for finetune the run that it begins with is there already."""
    if kind == "finetune":
        return ["finetune", str(folder), *FINETUNE, *more]
    return pretrain_command(kind, folder, *more)


def run(
    words: Sequence[str], folder: Path, *, faults: str = "", limit: float = LIMIT, start_method: str = "fork"
) -> Ended:
    """`bridle WORDS` with faults; what it published is noted in FOLDER.ledger."""
    log, ledger = (folder.with_name(f"{folder.name}.{kind}") for kind in ("fired", "ledger"))
    log.unlink(missing_ok=True)
    ended = bridle(*words, limit=limit, before=partial(prepare, faults, log, ledger, start_method))
    fired = log.read_text().splitlines() if log.exists() else []
    return Ended(ended.code, ended.err + ended.out, fired)


def prepare(faults: str, log: Path, ledger: Path, start_method: str) -> None:
    """In the forked process, before the command."""
    os.environ["BRIDLE_START_METHOD"] = start_method  # of data workers
    keep_ledger(ledger)
    failpoints.arm(faults, log=str(log))


def keep_ledger(ledger: Path) -> None:
    """Write down the fingerprints of all files of every checkpoint that is published, before rotation removes it."""
    from bridle import files

    original = files._publish_folder

    def noted(temporary: Path, final: Path, **options: bool) -> None:
        original(temporary, final, **options)
        if final.parent.name != "checkpoints":
            return
        listed = json.loads((final / "manifest.json").read_text())["files"]
        with ledger.open("a") as file:
            file.write(json.dumps([final.name, {name: entry["sha256"] for name, entry in listed.items()}]) + "\n")

    files._publish_folder = noted


def tuned(folder: Path) -> Path:
    """The folder of the only fine-tuning in a run."""
    return next(path.parent for path in (folder / "finetune").glob("*/metrics.jsonl"))


def place(kind: str, folder: Path) -> Path:
    return tuned(folder) if kind == "finetune" else folder


def differences(kind: str, whole: Path, parts: Path) -> list[str]:
    """What differs between a run and one that was interrupted: names of tensors and files."""
    found = []
    ledgers = [ledger_of(folder) for folder in (whole, parts)]
    for name, files in ledgers[1]:
        if files != dict(ledgers[0]).get(name):
            found.append(f"checkpoint {name}")
    if {name for name, _ in ledgers[0]} - {name for name, _ in ledgers[1]}:
        found.append("a checkpoint that was never published")
    left, right = (end_tensors(place(kind, folder)) for folder in (whole, parts))
    found += sorted(set(left) ^ set(right))
    found += [name for name in sorted(set(left) & set(right)) if not torch.equal(left[name], right[name])]
    if rows(place(kind, whole)) != rows(place(kind, parts)):
        found.append("metrics.jsonl")
    file = "finetune.json" if kind == "finetune" else "results.json"
    if without_times(json.loads((whole / file).read_text())) != without_times(json.loads((parts / file).read_text())):
        found.append(file)
    return found


def ledger_of(folder: Path) -> list[tuple[str, dict[str, str]]]:
    return [tuple(json.loads(line)) for line in folder.with_name(f"{folder.name}.ledger").read_text().splitlines()]


def end_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.name}/{file.stem}/{name}": tensor
        for path in sorted((folder / "checkpoints").glob("*-end"))
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def resumed_from(folder: Path) -> int | None:
    """The step that the last row's process began with."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found: int | None = json.loads(lines[-1])["resumed_from"]
    return found


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(entry) for key, entry in value.items() if not key.startswith("seconds")}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value


def copy_run(source: Path, target: Path) -> None:
    """A run and the ledger beside it."""
    shutil.copytree(source, target)
    ledger = source.with_name(f"{source.name}.ledger")
    if ledger.exists():
        shutil.copy(ledger, target.with_name(f"{target.name}.ledger"))


# Where to strike in each kind of phase. A phase takes 3 steps and is saved before the first, after each and at its end,
# so that a fault in step 3, or in the save after step 2, finds a checkpoint of a step above 0.
CHECKPOINT = tuple(f"checkpoint.before_{what}" for what in ("manifest", "rename", "latest", "rotate"))
POINTS: dict[str, dict[str, int]] = {
    "encoder": {
        **{"step.begin": 3, "step.after_backward": 3, "step.after_update": 3, "kmeans.iteration": 2},
        **{"checkpoint.half_written": 7, **dict.fromkeys(CHECKPOINT, 3), "checkpoint.inside_rotate": 2},
        **{"metrics.append": 3, "phase.between": 2, "evaluation.begin": 1, "evaluation.end": 1, "results.write": 3},
    },
    "tokenizer": {
        **{"step.begin": 6, "step.after_backward": 6, "step.after_update": 6, "kmeans.iteration": 6},
        **{"checkpoint.half_written": 18, **dict.fromkeys(CHECKPOINT, 7), "checkpoint.inside_rotate": 5},
        **{"metrics.append": 6, "phase.between": 3},
    },
    "joint": {
        **{"step.begin": 3, "step.after_backward": 3, "step.after_update": 3, "kmeans.iteration": 2},
        **{"checkpoint.half_written": 7, **dict.fromkeys(CHECKPOINT, 3), "checkpoint.inside_rotate": 2},
        **{"metrics.append": 3, "evaluation.begin": 1, "evaluation.end": 1, "results.write": 3},
    },
    "finetune": {
        **{"step.begin": 3, "step.after_backward": 3, "step.after_update": 3},
        **{"checkpoint.half_written": 5, **dict.fromkeys(CHECKPOINT, 3), "checkpoint.inside_rotate": 2},
        **{"metrics.append": 3, "evaluation.begin": 1, "evaluation.end": 1, "results.write": 2},
    },
}
BEFORE_ANYTHING = ("kmeans.iteration",)  # of the first phase: nothing is saved yet


def resume_faults(kind: str, point: str, said: str) -> list[str]:
    """Where a command that goes on after a fault at `point` did not say so, or began with step 0."""
    found = re.findall(r"continuing from \S+?-(\d{8})", said)
    if not found and (point not in BEFORE_ANYTHING or kind == "tokenizer"):
        return ["it does not say that it continues"]
    inside = point.startswith(("step.", "checkpoint."))
    return ["it began with step 0"] if inside and int(found[0]) == 0 else []


def stop_faults(kind: str, folder: Path, *, steps: int) -> list[str]:
    """Where a run that was asked to stop in step number `steps` has done more, or has not saved that step."""
    done = [row["step"] for row in rows(place(kind, folder))]
    newest = sorted((place(kind, folder) / "checkpoints").glob("p*"))[-1].name
    found = [] if len(done) == steps else [f"{len(done)} steps are logged, not {steps}"]
    return found + ([] if newest.endswith(f"-{done[-1]:08}") else [f"{newest} is not of step {done[-1]}"])


# Places where a value can be spoilt; each is passed once a step, because these runs have no micro-batches.
SPOILT = ("step.input", "step.loss", "step.gradient")
PHASES_BEFORE = {"encoder": 0, "tokenizer": 1, "joint": 0, "finetune": 0}


def check_one_skip(kind: str, folder: Path, point: str) -> list[str]:
    """What the second step of a phase changed beside its counters although it was not finite; and it goes on later."""
    step = PHASES_BEFORE[kind] * STEPS + 2
    faults = [f"step.begin@{step}=sigterm", f"{point}@{step}=nan"]  # so that both checkpoints are still there
    ended = run(command(kind, folder, "runtime.keep=9"), folder, faults=";".join(faults))
    if (ended.code, ended.fired) != (143, faults):
        return [f"{kind} ended with {ended.code}, fired {ended.fired}"]
    before, after = sorted((place(kind, folder) / "checkpoints").glob("p*"))[-2:]
    found = []
    for file in sorted({path.name for path in (*before.glob("*.safetensors"), *after.glob("*.safetensors"))}):
        left, right = load_file(before / file), load_file(after / file)
        found += [f"{file}: {name}" for name in sorted(set(left) ^ set(right))]
        found += [f"{file}: {name}" for name in set(left) & set(right) if not torch.equal(left[name], right[name])]
    counters = [json.loads((path / "state.json").read_text())["progress"] for path in (before, after)]
    wanted = [{"step": n, "skipped": n - 1, "skipped_in_a_row": n - 1} for n in (1, 2)]
    found += [f"counters {counters}"] if counters != wanted else []
    ended = run(command(kind, folder, "runtime.keep=9"), folder)
    return found + ([f"continued, it ended with {ended.code}"] if ended.code else not_finite(place(kind, folder)))


def check_five_skips(kind: str, folder: Path, point: str) -> list[str]:
    """A run of 9 steps a phase whose steps from the third on are not finite stops, and what it saved is finite."""
    longer = {f"max_steps={STEPS}": "max_steps=9", f"finetune.steps={STEPS}": "finetune.steps=9"}
    words = [longer.get(word, word) for word in command(kind, folder)]
    fault = f"{point}@{PHASES_BEFORE[kind] * 9 + 3}+=nan"
    ended = run(words, folder, faults=fault)
    if (ended.code, ended.fired) != (65, [fault] * 5):
        return [f"{kind} {fault}: ended with {ended.code}, fired {len(ended.fired)} times"]
    told = "5 steps in a row with a loss or gradient that is not finite"
    saved = place(kind, folder) / "checkpoints"
    found = [] if told in ended.said and str(saved) in ended.said else [f"it said {ended.said[-300:]}"]
    found += not_finite(place(kind, folder))
    ended = run(words, folder)
    return found + ([f"continued, it ended with {ended.code}"] if ended.code else not_finite(place(kind, folder)))


def not_finite(folder: Path) -> list[str]:
    """Tensors in the newest checkpoint that are not finite; there must be a checkpoint."""
    newest = sorted((folder / "checkpoints").glob("p*"))[-1]
    tensors = [
        (f"{file.stem}/{name}", x) for file in newest.glob("*.safetensors") for name, x in load_file(file).items()
    ]
    return [name for name, x in tensors if x.is_floating_point() and not bool(torch.isfinite(x).all())]
