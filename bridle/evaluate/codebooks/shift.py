"""Do test items use other codes than train items? Then scores on them measure that difference too.

The distance of two usages p, q of a codebook is the total variation ½ Σ|p − q|, 0 to 1. What chance makes of it is told
by two halves of the train items, item by item, because the tokens of an item resemble each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bridle.data.loading.loader import Batch
from bridle.evaluate.codebooks.health import evaluating
from bridle.models.tokenizer import Tokenizer
from bridle.runs.results import Verdict

NOTABLE = 0.1  # distance beyond that of the halves from which on it is told


def shift_verdicts(tokenizer: Tokenizer, train: Iterable[Batch], test: Iterable[Batch]) -> list[Verdict]:
    """A warning for every codebook that train and test items use differently."""
    found = []
    seen, held_out = count_codes(tokenizer, train), count_codes(tokenizer, test)
    for stage, (halves, other) in enumerate(zip(seen, held_out, strict=True), start=1):
        chance, distance = total_variation(halves[0], halves[1]), total_variation(halves.sum(0), other.sum(0))
        if distance > 1.5 * chance + NOTABLE:
            text = (
                f"test items use other codes than train items: {100 * distance:.0f} % of their usage differs (halves "
                f"of train: {100 * chance:.0f} %); the splits come from different recordings, devices or classes."
            )
            found.append(Verdict(stage=stage, level="warn", text=text))
    return found


def count_codes(tokenizer: Tokenizer, batches: Iterable[Batch]) -> list[Tensor]:
    """For each codebook, how often each code occurs in every other item and in those between: (2, K)."""
    counts = [torch.zeros(2, size, dtype=torch.float64) for size in tokenizer.quantizer.codes]
    with evaluating(tokenizer), torch.no_grad():
        for batch in batches:
            codes = tokenizer.tokenize(batch.x, valid=batch.valid).cpu()  # (B, T, M)
            real = torch.ones(codes.shape[:2], dtype=torch.bool) if batch.valid is None else batch.valid.cpu()
            for half in (0, 1):
                chosen = codes[half::2][real[half::2]]  # (S, M)
                for stage, count in enumerate(counts):
                    count[half] += torch.bincount(chosen[:, stage], minlength=count.shape[1])
    return counts


def total_variation(p: Tensor, q: Tensor) -> float:
    """½ Σ|p − q| of two counts (K,)."""
    return float((p / p.sum().clamp(min=1) - q / q.sum().clamp(min=1)).abs().sum() / 2)
