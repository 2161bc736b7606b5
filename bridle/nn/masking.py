"""Which tokens a network sees and which it has to predict.

Shapes: B samples of T tokens on a grid, V visible slots; visible (B, V), masked (B, T), valid (B, T).

    V = max(1, round((1 − ρ)·T))        ties to the even number, in double precision, as Python's `round`

`random` shows V of all T tokens; `axes` keeps V_a of the n_a positions of each axis and shows their product; `tube`
shows V of the positions over the last axes, the same ones at every position of the first.

With padding, V stays what T asks for, so that shapes do not depend on data. `random` shows sample i
max(1, round((1 − ρ)·T_i)) of its T_i valid tokens; `axes` and `tube` show what they would show without padding, less
the padding, but at least one valid token. The slots left over are spare: they point at padding and are flagged False.

Of a sample's H_i hidden tokens max(1, round(s·H_i)) are predicted, s the share to predict; all of them with s = 1.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bridle.errors import ConfigError, UsageError


class Mask(NamedTuple):
    """Shown and hidden tokens of a batch."""

    visible: Tensor  # (B, V) int64, token indices in ascending order, no index twice
    visible_valid: Tensor | None  # (B, V) bool, False for spare slots; None where there are none
    masked: Tensor  # (B, T) bool, the tokens to predict; never padding

    def rows(self, start: int, stop: int) -> Mask:
        """The samples from `start` up to `stop`, for one micro-batch."""
        spare = self.visible_valid
        return Mask(self.visible[start:stop], None if spare is None else spare[start:stop], self.masked[start:stop])


def visible_count(tokens: int, ratio: float) -> int:
    """max(1, round((1 − ratio)·tokens)), ties to the even number."""
    return max(1, round((1.0 - ratio) * tokens))


def predicted_count(hidden: int, share: float) -> int:
    """max(1, round(share·hidden)), ties to the even number."""
    return max(1, round(share * hidden))


def draw_mask(
    kind: Literal["random", "axes", "tube"],
    *,
    grid: tuple[int, ...],
    ratio: float | tuple[float, ...],
    batch: int,
    generator: torch.Generator,
    device: torch.device | str,
    valid: Tensor | None = None,
) -> Mask:
    """Draw the mask of a whole batch; `valid` (B, T) marks the tokens that are not padding.

    `ratio` is the masked share, for `axes` one number or one per axis (0 leaves an axis alone). A sample without any
    valid token shows one padding token and has nothing to predict.
    """
    ratios = axis_ratios(kind, ratio, grid)
    tokens = prod(grid)
    if valid is not None and tuple(valid.shape) != (batch, tokens):
        raise UsageError(f"valid has shape {tuple(valid.shape)}; expected {(batch, tokens)} for grid {list(grid)}.")
    draw = Uniform(generator, device)
    if kind == "random":
        V = visible_count(tokens, ratios[0])
        shown = show_random(draw(batch, tokens), ratios[0], valid)
    else:
        if kind == "axes":
            V = prod(visible_count(n, r) for n, r in zip(grid, ratios, strict=True))
            shown = show_axes(draw, batch, grid, ratios)
        else:
            space = prod(grid[1:])
            V = grid[0] * visible_count(space, ratios[0])
            shown = show_random(draw(batch, space), ratios[0], None).repeat(1, grid[0])
        if valid is not None:
            # Drawn last, so that padding elsewhere in the batch does not change what is shown.
            shown = show_some(shown & valid, valid, draw(batch, tokens))
    return list_slots(shown, valid, V)


def axis_ratios(kind: str, ratio: float | tuple[float, ...], grid: tuple[int, ...]) -> tuple[float, ...]:
    """One ratio per axis for `axes`, else a single one; refused where they make no sense."""
    if kind not in ("random", "axes", "tube"):
        raise ConfigError(f"mask kind is {kind!r}; expected 'random', 'axes' or 'tube'.")
    if kind == "tube" and len(grid) < 2:
        raise ConfigError(f"a tube mask needs a grid of at least two axes, got {list(grid)}; use 'random'.")
    if not isinstance(ratio, tuple):
        ratio = (ratio,) * (len(grid) if kind == "axes" else 1)
    elif kind != "axes":
        raise ConfigError(f"a {kind} mask takes one ratio, got {list(ratio)}; only 'axes' takes one per axis.")
    if kind == "axes" and len(ratio) != len(grid):
        raise ConfigError(f"mask ratios {list(ratio)} do not match grid {list(grid)}; expected one per axis.")
    if not all(0.0 <= r <= 1.0 for r in ratio):
        raise ConfigError(f"mask ratio is {list(ratio)}; expected numbers from 0 to 1.")
    return ratio


class Uniform(NamedTuple):
    """Uniform numbers from one generator, on one device."""

    generator: torch.Generator
    device: torch.device | str

    def __call__(self, *shape: int) -> Tensor:
        # Drawn where the generator lives: a CPU generator then gives the same masks on every device.
        return torch.rand(shape, generator=self.generator, device=self.generator.device).to(self.device)


def show_random(noise: Tensor, ratio: float, valid: Tensor | None) -> Tensor:
    """Show the tokens with the least noise: exactly the visible count of each sample's (valid) tokens. (B, T) bool."""
    if valid is None:
        return least_noise(noise, visible_count(noise.shape[1], ratio))
    return least_noise(noise.masked_fill(~valid, 2.0), share_of(valid, 1.0 - ratio))  # padding behind all others


