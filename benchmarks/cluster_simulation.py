"""What bends first on a cluster: python benchmarks/cluster_simulation.py [RECIPE] [KEY=VALUE …] [--devices 512]

Event times of a run whose step, traffic and checkpoint are those of `bridle plan`: loaders with a queue, forward and
backward pass with jitter, gradients exchanged in buckets meanwhile, the joint decision, and checkpoints that are copied
and written behind. `--check` compares it with two gloo processes here, whose own times are measured inside the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path

import numpy as np
from bench.timing import describe_machine, markdown_table

Array = np.ndarray
STEPS, NUMBERS = 60, 2_000_000  # of the check: steps, and numbers in the gradients
CAUSES = ("data", "ranks", "checkpoint")
CHANGES: dict[str, dict[str, float]] = {
    "as planned": {},
    "8 cores a device": {"loader": 1200.0},
    "network 10 GB/s a device": {"bandwidth": 10e9},
    "gradients in one piece, no overlap": {"bucket": 1e15},
    "jitter 10 %": {"jitter": 0.1},
    "checkpoint every 50 steps": {"every": 50},
}


@dataclass(frozen=True)
class Cluster:
    """One phase on N devices; seconds, bytes, and samples of one device."""

    devices: int
    step: float  # forward and backward of one device
    gradients: float  # bytes of all gradients
    statistics: float  # bytes of the joint decision
    batch: float  # samples of one device
    checkpoint: float  # bytes
    loader: float = 3600.0  # samples a second and device: 24 cores of 150 JPEGs
    queue: int = 4  # batches
    bandwidth: float = 25e9  # of one device, each way
    latency: float = 15e-6  # of one exchange between two devices
    jitter: float = 0.02  # standard deviation of a step, relative
    bucket: float = 25 * 2**20
    every: float = 500  # steps between checkpoints
    copy: float = 10e9
    disk: float = 1e9

    def exchange(self, size: float) -> float:
        """Seconds of an all-reduce."""
        n = self.devices
        return 2 * (n - 1) / n * size / self.bandwidth + 2 * ceil(log2(max(n, 2))) * self.latency


def simulate(c: Cluster, compute: Array, load: Array) -> dict[str, float]:
    """Seconds of a run and shares of waiting, from each rank's times to compute and to load a batch (steps, N)."""
    steps, n = compute.shape
    now, made = np.zeros(n), np.zeros(n)
    taken = np.zeros((c.queue, n))  # when the last batches were taken out of the queue
    waited, written = dict.fromkeys(CAUSES, 0.0), 0.0
    buckets = max(1, ceil(c.gradients / c.bucket))
    one, decision = c.exchange(c.gradients / buckets), c.exchange(c.statistics)
    for step in range(steps):
        made = np.maximum(made, taken[step % c.queue]) + load[step]  # a full queue blocks the loader
        begin = np.maximum(now, made)
        taken[step % c.queue] = begin
        forward, end = begin + compute[step] / 3, begin + compute[step]
        wire = 0.0
        for part in range(1, buckets + 1):
            wire = max(wire, float((forward + (end - forward) * part / buckets).max())) + one
        after = max(wire, float(end.max())) + decision
        waited["data"] += float(begin.max() - now.max())  # until the last rank has its batch
        waited["ranks"] += after - float(begin.max() + compute[step].mean())
        now = np.full(n, after)
        if (step + 1) % c.every == 0:  # rank 0 copies; the others wait for it in the next exchange
            free = max(after, written) + c.checkpoint / c.copy
            written = free + c.checkpoint / c.disk
            now[0] = free
            waited["checkpoint"] += free - after
    total = float(now.max())
    return {"seconds": total / steps, **{cause: seconds / total for cause, seconds in waited.items()}}


def planned(recipe: str, settings: list[str], *, devices: int, samples: int) -> Cluster:
    """The phase of a recipe with the shortest steps on H100s."""
    from bridle.config import load_config
    from bridle.plan import make_plan

    plan = make_plan(load_config(recipe, settings), devices=devices, device="h100", samples=samples)
    phase = min(plan.phases, key=lambda p: p.estimated_seconds_per_step)
    size = 4.0 * phase.trained
    statistics = max(4096.0, phase.traffic_replicated * devices / (2 * (devices - 1)) - size)
    rows, step = phase.batch / devices, phase.estimated_seconds_per_step
    return Cluster(devices, step, size, statistics, rows, float(phase.checkpoint))


def work(out: Path) -> None:
    """One of two gloo processes: load, compute, exchange; writes its own times."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, gradients, rows = torch.randn(512, 512), torch.zeros(NUMBERS), []
    for step in range(-2, STEPS):
        if step == 0:
            dist.barrier()
            begin = time.perf_counter()
        start = time.perf_counter()
        time.sleep(0.01 if (step + dist.get_rank()) % 7 else 0.1)  # some items take long to decode
        for _ in range(20):
            x @ x
        computed = time.perf_counter()
        dist.all_reduce(gradients)
        rows.append([computed - start, time.perf_counter() - computed])
    rows.append([(time.perf_counter() - begin) / STEPS])
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(rows[2:]))
    dist.barrier()
    dist.destroy_process_group()


def check() -> None:
    """Two processes here and the simulation of them; an exchange takes what the quicker half of the exchanges took."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "--work", folder]
        subprocess.run([sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    seconds, times = found[0][-1][0], np.array([one[:-1] for one in found])  # (2, steps, 2)
    exchange = float(np.median(times[:, :, 1].min(0)))  # of the rank that came last
    here = Cluster(2, 0, 4 * NUMBERS, 0, 1, 0, bandwidth=4 * NUMBERS / exchange, latency=0, bucket=1e15, every=1e9)
    guess = simulate(here, times[:, :, 0].T, 0 * times[:, :, 0].T)  # nothing is loaded ahead
    waited = float(times[:, :, 1].mean() / seconds)
    pairs = {"measured": (seconds, waited), "simulated": (guess["seconds"], guess["ranks"])}
    rows = [[name, f"{1000 * seconds:.1f}", f"{ranks:.2f}"] for name, (seconds, ranks) in pairs.items()]
    print(markdown_table(["two processes", "ms a step", "waiting for the other"], rows), describe_machine(), sep="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="imagenet1k")
    parser.add_argument("settings", nargs="*")
    for option, default in (("devices", 512), ("samples", 10**9), ("steps", 1000)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_intermixed_args()
    if chosen.work:
        return work(chosen.work)
    if chosen.check:
        return check()
    c = planned(chosen.recipe, chosen.settings, devices=chosen.devices, samples=chosen.samples)
    noise, shape, rows = np.random.default_rng(0), (chosen.steps, c.devices), []
    normal, loading = noise.standard_normal(shape), 1 + 0.1 * noise.standard_normal(shape)
    for name, changes in CHANGES.items():
        case = replace(c, **changes)
        found = simulate(case, c.step * (1 + case.jitter * normal).clip(0.5), c.batch / case.loader * loading.clip(0.2))
        shares = [f"{100 * found[cause]:.0f}" for cause in CAUSES]
        rows.append([name, f"{1000 * found['seconds']:.0f}", f"{c.batch * c.devices / found['seconds']:,.0f}", *shares])
    head = ["ms a step", "samples/s", *(f"{cause} %" for cause in CAUSES)]
    print(markdown_table([f"{c.devices} devices, {c.batch:g} samples each", *head], rows))


if __name__ == "__main__":
    main()
