"""How long a step waits for a checkpoint: python benchmarks/checkpoint_stall.py [MODALITY SIZE] [--rows 8] [--turns 3]

Wall seconds in one run, on one thread: a step alone, a checkpoint that is written before the next step, the copy of one
that is written in the background, and the step taken meanwhile. Medians over the turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from bench.step import MODALITIES, SIZES, chosen_model
from bench.timing import describe_machine, markdown_table, one_thread

from bridle.config import Config
from bridle.data.arrays.memory import TensorSource
from bridle.data.loading.loader import Loader
from bridle.models.build import build_nets
from bridle.runs.background import BackgroundWriter
from bridle.runs.checkpoint import size_of
from bridle.seeding import generator
from bridle.train.engine import Progress, save_checkpoint, unfreeze
from bridle.train.optim import build_optimizer, named_parameters, optimizer_tensors
from bridle.train.phases import encoder_phase
from bridle.train.run import open_machine
from bridle.train.trial_steps import Call, start_codes, stepper, trial_run


def wall_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(config: Config, *, rows: int, turns: int) -> tuple[dict[str, float], int]:
    """Median wall seconds of each part, and the bytes of a checkpoint."""
    source = TensorSource(x=torch.randn(rows, *config.geometry.build().shape, generator=generator("bench", "x")))
    batch = next(Loader(source=source, seed=0, phase="bench", batch=rows, mean=[0.0], std=[1.0]).steps(0, 1))[0]
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    start_codes(nets, config)
    unfreeze(nets, {"encoder": nets.encoder, "decoder": nets.decoder, "heads": nets.heads})
    runtime = config.runtime.model_copy(update={"device": "cpu", "precision": "fp32", "threads": 0, "keep": 1})
    config = config.model_copy(update={"runtime": runtime})
    with tempfile.TemporaryDirectory() as folder, BackgroundWriter() as writer:
        run = trial_run(config, nets, source, Path(folder), open_machine(runtime), rows=rows)
        phase = encoder_phase(run, index=0, iteration=2)
        optimizer, parameters = (
            build_optimizer(phase.trained, run.config.encoder_phase),
            named_parameters(phase.trained),
        )
        step, progress = stepper(run, phase, [batch], optimizer), Progress()

        def save(behind: BackgroundWriter | None) -> None:
            progress.step += 1
            tensors = {"model": nets.state(), "optimizer": optimizer_tensors(optimizer, parameters)}
            save_checkpoint(run, phase, progress, tensors, end=False, writer=behind)

        step()  # the first one allocates
        calls: dict[str, Call] = {
            "a step alone": step,
            "checkpoint written before the next step": lambda: save(None),
            "checkpoint written in the background: the copy": lambda: save(writer),
            "the step meanwhile": step,
            "until it is on the disk": writer.wait,
        }
        times = [{name: wall_seconds(call) for name, call in calls.items()} for _ in range(turns)]
        saved = size_of({"model": nets.state(), "optimizer": optimizer_tensors(optimizer, parameters)})
    return {name: median(turn[name] for turn in times) for name in calls}, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modality", nargs="?", default="image", choices=MODALITIES)
    parser.add_argument("size", nargs="?", default="base", choices=SIZES)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    wanted = parser.parse_args()
    with one_thread():
        times, saved = measure(chosen_model(wanted.modality, wanted.size).config, rows=wanted.rows, turns=wanted.turns)
        step = times["a step alone"]
        rows = [(name, f"{seconds:.2f}", f"{seconds / step:.2f}") for name, seconds in times.items()]
        print(markdown_table(("part", "wall s", "steps"), rows))
        print(f"{wanted.modality} {wanted.size}, {wanted.rows} rows; {saved / 1e9:.2f} GB. {describe_machine()}")


if __name__ == "__main__":
    main()
