"""Measure the residual rules on real patches and draw the figures of docs/quantizer.md.

    python benchmarks/quantizer_figures.py --esc50 DIR --cifar10 FILE.zip --out docs/figures

DIR holds `audio/` with the ESC-50 clips at 16 kHz; FILE.zip holds CIFAR-10 as class folders of pictures. Tables go to
standard output as Markdown. Latents are those of the cold start: standardised patches through a fixed random matrix.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import soundfile
import torch
from PIL import Image
from torch import Tensor

from bridle.data.audio.logmel import LogMel
from bridle.quantize import Codebook, ResidualQuantizer
from bridle.quantize.rules import Rule
from bridle.quantize.usage import effective_usage, top_share, usage_rate

RULES: tuple[Rule, ...] = get_args(Rule)
TOKENS, WIDTH = 16_384, 256


class Patches(NamedTuple):
    """Latents of one data set, and which patches are flat: one value throughout, as in digital silence."""

    name: str
    z: Tensor  # (S, Dq)
    flat: Tensor  # (S,) bool


class Health(NamedTuple):
    energy: list[float]
    effective: list[float]  # ECU per stage
    top: list[float]  # share of the most used code
    alone: list[float]  # share of codes that one token uses
    rate: list[float]  # CUR


def write(line: str = "") -> None:
    sys.stdout.write(line + "\n")


def project(name: str, patches: Tensor, flat: Tensor) -> Patches:
    """A random sample of standardised patches (N, F) through a random map."""
    draws = torch.Generator().manual_seed(1)
    matrix = torch.randn(patches.shape[1], WIDTH, generator=draws) / patches.shape[1] ** 0.5
    chosen = torch.randperm(len(patches), generator=draws)[:TOKENS]
    return Patches(name, patches[chosen] @ matrix, flat[chosen])


def esc50(root: Path, clips: int = 400) -> Patches:
    files = sorted((root / "audio").iterdir())
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))[:clips]
    mel = LogMel(mels=64)
    features = []
    for index in order.tolist():
        waveform, _ = soundfile.read(files[index], dtype="float32")
        features.append(mel(torch.from_numpy(waveform))[:496])
    x = torch.stack(features)  # (B, 496, 64)
    raw = x.unfold(1, 16, 16).unfold(2, 16, 16).reshape(-1, 256)
    flat = raw.amax(1) - raw.amin(1) < 1e-3
    return project("ESC-50", (raw - x.mean()) / (2 * x.std()), flat)


def cifar10(archive: Path, images: int = 600) -> Patches:
    with zipfile.ZipFile(archive) as files:
        names = sorted(n for n in files.namelist() if "/train/" in n and n.endswith((".jpg", ".png")))
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:images]
        pictures = [Image.open(io.BytesIO(files.read(names[i]))).convert("RGB") for i in order.tolist()]
    x = torch.stack([torch.from_numpy(np.array(picture)) for picture in pictures]).float()  # (B, 32, 32, 3)
    x = (x - x.mean((0, 1, 2))) / x.std((0, 1, 2))
    raw = x.unfold(1, 4, 4).unfold(2, 4, 4).reshape(-1, 48)
    return project("CIFAR-10", raw, raw.amax(1) - raw.amin(1) < 1e-3)


def start(patches: Patches, rule: Rule, *, valid: Tensor | None = None, iterations: int = 10) -> ResidualQuantizer:
    rq = ResidualQuantizer(residual=rule, kmeans_iterations=iterations)
    rq.start_codebooks(patches.z, generator=torch.Generator().manual_seed(2), valid=valid)
    return rq


def examine(rq: ResidualQuantizer, patches: Patches, valid: Tensor | None = None) -> Health:
    found = rq(patches.z, valid=valid)
    counts = found.statistics().n
    return Health(
        found.energy.tolist(),
        [float(effective_usage(n)) for n in counts],
        [float(top_share(n)) for n in counts],
        [float((n == 1).double().mean()) for n in counts],
        [float(usage_rate(n)) for n in counts],
    )


def row(label: str, *cells: Iterable[float]) -> None:
    shown = [" / ".join(f"{value:.2f}".removeprefix("0") for value in values) for values in cells]
    write(f"| {label} | {' | '.join(shown)} |")


def rules_table(data: Sequence[Patches]) -> dict[tuple[str, Rule], Health]:
    """Residual energy and usage of every rule on every data set."""
    found = {}
    for patches in data:
        share = float(patches.flat.double().mean())
        write(f"\n{patches.name}: {len(patches.z):,} patches, {100 * share:.1f} % of them flat\n")
        write("| rule | energy left after stage 1 / 2 / 3 / 4 | ECU | largest code's share |\n|---|---|---|---|")
        for rule in RULES:
            health = examine(start(patches, rule), patches)
            found[patches.name, rule] = health
            row(f"`{rule}`", health.energy[1:], health.effective, health.top)
    return found


def trap_table(patches: Patches) -> None:
    """`perstage` with and without flat patches, and how the trap closes from the seeds on."""
    write(f"\n`perstage` on {patches.name}\n")
    write("| tokens | Lloyd steps | largest code's share | codes with one token | ECU |\n|---|---|---|---|---|")
    for label, valid in (("all", None), ("flat patches left out", ~patches.flat)):
        for iterations in (0, 1, 2, 10):
            rq = start(patches, "perstage", valid=valid, iterations=iterations)
            health = examine(rq, patches, valid)
            row(f"{label} | {iterations}", health.top, health.alone, health.effective)


def draw_energy(data: Sequence[Patches], found: dict[tuple[str, Rule], Health], path: Path) -> None:
    figure, axes = plt.subplots(1, len(data), figsize=(7.2, 2.8), sharey=True)
    for axis, patches in zip(axes, data, strict=True):
        for rule in RULES:
            axis.plot(range(5), found[patches.name, rule].energy, marker="o", markersize=3, label=rule)
        axis.set(title=patches.name, xlabel="stages", xticks=range(5), yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("energy left of each stage's input")
    axes[-1].legend(fontsize=7)
    save(figure, path)


def draw_usage(data: Sequence[Patches], path: Path) -> None:
    """Codes of stage 3 in order of use, for the rule that breaks and the default."""
    figure, axes = plt.subplots(1, len(data), figsize=(7.2, 2.8), sharey=True)
    for axis, patches in zip(axes, data, strict=True):
        for rule in ("once", "perstage", "released", "independent"):
            counts = start(patches, rule)(patches.z).statistics().n[2]
            axis.plot(counts.sort(descending=True).values / counts.sum(), label=rule)
        axis.axhline(1 / 256, color="grey", linewidth=0.8, linestyle=":")
        axis.set(title=f"{patches.name}, stage 3", xlabel="codes, most used first", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of tokens")
    axes[-1].legend(fontsize=7)
    save(figure, path)


def draw_ema(path: Path) -> None:
    """Left: approach to the limit. Right: an unused code under three readings of the equations."""
    decay, eps, steps = 0.99, 1e-5, 2000
    draws = torch.Generator().manual_seed(0)
    n = torch.tensor([30.0, 10.0, 4.0]).double()
    l_sum = torch.randn(3, 8, generator=draws, dtype=torch.float64) * n[:, None]
    limit = l_sum / (n + eps)[:, None] * (n.sum() + 3 * eps) / n.sum()
    book = Codebook(codes=3, width=8)
    book.restart(torch.randn(3, 8, generator=draws))
    errors = []
    for _ in range(steps):
        book.ema_step(n, l_sum, decay=decay, eps=eps)
        total = book.usage.sum()
        code = book.code_sum / ((book.usage + eps) * total / (total + 3 * eps))[:, None]
        errors.append(float((code - limit).norm()))
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8))
    left.semilogy(errors, label="‖c − c∞‖")
    left.semilogy([errors[0] * decay**t for t in range(steps)], "--", label="γᵗ")
    left.set(title="fixed assignments", xlabel="step")
    left.legend(fontsize=7)
    for label, usage, rewrite in (("N₀ = 0, all codes rewritten", 0.0, True), ("N₀ = 1, all rewritten", 1.0, True)):
        right.semilogy(unused(usage, decay, eps, steps, rewrite), label=label)
    right.semilogy(unused(1.0, decay, eps, steps, False), label="bridle: N₀ = 1, only used codes rewritten")
    right.set(title="norm of an unused code", xlabel="step")
    right.legend(fontsize=6)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    save(figure, path)


def unused(usage: float, decay: float, eps: float, steps: int, rewrite: bool) -> list[float]:
    """Norm over time of a code that no token chooses, beside 255 codes of 32 tokens each; by EMA 2–5."""
    others, mine, mass, path = 255 * (usage or 0.0), usage, 1.0, []
    for _ in range(steps):
        mine, mass, others = decay * mine, decay * mass, decay * others + (1 - decay) * 255 * 32
        total = mine + others
        norm = mass / ((mine + eps) * total / (total + 256 * eps)) if rewrite else 1.0
        path.append(norm)
    return path


def save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": ""})
    plt.close(figure)
    write(f"\nwrote {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--esc50", type=Path, required=True, help="folder that holds audio/")
    parser.add_argument("--cifar10", type=Path, required=True, help="zip with class folders")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    data = [esc50(options.esc50), cifar10(options.cifar10)]
    found = rules_table(data)
    trap_table(data[0])
    draws: dict[str, Callable[[Path], None]] = {
        "quantizer-energy.png": lambda path: draw_energy(data, found, path),
        "quantizer-usage.png": lambda path: draw_usage(data, path),
        "quantizer-ema.png": draw_ema,
    }
    for name, draw in draws.items():
        draw(options.out / name)


if __name__ == "__main__":
    main()
