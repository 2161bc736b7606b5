"""How codes are used: rates, entropies and ages, from counts, in constant memory however long the corpus.

Shapes: S tokens, M stages, K codes, P positions.

    CUR = (codes used at least once) / K                                       usage rate
    UE  = −Σ p_i ln p_i,  p_i = counts_i / Σ counts                            usage entropy, in nats
    ECU = CUR · UE / ln K                                                      effective usage, the paper's formula
    MI  = H(code) + H(position) − H(code, position), each H + (cells − 1)/2S   Miller–Madow corrected

Functions take counts and return numbers as 0-dim float64 tensors, so that nothing waits for a device before it must.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bridle import distributed
from bridle.errors import UsageError

TOKENS_PER_CELL = 4  # code × position cells need this many tokens on average before the corrected MI can be trusted
NEVER = 2**40  # the age of a code that was not used yet: older than any run
COLLAPSED_USAGE = 0.5  # CUR below which a book counts as collapsed
DOMINANT_SHARE = 0.3  # of all tokens in one code, above which it counts as dominant
RECOVERED = 1.2  # a book must be so much better than the threshold before it can be said to collapse again


def usage_rate(counts: Tensor) -> Tensor:
    """CUR: the share of codes (K,) used at least once."""
    return (counts > 0).double().mean()


def usage_entropy(counts: Tensor) -> Tensor:
    """UE: the entropy of the code distribution in nats; 0 where nothing was counted."""
    p = counts.double() / counts.sum().double().clamp_min(1e-300)
    entropy: Tensor = torch.special.entr(p).sum()
    return entropy


def effective_usage(counts: Tensor) -> Tensor:
    """ECU: 1 for uniform use of all codes, 0 if one code takes everything."""
    if len(counts) == 1:
        return usage_rate(counts)  # a book of one code cannot be used more evenly
    return usage_rate(counts) * usage_entropy(counts) / math.log(len(counts))


def released_effective_usage(rate: float, entropy: float, codes: int) -> float:
    """CUR / (UE in bits · ln K), which the paper's released code computes and its table shows; higher is worse.

    A collapsed book scores infinity.
    """
    bits = entropy / math.log(2)
    return rate / (bits * math.log(codes)) if bits > 0 and codes > 1 else math.inf


def perplexity(counts: Tensor) -> Tensor:
    """exp(UE): the number of codes in even use that would have this entropy."""
    return usage_entropy(counts).exp()


def top_share(counts: Tensor) -> Tensor:
    """The share of tokens taken by the most used code."""
    return counts.max().double() / counts.sum().double().clamp_min(1e-300)


def is_dominant(share: float, *, codes: int) -> bool:
    """Does the most used of `codes` codes take too many tokens? Of two or three codes one must take many."""
    return share > max(DOMINANT_SHARE, 2 / codes)


class MutualInformation(NamedTuple):
    """What the position of a token (or another fact about it) tells about its code, in nats."""

    nats: float  # Miller–Madow corrected, not below 0
    plug_in: float  # uncorrected: too high by about (cells − 1)/2S
    code_entropy: float  # H(code), the most that position could tell; corrected
    tokens: int
    trusted: bool  # False: too few tokens for so many codes and positions

    def __str__(self) -> str:
        return f"{self.nats:.3f} nats of {self.code_entropy:.3f}" if self.trusted else "too few tokens"


def mutual_information(joint: Tensor) -> MutualInformation:
    """MI of code and position from their joint counts (K, P)."""
    joint = joint.double()
    tokens = joint.sum().clamp_min(1)
    code, position = joint.sum(1), joint.sum(0)
    tables = (code, position, joint.flatten())
    plain = [usage_entropy(table) for table in tables]
    extra = [((table > 0).sum() - 1).clamp_min(0) / (2 * tokens) for table in tables]
    plug_in = plain[0] + plain[1] - plain[2]
    corrected = plug_in + extra[0] + extra[1] - extra[2]
    # The correction counts occupied cells; with few tokens most that could be occupied are not, and it is too small.
    cells = (code > 0).sum() * (position > 0).sum()
    return MutualInformation(
        nats=max(0.0, float(corrected)),
        plug_in=float(plug_in),
        code_entropy=float(plain[0] + extra[0]),
        tokens=int(joint.sum()),
        trusted=bool(joint.sum() >= TOKENS_PER_CELL * cells) and int(joint.sum()) > 0,
    )


class UsageCounter:
    """Counts over a corpus: codes per stage, and code × position; fed batch by batch."""

    def __init__(self, sizes: Sequence[int], *, positions: int | None = None) -> None:
        self.sizes, self.positions = tuple(sizes), positions
        self.counts = [torch.zeros(K, dtype=torch.int64) for K in self.sizes]  # M tensors (K_m,)
        self.joint = [torch.zeros(K, positions or 0, dtype=torch.int64) for K in self.sizes]  # M tensors (K_m, P)

    @property
    def tokens(self) -> int:
        return int(self.counts[0].sum())

    def update(self, codes: Tensor, *, valid: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Count codes (B, T, M) or (S, M). The position of a token is its place on the T axis unless given."""
        if codes.dim() not in (2, 3) or codes.shape[-1] != len(self.sizes):
            raise UsageError(f"expected codes (…, {len(self.sizes)}); got {list(codes.shape)}.")
        if self.positions is not None and positions is None:
            if codes.dim() != 3 or codes.shape[1] > self.positions:
                raise UsageError(
                    f"expected codes (B, T ≤ {self.positions}, M) or their positions; got {list(codes.shape)}."
                )
            positions = torch.arange(codes.shape[1], device=codes.device).expand(codes.shape[:2])
        flat = codes.reshape(-1, codes.shape[-1]).long()
        place = None if positions is None else positions.reshape(-1).long()
        if valid is not None:
            keep = valid.reshape(-1)
            flat, place = flat[keep], None if place is None else place[keep]
        for stage, K in enumerate(self.sizes):
            code = flat[:, stage]
            self.counts[stage] += torch.bincount(code, minlength=K).cpu()
            if self.positions is not None and place is not None:
                cells = torch.bincount(code * self.positions + place, minlength=K * self.positions)
                self.joint[stage] += cells.view(K, self.positions).cpu()

    def over_ranks(self, device: torch.device | str = "cpu") -> UsageCounter:
        """The counter of what all ranks have seen (collective); `device` is where the process group communicates."""
        total = UsageCounter(self.sizes, positions=self.positions)
        total.counts = [distributed.sum_over_ranks(c.to(device)).cpu() for c in self.counts]
        total.joint = [distributed.sum_over_ranks(j.to(device)).cpu() for j in self.joint]
        return total

    def information(self) -> list[MutualInformation]:
        """MI of code and position, one for each stage."""
        if self.positions is None:
            raise UsageError("this counter was made without positions; give UsageCounter positions=T.")
        return [mutual_information(joint) for joint in self.joint]


