"""The health of codebooks over a full pass, and what to make of it.

Shapes: B batch, T tokens (positions), M stages, K_m codes, Dq code width. The quantities and their formulas are those
of `bridle.quantize.usage`; here they become one record per stage and a verdict in plain words.

MI(code; label) is the Miller–Madow corrected information minus the same figure with every sample given the label of its
neighbour in the batch: tokens of one sample resemble each other, so even foreign labels would seem to tell something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bridle import distributed
from bridle.errors import DataError
from bridle.evaluate.codebooks.advice import (
    NOTHING,
    InForce,
    against_collapse,
    against_dead_codes,
    against_dominance,
    against_narrowness,
    against_noise,
)
from bridle.models.tokenizer import Tokenizer
from bridle.nn.patch import patchify
from bridle.quantize.dimension import SpreadSums, code_spreads, is_narrow
from bridle.quantize.usage import (
    COLLAPSED_USAGE,
    DOMINANT_SHARE,
    DistinctCounter,
    UsageCounter,
    effective_usage,
    is_dominant,
    perplexity,
    top_share,
    usage_entropy,
    usage_rate,
)
from bridle.runs.results import StageHealth, Verdict

# Where a verdict changes. A uniform book has CUR 1 and ECU 1. The thresholds of live warnings are in `quantize.usage`.
COLLAPSED_EFFECTIVE = 0.4  # ECU below
DEAD_SHARE = 0.1  # of all codes never used
POSITION_SHARE = 0.5  # of the codes' entropy told by the position alone
STEADY_SHARE = 0.8  # of first-stage codes that ought to survive the smallest change of the input
TOKENS_PER_CODE = 4  # with fewer tokens even a perfect codebook looks unused
FLAT = 1e-3  # a patch whose values differ by less, in units of the data's standard deviation, shows nothing
SPREAD_TOKENS = 131_072  # on which the spread of latents over directions is measured
TOP = 5  # most used codes that are named

# Small changes of a normalised input under which a code should mostly stay: name -> standard deviation of added noise.
NOISES = {"noise 1 %": 0.01, "noise 5 %": 0.05}
SHIFT = "shift by 1"  # the last axis rolled by one step


class CodeBatch(NamedTuple):
    """Codes of some samples, and how much of their latents each stage left over."""

    codes: Tensor  # (B, T, M)
    valid: Tensor | None = None  # (B, T) bool; False where a token is padding
    energy: Tensor | None = None  # (M,) residual energy after each stage as a share of the first stage's input
    flat: Tensor | None = None  # (B, T) bool; True where nothing varies inside the patch
    label: Tensor | None = None  # (B,) class of each sample
    inputs: tuple[SpreadSums, ...] | None = None  # of each stage's inputs


class InputBatch(Protocol):
    """What a loader yields."""

    @property
    def x(self) -> Tensor: ...
    @property
    def valid(self) -> Tensor | None: ...
    @property
    def label(self) -> Tensor | None: ...


def codebook_health(
    tokenizer: Tokenizer, batches: Iterable[InputBatch], *, classes: int | None = None
) -> list[StageHealth]:
    """Tokenize all batches (B, C, *input) in eval mode and measure every stage; the tokenizer is left as it was.

    Collective: every rank gives its share of the batches, and all get the health over all of them.
    With `classes`, the number of labels, it is also measured what a code tells of its sample's label.
    """
    quantizer = tokenizer.quantizer
    with evaluating(tokenizer):
        found = _tokenized(tokenizer, batches)
        T = tokenizer.geometry.tokens
        stages = health_of_codes(found, quantizer.codes, quantizer.code_vectors(), classes=classes, positions=T)
        return [stage.model_copy(update={"directions": min(tokenizer.directions, book.code.shape[1])})
                for stage, book in zip(stages, quantizer.books, strict=True)]  # fmt: skip


@contextmanager
def evaluating(tokenizer: Tokenizer) -> Iterator[None]:
    """Eval mode inside the block, and every part's own mode again after it."""
    modes = [(part, part.training) for part in tokenizer.modules()]
    tokenizer.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _tokenized(tokenizer: Tokenizer, batches: Iterable[InputBatch]) -> Iterator[CodeBatch]:
    patch, measured = tokenizer.geometry.patch, 0
    for batch in batches:
        with torch.no_grad():
            found = tokenizer.quantizer(tokenizer.encode(batch.x, valid=batch.valid), valid=batch.valid)
        low, high = patchify(batch.x, patch).aminmax(dim=-1)  # (B, T, F) -> (B, T)
        label = batch.label if batch.label is not None and batch.label.dim() == 1 else None
        inputs = found.input_sums() if measured < SPREAD_TOKENS else None  # directions are known before long
        measured += found.codes.shape[:2].numel()
        yield CodeBatch(found.codes, batch.valid, found.energy[1:], high - low < FLAT, label, inputs)


