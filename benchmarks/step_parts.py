"""Where the time of an encoder step goes: python benchmarks/step_parts.py [MODALITY SIZE]

CPU seconds of each part of one live step (see `bridle bench step`), medians over several steps, as shares.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench.step import MODALITIES, SIZES, chosen_model
from bench.timing import describe_machine, one_thread

from bridle.config import Config
from bridle.data.arrays.memory import TensorSource
from bridle.data.loading.loader import Batch, Loader
from bridle.models.build import Nets, build_nets
from bridle.models.losses import encoder_loss
from bridle.seeding import generator
from bridle.train.engine import Draws
from bridle.train.optim import build_optimizer
from bridle.train.phases import encoder_phase, targets
from bridle.train.run import Run, open_machine
from bridle.train.trial_steps import start_codes, trial_run


def measure(config: Config, *, rows: int, repeats: int) -> dict[str, float]:
    """CPU seconds of every part."""
    source = TensorSource(x=torch.randn(rows, *config.geometry.build().shape, generator=generator("bench", "x")))
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    start_codes(nets, config)
    runtime = config.runtime.model_copy(update={"device": "cpu", "precision": "fp32", "threads": 0})
    start = time.process_time()
    batch = next(Loader(source=source, seed=0, phase="bench", batch=rows, mean=[0.0], std=[1.0]).steps(0, 1))[0]
    loading = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        run = trial_run(config, nets, source, Path(folder), open_machine(runtime), rows=rows)
        phase = encoder_phase(run, index=0, iteration=2)
        optimizer = build_optimizer(phase.trained, run.config.encoder_phase)
        steps = [timed_parts(run, optimizer, batch) for _ in range(repeats + 1)][1:]  # the first one allocates
    return {"data": loading, **{part: statistics.median(step[part] for step in steps) for part in steps[0]}}


def timed_parts(run: Run[Nets], optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
    """One live step in pieces: CPU seconds of each."""
    nets, phase = run.nets, encoder_phase(run, index=0, iteration=2)
    draws = Draws(run, phase, 0, [batch])
    times, last = dict[str, float](), time.process_time()

    def done(part: str) -> None:
        nonlocal last
        now = time.process_time()
        times[part], last = now - last, now

    found = targets(nets, batch.x, None)
    done("tokenizer")
    mask = draws.mask(batch)
    z = nets.encoder(batch.x, mask=mask).z
    done("encoder")
    hidden = draws.predicted(batch, mask)
    features = nets.decoder(z, mask=mask, only=hidden.at)
    done("decoder")
    wanted = found.at(hidden)
    loss = encoder_loss(nets.heads(features), wanted, hidden.counted)
    done("heads, loss")
    loss.backward()
    done("backward")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    done("optimizer")
    return times


def main() -> int:
    modality, size = (sys.argv[1:] + ["image", "tiny"][len(sys.argv) - 1 :])[:2]
    if modality not in MODALITIES or size not in SIZES:
        print(f"expected one of {', '.join(MODALITIES)} and one of {', '.join(SIZES)}", file=sys.stderr)
        return 2
    with one_thread():
        model = chosen_model(modality, size)
        parts = measure(model.config, rows=model.rows, repeats=model.repeats)
        print(f"{model.name}, {model.rows} rows; {describe_machine()}")
    for part, seconds in parts.items():
        print(f"{part:<12} {seconds:.4f} CPU s  {100 * seconds / sum(parts.values()):5.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
