"""The encoder-phase step beside a plain one, interleaved in one process on one thread.

Three steps through the same networks take turns: a plain one (`PlainStep`), ours with the tokenizer at every step
(live), and ours with codes that are already there (reused, as with `encoder_phase.masks`). Times are CPU seconds,
medians over the turns; ratios are taken within a turn, then their median. `GEMM` is the share of a bare float32
product's speed that a step reaches with its counted operations. The tokenizer is a ViT, as from iteration 2 on; inputs
are random numbers. `benchmarks/step_parts.py` in the repository shows where a step's time goes.

Shapes: x (B, C, *input), V of T tokens visible, codes (B, T, M).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.timing import Call, Tell, alternate, describe_machine, extra_memory, markdown_table, one_thread
from bridle.config import Config, load_config
from bridle.data.arrays.memory import TensorSource
from bridle.data.loading.loader import Loader
from bridle.models.build import Nets, build_nets
from bridle.models.cost import encoder_step
from bridle.nn.masking import draw_mask
from bridle.seeding import generator
from bridle.train.engine import unfreeze
from bridle.train.optim import build_optimizer
from bridle.train.phases import encoder_phase
from bridle.train.run import open_machine
from bridle.train.trial_steps import start_codes, stepper, trial_run

SIZES = ("tiny", "small", "base")
PAPER = {"audio": "audioset2m", "image": "imagenet1k", "video": "kinetics400"}  # the shapes of base models, by recipe
MODALITIES = tuple(PAPER)
ROWS = {"tiny": 32, "small": 4, "base": 2}
REPEATS = {"tiny": 11, "small": 7, "base": 3}
BUDGETS = {"live": 0.90, "reused": 0.60}  # of the plain step
GEMM_SIZE = 768


class PlainStep:
    """What a straightforward implementation does, to measure ours against.

    The tokenizer's full forward at every step, logits and loss at all T positions with the visible ones weighted zero,
    clipping where the recipe clips, torch's AdamW as it comes.
    """

    def __init__(self, nets: Nets, config: Config, *, generator: torch.Generator) -> None:
        self.nets, self.config, self.generator = nets, config, generator
        modules = (nets.encoder, nets.decoder, nets.heads)
        self.parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6)

    def __call__(self, x: Tensor) -> float:
        """One step; its loss."""
        nets = self.nets
        with torch.no_grad():
            codes = nets.tokenizer.quantizer(nets.tokenizer.encode(x)).codes  # (B, T, M)
        mask = draw_mask(
            self.config.mask.kind, grid=self.config.geometry.build().grid, ratio=self.config.mask.ratio,
            batch=len(x), generator=self.generator, device=x.device,
        )  # fmt: skip
        z = nets.encoder(x, mask=mask).z  # (B, V, D)
        logits = nets.heads(nets.decoder(z, mask=mask))  # M x (B, T, K_m)
        weight = mask.masked.float()  # (B, T)
        losses = [cross_entropy(head.transpose(1, 2), codes[..., m], reduction="none") for m, head in enumerate(logits)]
        loss = (torch.stack(losses).mean(0) * weight).sum() / weight.sum()
        loss.backward()
        if self.config.encoder_phase.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.encoder_phase.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()  # at the end, so that the next step on the same networks starts without gradients
        return loss.item()


class StepRow(NamedTuple):
    """One model."""

    name: str
    rows: int
    turns: dict[str, list[float]]  # CPU seconds of the plain, live and reused step, turn by turn
    operations: int  # of the live step
    gemm: float  # operations a CPU second of a bare product
    extra_mb: float | None  # peak memory a live step adds to weights and optimizer; None where it cannot be measured

    def seconds(self, who: str) -> float:
        """Median over turns."""
        return median(self.turns[who])

    def ratio(self, who: str, to: str = "plain") -> float:
        """Median over turns: what loads the machine then loads both alike."""
        return median(a / b for a, b in zip(self.turns[who], self.turns[to], strict=True))

    @property
    def utilisation(self) -> float:
        """Share of a bare product's speed."""
        return self.operations / self.seconds("live") / self.gemm

    def verdict(self, who: str) -> str:
        """The ratio to the plain step, and whether it is within the budget."""
        return f"{self.ratio(who):.2f} ({'met' if self.ratio(who) <= BUDGETS[who] else 'missed'})"

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        extra = "–" if self.extra_mb is None else f"{self.extra_mb:.0f}"
        ratios = self.verdict("live"), self.verdict("reused"), f"{self.ratio('reused', 'live'):.2f}"
        return self.name, str(self.rows), *ratios, f"{self.seconds('live'):.3f}", f"{self.utilisation:.2f}", extra


