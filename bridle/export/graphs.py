"""Encoder and tokenizer as graphs without Python: what `model.encode` and `model.tokenize` do, for any batch.

    encoder     x (B, C, *input), valid (B, T)  ->  features (B, T, D)
    tokenizer   x (B, C, *input), valid (B, T)  ->  codes (B, T, M) int64

x is in the units of the data; (x − mean) / std is part of the graph. `valid` (False on padding) is an input where files
may be shorter than the model's input and the graph uses it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bridle.data.modality import modality_of
from bridle.errors import UsageError
from bridle.export.load import Trained
from bridle.models.encoder import Encoder
from bridle.models.tokenizer import Tokenizer
from bridle.seeding import generator

FEATURES_WITHIN, CODES_EQUAL = 1e-4, 0.999


class Normalised(nn.Module):
    """(x − mean) / std per channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], *, rank: int) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(-1, *(1,) * rank))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class EncoderGraph(nn.Module):
    """Normalisation and encoder."""

    def __init__(self, normalised: Normalised, encoder: Encoder) -> None:
        super().__init__()
        self.normalised, self.encoder = normalised, encoder

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        z: Tensor = self.encoder(self.normalised(x), valid=valid).z
        return z


class TokenizerGraph(nn.Module):
    """Normalisation and tokenizer."""

    def __init__(self, normalised: Normalised, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.normalised, self.tokenizer = normalised, tokenizer

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.tokenizer.tokenize(self.normalised(x), valid=valid)


class Graph(NamedTuple):
    """A network ready to be traced, with the names of what goes in and comes out."""

    name: str  # encoder or tokenizer
    module: nn.Module
    inputs: tuple[str, ...]
    output: str
    shape: tuple[int, ...]  # of one input: (C, *input)
    tokens: int

    def examples(self, batch: int) -> tuple[Tensor, ...]:
        """Random inputs; the last rows of a batch end early where that is possible."""
        draws = generator("graphs", self.name, batch)
        normalised = self.module.normalised
        assert isinstance(normalised, Normalised)
        x = torch.randn(batch, *self.shape, generator=draws) * normalised.std + normalised.mean
        ends = torch.linspace(1.0, 0.5, batch)[:, None] * self.tokens
        return (x, torch.arange(self.tokens) < ends) if "valid" in self.inputs else (x,)

    def agreement(self, mine: Tensor, other: Tensor, batch: int) -> float:
        """Largest difference of features, or share of equal codes, over the tokens that are not padding."""
        inputs = self.examples(batch)
        real = inputs[1] if len(inputs) == 2 else torch.ones(mine.shape[:2], dtype=torch.bool)
        if self.output == "features":
            return float((mine - other).abs()[real].max())
        return float((mine == other)[real].double().mean())

    def check(self, found: dict[int, float]) -> str:
        """One line that says how far a graph agrees with torch, or an error if it does not; `found` by batch."""
        batches = " and ".join(map(str, found))
        if self.output == "features":
            worst = max(found.values())
            if worst > FEATURES_WITHIN:
                raise UsageError(f"the exported {self.name} differs from torch by {worst:.1e}; nothing was exported.")
            return f"features within {worst:.1e} of torch, batches of {batches}"
        worst = min(found.values())
        if worst < CODES_EQUAL:
            raise UsageError(f"only {100 * worst:.2f} % of the exported {self.name}'s codes are torch's; not exported.")
        return f"{100 * worst:g} % of codes equal to torch's, batches of {batches}"


def graphs_of(trained: Trained) -> list[Graph]:
    """The graphs a model has: the encoder's, and the tokenizer's if it has one."""
    config, geometry = trained.config, trained.config.geometry.build()
    if config.data.mean is None or config.data.std is None:
        raise UsageError(f"model {config.name!r} has no normalisation statistics in its config.")
    normalised = Normalised(config.data.mean, config.data.std, rank=geometry.rank)
    padded = ("x", "valid") if modality_of(config).can_be_padded else ("x",)
    shape, tokens = geometry.shape, geometry.tokens
    encoder = EncoderGraph(normalised, trained.encoder).eval()
    found = [Graph("encoder", encoder, padded, "features", shape, tokens)]
    if trained.own_tokenizer is not None:
        inputs = padded if trained.own_tokenizer.sees_padding else ("x",)
        tokenizer = TokenizerGraph(normalised, trained.own_tokenizer).eval()
        found.append(Graph("tokenizer", tokenizer, inputs, "codes", shape, tokens))
    return found
