"""The health of codebooks over a full pass.

Shapes: B batch, T tokens (positions), M stages, K_m codes, Dq code width. The quantities and their formulas are those
of `bridle.quantize.usage`; here they become one record per stage.

MI(code; label) is the Miller–Madow corrected information minus the same figure with every sample given the label of its
neighbour in the batch: tokens of one sample resemble each other, so even foreign labels would seem to tell something.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from bridle import distributed
from bridle.data.loading.loader import Batch
from bridle.errors import DataError
from bridle.models.tokenizer import Tokenizer
from bridle.quantize.dimension import SpreadSums, code_spreads
from bridle.quantize.usage import (
    UsageCounter,
    effective_usage,
    perplexity,
    top_share,
    usage_entropy,
    usage_rate,
)
from bridle.runs.results import StageHealth

SPREAD_TOKENS = 131_072  # on which the spread of latents over directions is measured

# Small changes of a normalised input under which a code should mostly stay: name -> standard deviation of added noise.
NOISES = {"noise 1 %": 0.01, "noise 5 %": 0.05}
NO_TOKENS = "there are no tokens to measure the codebooks by; expected at least one batch."
SHIFT = "shift by 1"  # the last axis rolled by one step


class CodeBatch(NamedTuple):
    """Codes of some samples, and how much of their latents each stage left over."""

    codes: Tensor  # (B, T, M)
    energy: Tensor  # (M,) residual energy after each stage as a share of the first stage's input
    valid: Tensor | None = None  # (B, T) bool; False where a token is padding
    label: Tensor | None = None  # (B,) class of each sample
    inputs: tuple[SpreadSums, ...] | None = None  # of each stage's inputs


def codebook_health(tokenizer: Tokenizer, batches: Iterable[Batch], *, classes: int | None = None) -> list[StageHealth]:
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


def _tokenized(tokenizer: Tokenizer, batches: Iterable[Batch]) -> Iterator[CodeBatch]:
    measured = 0
    for batch in batches:
        with torch.no_grad():
            found = tokenizer.quantizer(tokenizer.encode(batch.x, valid=batch.valid), valid=batch.valid)
        label = batch.label if batch.label is not None and batch.label.dim() == 1 else None
        inputs = found.input_sums() if measured < SPREAD_TOKENS else None  # directions are known before long
        measured += found.codes.shape[:2].numel()
        yield CodeBatch(found.codes, found.energy[1:], batch.valid, label, inputs)


@torch.no_grad()
def code_agreement(
    tokenizer: Tokenizer, batches: Iterable[Batch], *, generator: torch.Generator
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
        raise DataError(NO_TOKENS)
    shares = (kept / tokens).T.tolist()  # M lists, one number per change
    return [dict(zip(names, stage, strict=True)) for stage in shares]


class CodeTally:
    """Counts of codes, batch by batch, in constant memory."""

    def __init__(self, sizes: Sequence[int], *, positions: int, classes: int | None) -> None:
        self.sizes = tuple(sizes)
        self.usage = UsageCounter(sizes, positions=positions)
        self.labels, self.foreign = (UsageCounter(sizes, positions=classes) for _ in range(2))
        self.labelled = classes is not None
        self.energy = torch.zeros(len(self.sizes), dtype=torch.float64)  # summed over tokens
        self.inputs: list[SpreadSums] = []  # of every stage

    def add(self, batch: CodeBatch) -> None:
        self.usage.update(batch.codes, valid=batch.valid)
        tokens = batch.codes.shape[:2].numel() if batch.valid is None else int(batch.valid.sum())
        self.energy += tokens * batch.energy.double().cpu()
        if batch.inputs is not None:
            own = list(batch.inputs)
            self.inputs = [a + b for a, b in zip(self.inputs, own, strict=True)] if self.inputs else own
        self.labelled = self.labelled and batch.label is not None
        if self.labelled and batch.label is not None:
            for counter, label in ((self.labels, batch.label), (self.foreign, batch.label.roll(1))):
                counter.update(batch.codes, valid=batch.valid, positions=label[:, None].expand(batch.codes.shape[:2]))

    def join_ranks(self) -> None:
        """Count what all ranks have counted (collective)."""
        if not distributed.is_active():
            return
        self.usage, self.labels, self.foreign = (c.over_ranks() for c in (self.usage, self.labels, self.foreign))
        self.energy = distributed.sum_over_ranks(self.energy)
        known = distributed.gather_json([self.labelled, bool(self.inputs)])
        self.labelled = all(labelled for labelled, _ in known)
        if all(measured for _, measured in known):  # a rank without a batch has nothing to add
            self.inputs = [sums.over_ranks() for sums in self.inputs]

    def stages(self, codebooks: Sequence[Tensor]) -> list[StageHealth]:
        """One record per stage; `codebooks` are M tensors (K_m, Dq)."""
        information = self.usage.information()
        labels: list[float | None] = [None for _ in self.sizes]
        if self.labelled:
            pairs = zip(self.labels.information(), self.foreign.information(), strict=True)
            labels = [max(0.0, own.nats - other.nats) if own.trusted else None for own, other in pairs]
        latents = [sums.spread() for sums in self.inputs] or [None for _ in self.sizes]
        found = []
        for m, (counts, code) in enumerate(
            zip(self.usage.counts, code_spreads(self.usage.counts, codebooks), strict=True)
        ):
            latent = latents[m]
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
                    energy=float(self.energy[m] / self.usage.tokens),
                    position_information=information[m].nats if information[m].trusted else None,
                    norms=tuple(codebooks[m].float().norm(dim=-1).tolist()),
                    label_information=labels[m],
                    dead=int((counts == 0).sum()),
                    latent_dimension=None if latent is None else latent.dimension,
                    latent_first=None if latent is None else latent.first,
                    code_dimension=None if code is None else code.dimension,
                    code_first=None if code is None else code.first,
                )
            )
        return found


def health_of_codes(
    batches: Iterable[CodeBatch],
    sizes: Sequence[int],
    codebooks: Sequence[Tensor],
    *,
    positions: int,
    classes: int | None = None,
) -> list[StageHealth]:
    """One record per stage from codes in [0, K_m) at T = `positions` (collective); `codebooks` are M of (K_m, Dq)."""
    tally = CodeTally(sizes, positions=positions, classes=classes)

    def count() -> None:
        for batch in batches:
            tally.add(batch)

    distributed.done_together(count)
    tally.join_ranks()
    if tally.usage.tokens == 0:
        raise DataError(NO_TOKENS)
    return tally.stages(codebooks)


def with_start_norms(stages: Sequence[StageHealth], starts: Sequence[Sequence[float]]) -> list[StageHealth]:
    """The same with the code norms right after the codebooks' start, one list per stage, or none at all."""
    norms = starts or [[] for _ in stages]
    return [stage.model_copy(update={"norms_start": tuple(own)}) for stage, own in zip(stages, norms, strict=True)]