class Measured(NamedTuple):
    """A model to be measured."""

    name: str
    config: Config
    rows: int
    repeats: int


def chosen_model(modality: str, size: str, repeats: int | None = None, overrides: Sequence[str] = ()) -> Measured:
    """The user's recipe of a modality in a size, with `key=value` changes; base models have the paper's inputs."""
    recipe, sized = (PAPER[modality], []) if size == "base" else (modality, [f"size={size}"])
    config = load_config(recipe, [*sized, *overrides])
    return Measured(" ".join([modality, size, *overrides]), config, ROWS[size], repeats or REPEATS[size])


def run(models: Iterable[Measured], *, tell: Tell = lambda text: None) -> list[StepRow]:
    """Measure one model after the other."""
    rows = []
    with one_thread():
        for model in models:
            tell(f"{model.name}, {model.rows} rows, {model.repeats} turns")
            rows.append(measure(model))
    return rows


def to_markdown(rows: Iterable[StepRow]) -> str:
    """The table of measured models, and what they were measured on."""
    budgets = (f"{who} / plain (≤ {budget})" for who, budget in BUDGETS.items())
    head = ("model", "rows", *budgets, "reused / live", "live, CPU s", "GEMM", "extra MB")
    return f"{markdown_table(head, (row.cells() for row in rows))}\n{describe_machine()}\n"


def measure(model: Measured) -> StepRow:
    """Alternate plain, live and reused steps of a model with a bare product between them."""
    a = torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator("bench"))
    out = torch.empty_like(a)
    with prepared(model.config, model.rows) as steps:
        for call in steps.values():
            call()  # the first step allocates; the first reused one finds the codes
        extra = extra_memory(steps["live"])
        times = alternate(steps, lambda: torch.mm(a, a, out=out), model.repeats)
    return StepRow(
        name=model.name,
        rows=model.rows,
        turns={who: [own for own, _ in pairs] for who, pairs in times.items()},
        operations=encoder_step(model.config, rows=model.rows).total.operations,
        gemm=2 * GEMM_SIZE**3 / median(bare for pairs in times.values() for _, bare in pairs),
        extra_mb=extra,
    )


@contextmanager
def prepared(config: Config, rows: int) -> Iterator[dict[str, Call]]:
    """The plain, live and reused step on one batch, in a run folder that is gone afterwards."""
    source = TensorSource(x=torch.randn(rows, *config.geometry.build().shape, generator=generator("bench", "x")))
    batch = next(Loader(source=source, seed=0, phase="bench", batch=rows, mean=[0.0], std=[1.0]).steps(0, 1))[0]
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    start_codes(nets, config)
    unfreeze(nets, {"encoder": nets.encoder, "decoder": nets.decoder, "heads": nets.heads})
    runtime = config.runtime.model_copy(update={"device": "cpu", "precision": "fp32", "threads": 0})
    config = config.model_copy(update={"runtime": runtime})
    with tempfile.TemporaryDirectory() as folder:
        live, reused = (
            trial_run(config, nets, source, Path(folder), open_machine(runtime), rows=rows, masks=masks)
            for masks in (1, 10**9)
        )
        phase = encoder_phase(live, index=0, iteration=2)
        optimizer = build_optimizer(phase.trained, live.config.encoder_phase)
        plain = PlainStep(nets, config, generator=generator("bench", "mask"))
        yield {
            "plain": lambda: plain(batch.x),
            "live": stepper(live, phase, [batch], optimizer),
            "reused": stepper(reused, encoder_phase(reused, index=0, iteration=2), [batch], optimizer),
        }
