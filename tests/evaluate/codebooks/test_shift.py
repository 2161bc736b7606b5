"""Train and test items that use codes differently are told, chance is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bridle.evaluate.codebooks.shift import shift_verdicts


class Batch(NamedTuple):
    x: Tensor
    valid: Tensor | None = None
    label: Tensor | None = None


class ReadOff(nn.Module):
    """The input is the codes (B, T, M)."""

    quantizer = SimpleNamespace(codes=(4, 4))

    def tokenize(self, x: Tensor, *, valid: Tensor | None) -> Tensor:
        return x


def codes(seed: int, first: int) -> Tensor:
    """200 items of 8 tokens; stage 1 takes codes from `first` on, stage 2 all four."""
    source = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(low, 4, (200, 8), generator=source) for low in (first, 0)], dim=-1)


def told(train: Tensor, test: Tensor, valid: Tensor | None = None) -> list[int]:
    tokenizer: Any = ReadOff()
    seen: Any = [Batch(train)]
    held_out: Any = [Batch(test, valid)]
    return [verdict.stage for verdict in shift_verdicts(tokenizer, seen, held_out)]


def test_the_stage_whose_codes_the_test_items_use_differently_is_named() -> None:
    assert told(codes(0, first=0), codes(1, first=2)) == [1]


def test_other_items_of_the_same_kind_are_no_shift() -> None:
    assert told(codes(0, first=0), codes(1, first=0)) == []
    assert told(codes(0, first=0), codes(1, first=0)[:20]) == []


def test_padding_is_not_counted() -> None:
    test, valid = codes(1, first=0), torch.ones(200, 8, dtype=torch.bool)
    test[:, 4:], valid[:, 4:] = 3, False
    assert told(codes(0, first=0), test, valid) == []
    assert told(codes(0, first=0), test) == [1, 2]