class CodeAge:
    """Steps since each code was last used, for telling codes that died from codes that are rare."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.ages = [torch.full((K,), NEVER, dtype=torch.int64) for K in self.sizes]  # M tensors (K_m,)

    def count(self, codes: Tensor) -> Tensor:
        """(ΣK_m,) int64: how often codes (…, M) hold each code, stage after stage."""
        first = torch.tensor([sum(self.sizes[:m]) for m in range(len(self.sizes))], device=codes.device)
        index = (codes.reshape(-1, codes.shape[-1]).long() + first).flatten()
        counts = torch.zeros(sum(self.sizes), dtype=torch.int64, device=codes.device)
        return counts.index_add_(0, index, torch.ones_like(index))  # bincount would wait for a GPU

    def update(self, counts: Tensor) -> None:
        """One step in which the codes were used so often (ΣK_m,) by all ranks."""
        parts = torch.split(counts > 0, list(self.sizes))
        self.ages = [(age.to(now.device) + 1).masked_fill(now, 0) for age, now in zip(self.ages, parts, strict=True)]

    def used_within(self, window: int) -> Tensor:
        """(M,): the share of each stage's codes used in the last `window` steps."""
        return torch.stack([(age < window).double().mean() for age in self.ages])

    def unused_for(self, steps: int) -> list[Tensor]:
        """M masks (K_m,) of the codes that no token has chosen in the last `steps` steps."""
        return [age >= steps for age in self.ages]

    def renew(self, which: Sequence[Tensor]) -> None:
        """Count the marked codes as used now: they have just been given a new place."""
        self.ages = [age.masked_fill(marked, 0) for age, marked in zip(self.ages, which, strict=True)]

    def state(self) -> dict[str, Tensor]:
        """Tensors to save, by name."""
        return {f"stage{m}": age.clone() for m, age in enumerate(self.ages)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        ages = [state.get(f"stage{m}") for m in range(len(self.sizes))]
        shapes = [None if age is None else tuple(age.shape) for age in ages]
        if len(state) != len(self.sizes) or shapes != [(K,) for K in self.sizes]:
            raise UsageError(f"saved code ages {shapes} do not fit codebooks of {list(self.sizes)} codes.")
        self.ages = [age.clone().long() for age in ages if age is not None]


class CollapseWatch:
    """Says so, once, when a codebook collapses while a run trains; again only after it had recovered."""

    def __init__(self, sizes: Sequence[int], *, window: int) -> None:
        self.sizes = tuple(sizes)
        self.window = window  # steps over which usage is counted; before that many it still rises by itself
        self.collapsed, self.dominated = set[int](), set[int]()  # stages that were spoken of

    def look(self, *, step: int, usage: Sequence[float], top: Sequence[float]) -> list[str]:
        """Warnings after `step` steps, from the share of codes in use and the share of the top code of each stage."""
        if step < self.window:
            return []
        found = []
        for m, (K, used, most) in enumerate(zip(self.sizes, usage, top, strict=True)):
            if used < COLLAPSED_USAGE and m not in self.collapsed:
                self.collapsed.add(m)
                found.append(
                    f"stage {m + 1} is collapsing: {100 * used:.0f} % of its {K:,} codes occurred in the last "
                    f"{self.window} steps; after the run `bridle codebooks` says what to try."
                )
            elif used > RECOVERED * COLLAPSED_USAGE:
                self.collapsed.discard(m)
            if is_dominant(most, codes=K) and m not in self.dominated:
                self.dominated.add(m)
                found.append(
                    f"stage {m + 1}: one code takes {100 * most:.0f} % of the tokens, often silence, padding or a flat "
                    "background; check the data, and see `bridle codebooks` after the run."
                )
            elif not is_dominant(RECOVERED * most, codes=K):
                self.dominated.discard(m)
        return found
