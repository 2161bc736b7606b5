"""What to try when a codebook is ill: only what is not done already.

A setting is proposed where it is known to be another one, or where nothing is known of the run's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridle.config import Config
from bridle.models.tokenizer import Tokenizer

FEWER = "use fewer codes (quantizer.codes)"


class InForce(NamedTuple):
    """The settings that advice may be about; None where they are not known."""

    trained: bool | None = None  # a trained tokenizer, not the cold start
    start: str | None = None
    centre_teacher: str | None = None
    residual: str | None = None
    reset_below: int | None = None
    reset_every: int | None = None


NOTHING = InForce()


def in_force(config: Config, tokenizer: Tokenizer) -> InForce:
    """The settings of a run under which this tokenizer was made."""
    quantizer = config.quantizer
    return InForce(
        trained=tokenizer.is_trained,
        start=quantizer.start,
        centre_teacher=config.loss.centre_teacher,
        residual=quantizer.residual,
        reset_below=quantizer.reset_below,
        reset_every=quantizer.reset_every,
    )


def against_collapse(known: InForce) -> str:
    """What keeps codes in use."""
    found = ["train the tokenizer longer (tokenizer_phase.steps)"] if known.trained is not False else []
    if known.trained is not False and known.centre_teacher != "position":
        found.append("set loss.centre_teacher=position")
    if known.start != "kmeans":
        found.append("set quantizer.start=kmeans")
    return _one_of([*found, *_resets(known), FEWER])


def against_dead_codes(known: InForce) -> str:
    """What brings unused codes back, or does without them."""
    return _one_of([*_resets(known), FEWER])


def against_dominance(known: InForce, *, flat: str | None) -> str:
    """Where a code that takes too many tokens comes from, and what to do; `flat` is the known share of flat patches."""
    rule = (
        "" if known.residual == "once" else ", and set quantizer.residual=once, which does not blow up small residuals"
    )
    if flat is None:
        return f"often silence, padding or a flat background: check the data{rule}."
    return (
        f"{flat} of these are patches in which nothing varies, such as digital silence or an even background: "
        f"leave out or crop samples that are mostly empty{rule}."
    )


def against_narrowness(known: InForce) -> str:
    """What spreads latents, and so codes, over more directions."""
    if known.trained is False:
        return (
            "set tokenizer.whiten=0.5, which weighs strong directions of patches down, or tokenizer.standardise=patch."
        )
    found = ["train the tokenizer longer (tokenizer_phase.steps)"]
    if known.centre_teacher != "position":
        found.append("set loss.centre_teacher=position")
    return _one_of([*found, "train the encoder that teaches it longer (encoder_phase)"])


def against_noise(known: InForce) -> str:
    """What makes codes steady."""
    longer = ["train the tokenizer longer (tokenizer_phase.steps)"] if known.trained is not False else []
    return _one_of([FEWER, *longer])


def _resets(known: InForce) -> list[str]:
    found = []
    if known.reset_below in (None, 0):
        found.append("set quantizer.reset_below=1, which redraws unused codes at the start")
    if known.reset_every in (None, 0) and known.trained is not False:
        found.append("set quantizer.reset_every=20, which redraws those that go out of use")
    return found


def _one_of(choices: Sequence[str]) -> str:
    return (f"{', '.join(choices[:-1])}, or {choices[-1]}" if len(choices) > 1 else choices[0]) + "."