@torch.no_grad()
def code_agreement(
    tokenizer: Tokenizer, batches: Iterable[InputBatch], *, generator: torch.Generator
) -> list[dict[str, float]]:
    """For each stage, the share of real tokens that keep their code under each small change of the input."""
    names = [*NOISES, SHIFT]
    kept, tokens = torch.zeros(len(names), tokenizer.quantizer.codebooks, dtype=torch.float64), 0
    with evaluating(tokenizer):
        for batch in batches:
            codes = tokenizer.tokenize(batch.x, valid=batch.valid)  # (B, T, M)
            real = torch.ones(codes.shape[:2], dtype=torch.bool) if batch.valid is None else batch.valid.cpu()
            tokens += int(real.sum())
            noise = torch.randn(batch.x.shape, generator=generator).to(batch.x)
            changed = [batch.x + size * noise for size in NOISES.values()] + [batch.x.roll(1, dims=-1)]
            for row, x in enumerate(changed):
                same = tokenizer.tokenize(x, valid=batch.valid) == codes
                kept[row] += same.cpu()[real].sum(0)
    if tokens == 0:
        raise DataError("there are no tokens to measure the codebooks by; expected at least one batch.")
    shares = (kept / tokens).T.tolist()  # M lists, one number per change
    return [dict(zip(names, stage, strict=True)) for stage in shares]


