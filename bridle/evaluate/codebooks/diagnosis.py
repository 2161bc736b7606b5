"""Verdicts on codebooks in plain words: what is wrong, and what to try, but nothing that is done already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from bridle.config import Config
from bridle.evaluate.codebooks.health import NOISES
from bridle.quantize.dimension import is_narrow
from bridle.quantize.usage import COLLAPSED_USAGE, is_dominant
from bridle.runs.results import StageHealth, Verdict

# Where a verdict changes. A uniform book has CUR 1 and ECU 1. The thresholds of live warnings are in `quantize.usage`.
COLLAPSED_EFFECTIVE = 0.4  # ECU below
DEAD_SHARE = 0.1  # of all codes never used
POSITION_SHARE = 0.5  # of the codes' entropy told by the position alone
STEADY_SHARE = 0.8  # of first-stage codes that ought to survive the smallest change of the input
TOKENS_PER_CODE = 4  # with fewer tokens even a perfect codebook looks unused

FEWER = "use fewer codes (quantizer.codes)"
LONGER = "train the tokenizer longer (tokenizer_phase.steps)"
Level = Literal["ok", "warn", "bad"]


def verdicts(stages: Sequence[StageHealth], config: Config, *, is_trained: bool) -> list[Verdict]:
    """At least one verdict for each stage: what is wrong and what to try, or that it is healthy.

    The advice depends on the run's config and on whether the tokenizer is trained, which a cold start is not.
    """
    found = []
    for stage in stages:
        healthy: tuple[Level, str] = ("ok", f"healthy: {_usage(stage)}.")
        for level, text in list(_problems(stage, config, is_trained)) or [healthy]:
            found.append(Verdict(stage=stage.stage, level=level, text=text))
    return found


def _problems(stage: StageHealth, config: Config, is_trained: bool) -> Iterator[tuple[Level, str]]:
    if stage.tokens < TOKENS_PER_CODE * stage.codes:
        text = f"{stage.tokens:,} tokens are too few for {stage.codes:,} codes; use more samples."
        yield "warn", f"cannot be judged: {text}"
        return
    longer, resets = [LONGER] if is_trained else [], list(_resets(config, is_trained))
    if is_trained and config.loss.centre_teacher != "position":
        longer.append("set loss.centre_teacher=position")
    if stage.usage_rate < COLLAPSED_USAGE or stage.effective_usage < COLLAPSED_EFFECTIVE:
        start = [] if config.quantizer.start == "kmeans" else ["set quantizer.start=kmeans"]
        yield "bad", f"collapsed: {_usage(stage)}. {_try([*longer, *start, *resets, FEWER])}"
    elif 1 - stage.usage_rate > DEAD_SHARE:
        dead = f"{round((1 - stage.usage_rate) * stage.codes):,} of {stage.codes:,} codes are never used."
        yield "warn", f"{dead} {_try([*resets, FEWER])}"
    if is_dominant(stage.top_share, codes=stage.codes):
        once = ", and set quantizer.residual=once, which does not blow up small residuals"
        cause = "often silence, padding or a flat background: check the data"
        rule = "" if config.quantizer.residual == "once" else once
        yield "warn", f"one code takes {100 * stage.top_share:.0f} % of all tokens; {cause}{rule}."
    dimension, directions = stage.code_dimension, stage.directions
    # A cold start that is whitened already is as wide as its patches allow.
    can_widen = is_trained or config.tokenizer.whiten is None
    if can_widen and dimension is not None and directions and is_narrow(dimension, directions=directions):
        filled = f"its codes fill {dimension:.1f} of {directions} directions"
        along = f"{100 * (stage.code_first or 0):.0f} % of their variance lies along one"
        whiten = "set tokenizer.whiten=0.5, which weighs strong directions of patches down"
        teacher = "train the encoder that teaches it longer (encoder_phase)"
        tips = [*longer, teacher] if is_trained else [whiten]
        yield "warn", f"narrow: {filled}, {along}. {_try(tips)}"
    if (stage.position_information or 0.0) > POSITION_SHARE * max(stage.entropy, 0.1):
        share = f"{stage.position_information:.2f} of {stage.entropy:.2f} nats"
        cause = "codes describe where a patch is, not what it shows; a tokenizer should not see positions."
        yield "warn", f"position alone tells {share} of the code: {cause}"
    # Later stages encode what is left over, which even a little noise moves.
    noise = next(iter(NOISES))
    if stage.stage == 1 and stage.agreement.get(noise, 1.0) < STEADY_SHARE:
        kept = f"only {100 * stage.agreement[noise]:.0f} % of the codes survive {noise} of the data's spread"
        yield "warn", f"{kept}: they describe noise. {_try([FEWER, *longer[:1]])}"


def _usage(stage: StageHealth) -> str:
    share = f"{100 * stage.usage_rate:.0f} % of {stage.codes:,} codes in use"
    return f"{share}, effective use {stage.effective_usage:.2f}"


def _resets(config: Config, is_trained: bool) -> Iterator[str]:
    """What brings unused codes back."""
    if not config.quantizer.reset_below:
        yield "set quantizer.reset_below=1, which redraws unused codes at the start"
    if is_trained and not config.quantizer.reset_every:
        yield "set quantizer.reset_every=20, which redraws those that go out of use"


def _try(tips: Sequence[str]) -> str:
    *others, last = tips
    return f"Try this: {', '.join(others)}, or {last}." if others else f"Try this: {last}."