def choose_predicted(masked: Tensor, share: float, noise: Tensor) -> Tensor:
    """Of the hidden tokens of each sample (masked, (B, T)) exactly the predicted count, at random. (B, T) bool."""
    return masked & least_noise(noise.masked_fill(~masked, 2.0), share_of(masked, share))


def share_of(marked: Tensor, share: float) -> Tensor:
    """max(1, round(share·n)) of the n marked tokens of each sample, in the arithmetic of Python's `round`: (B, 1)."""
    return (share * marked.sum(dim=1, keepdim=True).double()).round().clamp(min=1.0)


def least_noise(noise: Tensor, count: Tensor | int) -> Tensor:
    """The `count` tokens of each sample with the least noise. (B, T) bool."""
    # Two sorts turn noise into ranks; stable, so that equal numbers cannot make two devices or runs differ.
    rank = noise.argsort(dim=1, stable=True).argsort(dim=1)
    return rank < count


def show_axes(draw: Uniform, batch: int, grid: tuple[int, ...], ratios: tuple[float, ...]) -> Tensor:
    """Show the product of the positions kept on each axis. (B, T) bool."""
    shown = torch.ones((batch, *[1] * len(grid)), dtype=torch.bool, device=draw.device)
    for axis, (n, ratio) in enumerate(zip(grid, ratios, strict=True)):
        kept = show_random(draw(batch, n), ratio, None)  # (B, n)
        shown = shown & kept.reshape(batch, *(n if k == axis else 1 for k in range(len(grid))))
    return shown.reshape(batch, -1)


def show_some(shown: Tensor, valid: Tensor, noise: Tensor) -> Tensor:
    """Show one (valid) token at random in samples that show none."""
    one = show_random(noise, 1.0, valid)
    return shown | (one & ~shown.any(dim=1, keepdim=True))


def list_slots(shown: Tensor, valid: Tensor | None, V: int) -> Mask:
    """Write the shown tokens into V slots per sample; slots left over take padding, so that no index comes twice."""
    order = (~shown).to(torch.int8)  # shown 0, hidden 1
    if valid is not None:
        order = order + (~shown & valid)  # shown 0, padding 1, hidden 2
    visible = order.argsort(dim=1, stable=True)[:, :V].sort(dim=1).values  # (B, V)
    if valid is None:
        return Mask(visible, None, ~shown)
    return Mask(visible, shown.gather(1, visible), ~shown & valid)


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of x (B, T, D) at index (B, V): (B, V, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def scatter_tokens(
    x_visible: Tensor, index: Tensor, fill: Tensor, *, tokens: int, slot_valid: Tensor | None = None
) -> Tensor:
    """Put x_visible (B, V, D) back at index (B, V) among `tokens` positions; all others hold fill (D,): (B, T, D).

    Slots that slot_valid (B, V) flags False are spare and go nowhere.
    """
    B, _, D = x_visible.shape
    rows = tokens
    if slot_valid is not None:
        rows = tokens + 1  # one row more, to be cut off, takes what spare slots hold
        index = index.masked_fill(~slot_valid, tokens)
    canvas = fill.to(x_visible.dtype).expand(B, rows, D)
    return canvas.scatter(1, index[..., None].expand(-1, -1, D), x_visible)[:, :tokens]