class CodeTally:
    """Counts of codes, batch by batch, in constant memory."""

    def __init__(self, sizes: Sequence[int], *, positions: int, classes: int | None = None) -> None:
        self.sizes = tuple(sizes)
        self.usage = UsageCounter(sizes, positions=positions)
        self.labels, self.foreign = (UsageCounter(sizes, positions=classes) for _ in range(2))
        self.labelled = classes is not None
        self.flat = [torch.zeros(K, dtype=torch.int64) for K in self.sizes]  # tokens that show nothing, by code
        self.flatness_known = True
        self.tuples = [DistinctCounter() for _ in self.sizes]  # of the codes up to each stage
        self.energy, self.weight = torch.zeros(len(self.sizes), dtype=torch.float64), 0
        self.inputs: list[SpreadSums] = []  # of every stage

    def add(self, batch: CodeBatch) -> None:
        self.usage.update(batch.codes, valid=batch.valid)
        every = torch.ones(batch.codes.shape[:2], dtype=torch.bool, device=batch.codes.device)
        real = every if batch.valid is None else batch.valid
        if batch.energy is not None:
            tokens = int(real.sum())
            self.energy += tokens * batch.energy.double().cpu()
            self.weight += tokens
        if batch.inputs is not None:
            here = list(batch.inputs)
            self.inputs = [a + b for a, b in zip(self.inputs, here, strict=True)] if self.inputs else here
        self.flatness_known = self.flatness_known and batch.flat is not None
        codes = batch.codes[real].cpu()  # (S, M)
        for m, K in enumerate(self.sizes):
            self.tuples[m].update(codes[:, : m + 1])
            if batch.flat is not None:
                self.flat[m] += torch.bincount(codes[batch.flat[real].cpu(), m], minlength=K)
        self.labelled = self.labelled and batch.label is not None
        if self.labelled and batch.label is not None:
            for counter, label in ((self.labels, batch.label), (self.foreign, batch.label.roll(1))):
                counter.update(batch.codes, valid=batch.valid, positions=label[:, None].expand(every.shape))

    def join_ranks(self) -> None:
        """Count what all ranks have counted (collective)."""
        if not distributed.is_active():
            return
        self.usage, self.labels, self.foreign = (c.over_ranks() for c in (self.usage, self.labels, self.foreign))
        self.flat = [distributed.sum_over_ranks(count) for count in self.flat]
        for counter in self.tuples:
            counter.merge(distributed.gather_rows(counter.smallest))
        self.energy = distributed.sum_over_ranks(self.energy)
        if all(distributed.gather_json(bool(self.inputs))):  # a rank without a batch has nothing to add
            self.inputs = [sums.over_ranks() for sums in self.inputs]
        known = distributed.gather_json([self.weight, self.labelled, self.flatness_known])
        self.weight = sum(weight for weight, _, _ in known)
        self.labelled, self.flatness_known = (all(row[i] for row in known) for i in (1, 2))

    def stages(self, codebooks: Sequence[Tensor] | None) -> list[StageHealth]:
        """One record per stage; `codebooks` are M tensors (K_m, Dq)."""
        information = self.usage.information()
        labels: list[float | None] = self._label_information() if self.labelled else [None for _ in self.sizes]
        latents = [sums.spread() for sums in self.inputs] or [None for _ in self.sizes]
        codes = [None for _ in self.sizes] if codebooks is None else code_spreads(self.usage.counts, codebooks)
        found = []
        for m, counts in enumerate(self.usage.counts):
            latent, code = latents[m], codes[m]
            order = counts.argsort(descending=True, stable=True)[:TOP]
            most, distinct = int(order[0]), self.tuples[m].value()
            found.append(
                StageHealth(
                    stage=m + 1,
                    codes=self.sizes[m],
                    tokens=self.usage.tokens,
                    usage_rate=float(usage_rate(counts)),
                    entropy=float(usage_entropy(counts)),
                    effective_usage=float(effective_usage(counts)),
                    perplexity=float(perplexity(counts)),
                    top_share=float(top_share(counts)),
                    energy=float(self.energy[m] / self.weight) if self.weight else None,
                    position_information=information[m].nats if information[m].trusted else None,
                    norms=() if codebooks is None else tuple(codebooks[m].float().norm(dim=-1).tolist()),
                    label_information=labels[m],
                    dead=int((counts == 0).sum()),
                    top_codes=tuple(order.tolist()),
                    top_shares=tuple((counts[order].double() / counts.sum()).tolist()),
                    top_flat=int(self.flat[m][most]) / int(counts[most]) if self.flatness_known else None,
                    tuples=distinct.number,
                    tuples_exact=distinct.exact,
                    latent_dimension=None if latent is None else latent.dimension,
                    latent_first=None if latent is None else latent.first,
                    code_dimension=None if code is None else code.dimension,
                    code_first=None if code is None else code.first,
                )
            )
        return found

    def _label_information(self) -> list[float | None]:
        pairs = zip(self.labels.information(), self.foreign.information(), strict=True)
        return [max(0.0, own.nats - other.nats) if own.trusted else None for own, other in pairs]


def health_of_codes(
    batches: Iterable[CodeBatch],
    sizes: Sequence[int],
    codebooks: Sequence[Tensor] | None = None,
    *,
    classes: int | None = None,
    positions: int | None = None,
) -> list[StageHealth]:
    """One record per stage from codes in [0, K_m); `codebooks` are M tensors (K_m, Dq).

    With `positions` (T) given, batches of all ranks count together (collective); else T is that of the first batch.
    """

    def counted() -> CodeTally | None:
        tally = None if positions is None else CodeTally(sizes, positions=positions, classes=classes)
        for batch in batches:
            tally = tally or CodeTally(sizes, positions=batch.codes.shape[1], classes=classes)
            tally.add(batch)
        return tally

    tally = distributed.done_together(counted) if positions is not None else counted()
    if tally is not None and positions is not None:
        tally.join_ranks()
    if tally is None or tally.usage.tokens == 0:
        raise DataError("there are no tokens to measure the codebooks by; expected at least one batch.")
    return tally.stages(codebooks)


