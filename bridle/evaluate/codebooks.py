"""The health of codebooks over a full pass, and what to make of it.

Shapes: B batch, T tokens (positions), M stages, K_m codes, Dq code width. The quantities and their formulas are those
of `bridle.quantize.usage`; here they become one record per stage and a verdict in plain words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bridle.errors import DataError
from bridle.models.tokenizer import Tokenizer
from bridle.quantize.usage import UsageCounter, effective_usage, perplexity, top_share, usage_entropy, usage_rate

# Where a verdict changes. A uniform book has CUR 1 and ECU 1.
COLLAPSED_USAGE = 0.5  # CUR below
COLLAPSED_EFFECTIVE = 0.4  # ECU below
DOMINANT_SHARE = 0.3  # of all tokens in one code
DEAD_SHARE = 0.1  # of all codes never used
POSITION_SHARE = 0.5  # of the codes' entropy told by the position alone
TOKENS_PER_CODE = 4  # with fewer tokens even a perfect codebook looks unused


class CodeBatch(NamedTuple):
    """Codes of some samples, and how much of their latents each stage left over."""

    codes: Tensor  # (B, T, M)
    valid: Tensor | None = None  # (B, T) bool; False where a token is padding
    energy: Tensor | None = None  # (M,) residual energy after each stage as a share of the first stage's input


class StageHealth(NamedTuple):
    """How one codebook is used."""

    stage: int  # from 1
    codes: int  # K
    tokens: int  # counted
    usage_rate: float  # CUR
    entropy: float  # UE, nats
    effective_usage: float  # ECU
    perplexity: float
    top_share: float  # of all tokens in the most used code
    energy: float | None  # what is left of the latents after this stage; None if it was not measured
    position_information: float | None  # MI(code; position), nats; None with too few tokens to trust it
    norms: list[float]  # lengths of the code vectors


class Verdict(NamedTuple):
    """What a stage's numbers mean."""

    stage: int
    level: Literal["ok", "warn", "bad"]
    text: str


class InputBatch(Protocol):
    """What a loader yields."""

    @property
    def x(self) -> Tensor: ...
    @property
    def valid(self) -> Tensor | None: ...


def codebook_health(tokenizer: Tokenizer, batches: Iterable[InputBatch]) -> list[StageHealth]:
    """Tokenize all batches (B, C, *input) in eval mode and judge every stage; the tokenizer is left as it was."""
    modes = [(part, part.training) for part in tokenizer.modules()]
    tokenizer.eval()
    try:
        quantizer = tokenizer.quantizer
        return health_of_codes(_tokenized(tokenizer, batches), quantizer.codes, quantizer.code_vectors())
    finally:
        for part, mode in modes:
            part.training = mode


def _tokenized(tokenizer: Tokenizer, batches: Iterable[InputBatch]) -> Iterator[CodeBatch]:
    for batch in batches:
        with torch.no_grad():
            found = tokenizer.quantizer(tokenizer.encode(batch.x, valid=batch.valid), valid=batch.valid)
        yield CodeBatch(found.codes, batch.valid, found.energy[1:])


def health_of_codes(
    batches: Iterable[CodeBatch], sizes: Sequence[int], codebooks: Sequence[Tensor] | None = None
) -> list[StageHealth]:
    """One record per stage from codes in [0, K_m); `codebooks` are M tensors (K_m, Dq)."""
    counter: UsageCounter | None = None
    energy, weight = torch.zeros(len(sizes), dtype=torch.float64), 0
    for batch in batches:
        if counter is None:
            counter = UsageCounter(sizes, positions=batch.codes.shape[1])
        counter.update(batch.codes, valid=batch.valid)
        if batch.energy is not None:
            tokens = batch.codes[..., 0].numel() if batch.valid is None else int(batch.valid.sum())
            energy += tokens * batch.energy.double().cpu()
            weight += tokens
    if counter is None or counter.tokens == 0:
        raise DataError("there are no tokens to judge the codebooks by; expected at least one batch.")
    stages = []
    for m, (counts, information) in enumerate(zip(counter.counts, counter.information(), strict=True)):
        stages.append(
            StageHealth(
                stage=m + 1,
                codes=sizes[m],
                tokens=counter.tokens,
                usage_rate=float(usage_rate(counts)),
                entropy=float(usage_entropy(counts)),
                effective_usage=float(effective_usage(counts)),
                perplexity=float(perplexity(counts)),
                top_share=float(top_share(counts)),
                energy=float(energy[m] / weight) if weight else None,
                position_information=information.nats if information.trusted else None,
                norms=[] if codebooks is None else codebooks[m].float().norm(dim=-1).tolist(),
            )
        )
    return stages


def verdicts(stages: Sequence[StageHealth]) -> list[Verdict]:
    """At least one verdict for each stage: what is wrong and what to try, or that it is healthy."""
    return [verdict for stage in stages for verdict in _verdicts_on(stage)]


def _verdicts_on(stage: StageHealth) -> list[Verdict]:
    used = f"{100 * stage.usage_rate:.0f} % of {stage.codes:,} codes in use, effective use {stage.effective_usage:.2f}"
    if stage.tokens < TOKENS_PER_CODE * stage.codes:
        text = f"cannot be judged: {stage.tokens:,} tokens are too few for {stage.codes:,} codes; use more samples."
        return [Verdict(stage.stage, "warn", text)]
    found = list[Verdict]()
    if stage.usage_rate < COLLAPSED_USAGE or stage.effective_usage < COLLAPSED_EFFECTIVE:
        advice = (
            "train the tokenizer longer (tokenizer_phase.steps), keep loss.centre_teacher=position and "
            "quantizer.start=kmeans, or use fewer codes (quantizer.codes)."
        )
        found.append(Verdict(stage.stage, "bad", f"collapsed: {used}. Try this: {advice}"))
    elif 1 - stage.usage_rate > DEAD_SHARE:
        dead = round((1 - stage.usage_rate) * stage.codes)
        advice = "quantizer.reset_below=1 redraws unused codes at the start; or use fewer codes (quantizer.codes)."
        found.append(
            Verdict(stage.stage, "warn", f"{dead:,} of {stage.codes:,} codes are never used. Try this: {advice}")
        )
    if stage.top_share > max(DOMINANT_SHARE, 2 / stage.codes):
        advice = (
            "often silence, padding or a flat background: check the data, "
            "and prefer quantizer.residual=once, which does not blow up small residuals."
        )
        found.append(
            Verdict(stage.stage, "warn", f"one code takes {100 * stage.top_share:.0f} % of all tokens; {advice}")
        )
    if _tells_position(stage):
        advice = "codes describe where a patch is, not what it shows; a tokenizer should not see positions."
        share = f"{stage.position_information:.2f} of {stage.entropy:.2f} nats"
        found.append(Verdict(stage.stage, "warn", f"position alone tells {share} of the code: {advice}"))
    return found or [Verdict(stage.stage, "ok", f"healthy: {used}.")]


def _tells_position(stage: StageHealth) -> bool:
    return stage.position_information is not None and stage.position_information > POSITION_SHARE * max(
        stage.entropy, 0.1
    )
