"""What the quantizer returns: the codes found for some latents, their losses, and their statistics.

Shapes: (…, Dq) latents as given, M stages, K_m codes, k soft codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bridle.errors import UsageError
from bridle.quantize.dimension import SpreadSums
from bridle.quantize.nearest import chunk_rows, chunks, full_precision
from bridle.quantize.rules import enter, stage_inputs
from bridle.quantize.walk import Plan, blend


@dataclass(frozen=True, eq=False)
class Statistics:
    """n and ℓ of EMA 1 for every stage, in float64: sums over micro-batches and ranks do not depend on order."""

    n: tuple[Tensor, ...]  # M tensors (K_m,)
    l_sum: tuple[Tensor, ...]  # M tensors (K_m, D)

    def __add__(self, other: Statistics) -> Statistics:
        if [x.shape for x in self.l_sum] != [x.shape for x in other.l_sum]:
            raise UsageError("statistics of quantizers with different stages, codes or widths cannot be added.")
        return Statistics(
            tuple(a + b for a, b in zip(self.n, other.n, strict=True)),
            tuple(a + b for a, b in zip(self.l_sum, other.l_sum, strict=True)),
        )

    def __radd__(self, other: int) -> Statistics:
        """Lets `sum(list_of_statistics)` start from 0."""
        return self if other == 0 else NotImplemented

    def flatten(self) -> Tensor:
        """All numbers in one float64 vector, for one collective call."""
        return torch.cat([x.reshape(-1) for x in (*self.n, *self.l_sum)])

    def unflatten(self, flat: Tensor) -> Statistics:
        """The statistics of the same shapes whose `flatten` is `flat`."""
        like = (*self.n, *self.l_sum)
        parts = torch.split(flat, [x.numel() for x in like])
        shaped = tuple(part.view(x.shape) for part, x in zip(parts, like, strict=True))
        return Statistics(shaped[: len(self.n)], shaped[len(self.n) :])


@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes and code vectors of some latents; a value that later updates of the codebooks do not change.

    `commitment` is the mean over valid tokens and stages of ‖v_m − sg c_m‖² summed over the width, v_m the stage's own
    input; every stage sends a gradient to the latents. `codebook_term` is the same distance with the gradient to the
    codes instead, and zero under `update="ema"`. Neither contains a weight.
    """

    codes: Tensor  # (…, M) int64, the nearest code of each stage
    q: Tensor  # (…, Dq) float32, no gradient
    straight_through: Tensor  # (…, Dq): value of q, derivative the identity with respect to e₁
    commitment: Tensor  # ()
    codebook_term: Tensor  # ()
    soft_codes: Tensor | None  # (…, M, k), nearest first; None unless soft > 1
    soft_weights: Tensor | None  # (…, M, k), rows sum to 1
    energy: Tensor  # (M + 1,): 1, then Σ‖v_m − c_m‖² / Σ‖v_1‖² over valid tokens for every stage
    _x: Tensor = field(repr=False)  # (S, Dq) as given, with its graph
    _valid: Tensor | None = field(repr=False)  # (S,)
    _plan: Plan = field(repr=False)

    @property
    def commitment_by_stage(self) -> Tensor:
        """(M,) mean over valid tokens of ‖v_m − sg c_m‖²; the mean of its entries is `commitment`."""
        means = []
        with full_precision(self._x.device):
            chosen = self._replay(slice(None))
            for stage, v in enumerate(stage_inputs(self._x, chosen, self._plan.rule, self._plan.stages)):
                means.append(self._mean((v - chosen(stage, v)).square().sum(-1)))
        return torch.stack(means)

    @property
    def commitment_on_sum(self) -> Tensor:
        """The paper's form: mean over valid tokens of ‖e₁ − sg q‖²."""
        with full_precision(self._x.device):
            e = enter(self._x, self._plan.rule, self._plan.stages)
            return self._mean((e - self.q.reshape(e.shape)).square().sum(-1))

    def codebook_distance(self, live: Sequence[Tensor]) -> Tensor:
        """Mean over valid tokens and stages of ‖sg v_m − c_m‖², with a gradient to the `live` codes (K_m, D)."""
        if not torch.is_grad_enabled():
            return self.commitment
        tokens = max(1, len(self._x)) if self._valid is None else self._valid.sum().clamp_min(1)
        with full_precision(self._x.device):
            total = self._soft_distance(live) if self._plan.blends else self._hard_distance(live)
        distance = (total / (tokens * self._plan.stages)).float()
        return distance - distance.detach() + self.commitment.detach()  # the value without the constant left out below

    def _hard_distance(self, live: Sequence[Tensor]) -> Tensor:
        # Σ_j ‖v_j − c‖² = n‖c‖² − 2 c·ℓ + constant: the gradient 2(n c − ℓ) needs no vector per token.
        counted, total = self.statistics(), torch.zeros((), dtype=torch.float64, device=self._x.device)
        for code, n, l_sum in zip(live, counted.n, counted.l_sum, strict=True):
            wide = code.double()
            total = total + (n * wide.square().sum(1)).sum() - 2 * (wide * l_sum).sum()
        return total

    def _soft_distance(self, live: Sequence[Tensor]) -> Tensor:
        chosen, fresh = self._replay(slice(None)), self._replay(slice(None), live)
        total = torch.zeros((), dtype=torch.float64, device=self._x.device)
        for stage, v in enumerate(stage_inputs(self._x.detach(), chosen, self._plan.rule, self._plan.stages)):
            rows = (v - fresh(stage, v)).square().sum(-1)
            total = total + (rows if self._valid is None else torch.where(self._valid, rows, 0.0)).double().sum()
        return total

    @torch.no_grad()
    def statistics(self) -> Statistics:
        """n and ℓ of this batch with the codes of this forward; blended codes count their weights, padding nothing."""
        codes, x = self._plan.codes, self._x.detach()
        # One more row than codes, where padding goes: no value there, finite or not, can reach a sum.
        n = [torch.zeros(len(c) + 1, dtype=torch.float64, device=x.device) for c in codes]
        l_sum = [torch.zeros(len(c) + 1, c.shape[1], dtype=torch.float64, device=x.device) for c in codes]
        counted = [self._counted(stage) for stage in range(len(codes))]
        for stage, pairs in enumerate(counted):
            for index, weight in pairs:
                n[stage].index_add_(0, index, weight)
        with full_precision(x.device):
            for part, inputs in self._stage_inputs_by_chunk(x):
                for stage, v in enumerate(inputs):
                    wide = v.double()
                    for index, weight in counted[stage]:
                        weighted = wide * weight[part, None] if self._plan.blends else wide
                        l_sum[stage].index_add_(0, index[part], weighted)
        return Statistics(tuple(x[:-1].clone() for x in n), tuple(x[:-1].clone() for x in l_sum))

    @torch.no_grad()
    def input_sums(self) -> tuple[SpreadSums, ...]:
        """For each stage the sums from which the spread of its inputs follows; padding does not count."""
        sums: list[SpreadSums] = []
        with full_precision(self._x.device):
            for part, inputs in self._stage_inputs_by_chunk(self._x.detach()):
                kept = slice(None) if self._valid is None else self._valid[part]
                here = [SpreadSums.of(v[kept]) for v in inputs]
                sums = [a + b for a, b in zip(sums, here, strict=True)] if sums else here
        return tuple(sums)

    def _stage_inputs_by_chunk(self, x: Tensor) -> Iterator[tuple[slice, Iterator[Tensor]]]:
        rows = chunk_rows(max(x.shape[1], *(len(c) for c in self._plan.codes)), x.device)
        for part in chunks(len(x), rows):
            yield part, stage_inputs(x[part], self._replay(part), self._plan.rule, self._plan.stages)

    def _counted(self, stage: int) -> list[tuple[Tensor, Tensor]]:
        """(codes (S,), weights (S,)) to count for one stage: one pair, or one for each soft code."""
        if self.soft_codes is None or self.soft_weights is None or not self._plan.blends:
            index = self._flat(self.codes)[:, stage]
            pairs = [(index, torch.ones((), dtype=torch.float64, device=index.device).expand(len(index)))]
        else:
            soft, weights = self._flat(self.soft_codes)[:, stage], self._flat(self.soft_weights)[:, stage]
            pairs = list(zip(soft.unbind(-1), weights.double().unbind(-1), strict=True))
        if self._valid is None:
            return pairs
        bin_of_padding = len(self._plan.codes[stage])
        return [(index.masked_fill(~self._valid, bin_of_padding), weight) for index, weight in pairs]

    def _replay(self, part: slice, codes: Sequence[Tensor] | None = None) -> Callable[[int, Tensor], Tensor]:
        """The code vectors that this forward chose for some rows, stage by stage."""
        vectors = self._plan.codes if codes is None else codes

        def chosen(stage: int, _: Tensor) -> Tensor:
            code = vectors[stage]
            if self.soft_codes is None or self.soft_weights is None or not self._plan.blends:
                return code.index_select(0, self._flat(self.codes)[part, stage])
            soft, weights = self._flat(self.soft_codes)[part, stage], self._flat(self.soft_weights)[part, stage]
            return blend(code, soft, weights)

        return chosen

    def _flat(self, x: Tensor) -> Tensor:
        return x.reshape(len(self._x), *x.shape[self.codes.dim() - 1 :])  # (…, M, …) -> (S, M, …)

    def _mean(self, rows: Tensor) -> Tensor:
        """Mean over valid tokens of one number per row."""
        if self._valid is None:
            return rows.sum() / max(1, len(rows))
        return torch.where(self._valid, rows, 0.0).sum() / self._valid.sum().clamp_min(1)