def verdicts(stages: Sequence[StageHealth], known: InForce = NOTHING) -> list[Verdict]:
    """At least one verdict for each stage: what is wrong and what to try, or that it is healthy.

    With the run's settings as `known`, nothing is proposed that is done already.
    """
    return [verdict for stage in stages for verdict in _verdicts_on(stage, known)]


def _verdicts_on(stage: StageHealth, known: InForce) -> list[Verdict]:
    used = f"{100 * stage.usage_rate:.0f} % of {stage.codes:,} codes in use, effective use {stage.effective_usage:.2f}"
    if stage.tokens < TOKENS_PER_CODE * stage.codes:
        text = f"cannot be judged: {stage.tokens:,} tokens are too few for {stage.codes:,} codes; use more samples."
        return [_verdict(stage, "warn", text)]
    found = list[Verdict]()
    if stage.usage_rate < COLLAPSED_USAGE or stage.effective_usage < COLLAPSED_EFFECTIVE:
        text = f"collapsed: {used}. Try this: {against_collapse(known)}"
        found.append(_verdict(stage, "bad", text))
    elif 1 - stage.usage_rate > DEAD_SHARE:
        dead = round((1 - stage.usage_rate) * stage.codes)
        text = f"{dead:,} of {stage.codes:,} codes are never used. Try this: {against_dead_codes(known)}"
        found.append(_verdict(stage, "warn", text))
    if is_dominant(stage.top_share, codes=stage.codes):
        flat = None if stage.top_flat is None or stage.top_flat < DOMINANT_SHARE else f"{100 * stage.top_flat:.0f} %"
        text = f"one code takes {100 * stage.top_share:.0f} % of all tokens; {against_dominance(known, flat=flat)}"
        found.append(_verdict(stage, "warn", text))
    if _is_narrow(stage):
        text = (
            f"narrow: its codes fill {stage.code_dimension:.1f} of {stage.directions} directions, "
            f"{100 * (stage.code_first or 0):.0f} % of their variance lies along one. Try this: "
            f"{against_narrowness(known)}"
        )
        found.append(_verdict(stage, "warn", text))
    if _tells_position(stage):
        advice = "codes describe where a patch is, not what it shows; a tokenizer should not see positions."
        share = f"{stage.position_information:.2f} of {stage.entropy:.2f} nats"
        found.append(_verdict(stage, "warn", f"position alone tells {share} of the code: {advice}"))
    if _is_unsteady(stage):
        name = next(iter(NOISES))
        text = (
            f"only {100 * stage.agreement[name]:.0f} % of the codes survive {name} of the data's spread: they describe "
            f"noise. Try this: {against_noise(known)}"
        )
        found.append(_verdict(stage, "warn", text))
    return found or [_verdict(stage, "ok", f"healthy: {used}.")]


def _verdict(stage: StageHealth, level: Literal["ok", "warn", "bad"], text: str) -> Verdict:
    return Verdict(stage=stage.stage, level=level, text=text)


def with_start_norms(stages: Sequence[StageHealth], starts: Sequence[Sequence[float]]) -> list[StageHealth]:
    """The same with the code norms right after the codebooks' start, one list per stage, or none at all."""
    norms = starts or [[] for _ in stages]
    return [stage.model_copy(update={"norms_start": tuple(own)}) for stage, own in zip(stages, norms, strict=True)]


def _is_narrow(stage: StageHealth) -> bool:
    if stage.directions is None or stage.code_dimension is None:
        return False
    return is_narrow(stage.code_dimension, directions=stage.directions)


def _is_unsteady(stage: StageHealth) -> bool:
    # Later stages encode what is left over, and that little noise moves it is how residuals are.
    return stage.stage == 1 and bool(stage.agreement) and stage.agreement[next(iter(NOISES))] < STEADY_SHARE


def _tells_position(stage: StageHealth) -> bool:
    return stage.position_information is not None and stage.position_information > POSITION_SHARE * max(
        stage.entropy, 0.1
    )
