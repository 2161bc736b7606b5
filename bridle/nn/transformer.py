"""Pre-norm transformer blocks in plain torch.

Shapes: x (B, T, D), heads H of width D/H, key_valid (B, T) bool, drop (depth, 2, B).

    x ← x + s_1 · Attention(norm1(x)),   x ← x + s_2 · Mlp(norm2(x)),

where s_1, s_2 are drop-path multipliers per sample, drawn by the caller (`drop_path_scales`): 0 drops the branch,
1/(1 − p) keeps its mean. There is no final norm here; the network that owns the blocks has it. Parameter names are
those of common ViT checkpoints (norm1, attn.qkv, attn.proj, norm2, mlp.fc1, mlp.fc2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from bridle.errors import ConfigError, UsageError

NORM_EPS = 1e-6  # the value of the published ViT weights; torch's default of 1e-5 would not reproduce them


def check_heads(*, width: int, heads: int) -> None:
    """ConfigError unless the heads divide the width."""
    if heads < 1 or width % heads:
        raise ConfigError(f"heads {heads} does not divide width {width}; choose a number of heads that does.")


class Attention(nn.Module):
    """Multi-head self-attention through torch's fused kernel."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        check_heads(width=width, heads=heads)
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, key_valid: Tensor | None = None, *, allowed: Tensor | None = None) -> Tensor:
        """Attend over the keys that `key_valid` (B, T) marks, or over the pairs that `allowed` marks.

        `allowed` is (B, 1, T, T), query by key, complete in itself: no row of it may be empty.
        """
        B, T, D = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, T, 3·D) -> 3 × (B, H, T, D/H)
        if key_valid is not None:
            allowed = keys_or_all(key_valid)[:, None, None, :]  # (B, 1, 1, T)
        out = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        out = out.transpose(1, 2).reshape(B, T, D)  # (B, H, T, D/H) -> (B, T, D)
        mixed: Tensor = self.proj(out)
        return mixed


def keys_or_all(key_valid: Tensor) -> Tensor:
    """The valid keys of each sample, or all of them where none is valid: a softmax over nothing is not a number."""
    return key_valid | ~key_valid.any(dim=-1, keepdim=True)


class Mlp(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, *, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """One pre-norm block; `attend` says who attends to whom."""

    def __init__(self, *, width: int, heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width=width, heads=heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width=width, hidden=int(width * mlp_ratio))

    def attend(self, x: Tensor, key_valid: Tensor | None) -> Tensor:
        out: Tensor = self.attn(x, key_valid)
        return out

    def forward(
        self, x: Tensor, *, key_valid: Tensor | None = None, drop: Tensor | None = None, only: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D), or (B, H, D) of the tokens `only` (B, H), which is all that is computed then."""
        attended = self.attend(self.norm1(x), key_valid)
        x = x + (attended if drop is None else scale_samples(attended, drop[0]))
        if only is not None:
            x = x.gather(1, only[..., None].expand(-1, -1, x.shape[-1]))  # (B, T, D) -> (B, H, D)
        changed = self.mlp(self.norm2(x))
        return x + (changed if drop is None else scale_samples(changed, drop[1]))


def scale_samples(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply sample b of x (B, T, D) by scale[b], in x's own precision."""
    return x * scale.to(x.dtype)[:, None, None]


class BlockStack(nn.Module):
    """Blocks one after the other, optionally recomputing their activations in the backward pass."""

    def __init__(self, blocks: Iterable[Block], *, checkpoint_activations: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.depth = len(self.blocks)
        self.checkpoint_activations = checkpoint_activations

    def forward(
        self, x: Tensor, *, key_valid: Tensor | None = None, drop: Tensor | None = None, only: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D), or (B, H, D) of the tokens `only` (B, H): all others end with the last attention."""
        if drop is not None and tuple(drop.shape) != (self.depth, 2, x.shape[0]):
            raise UsageError(
                f"drop-path scales have shape {tuple(drop.shape)}; expected {(self.depth, 2, x.shape[0])}, "
                "that is (depth, 2, B)."
            )
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            scales = None if drop is None else drop[i]  # (2, B)
            wanted = only if i == self.depth - 1 else None
            if recompute:
                # A block draws no random numbers, so there is no generator state to restore.
                x = checkpoint(
                    block, x, key_valid=key_valid, drop=scales, only=wanted,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                x = block(x, key_valid=key_valid, drop=scales, only=wanted)
        return x


class Transformer(BlockStack):
    """`depth` blocks of global attention: (B, T, D) -> (B, T, D), without a final norm."""

    def __init__(
        self, *, width: int, depth: int, heads: int, mlp_ratio: float = 4.0, checkpoint_activations: bool = False
    ) -> None:
        blocks = [Block(width=width, heads=heads, mlp_ratio=mlp_ratio) for _ in range(depth)]
        super().__init__(blocks, checkpoint_activations=checkpoint_activations)

    def outputs(self, x: Tensor, *, key_valid: Tensor | None = None) -> Iterator[Tensor]:
        """What each block puts out, one after the other; the last is what `forward` gives."""
        for block in self.blocks:
            x = block(x, key_valid=key_valid)
            yield x


def drop_path_scales(
    *, depth: int, rate: float, batch: int, generator: torch.Generator, device: torch.device | str
) -> Tensor | None:
    """Multipliers (depth, 2, batch) for the branches of each block, or None where nothing is dropped.

    Block l of depth L drops a branch with p_l = rate·l/(L − 1), l = 0 ... L − 1. An entry is 0 with probability p_l,
    otherwise 1/(1 − p_l).
    """
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"drop-path rate is {rate}; expected at least 0 and below 1.")
    if rate == 0.0:
        return None
    device_drawn = generator.device
    p = torch.linspace(0.0, rate, depth, device=device_drawn)[:, None, None]  # (depth, 1, 1)
    kept = torch.rand(depth, 2, batch, generator=generator, device=device_drawn) >= p
    return (kept / (1.0 - p)).to(device)


@torch.no_grad()
def initialise(module: nn.Module, *, generator: torch.Generator) -> None:
    """Give every linear layer and layer norm below `module` its starting values, the same for the same generator.

    As in MAE: linear weights Xavier-uniform, U(−a, a) with a = √(6/(fan_in + fan_out)); biases 0; norms 1 and 0.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            draw_xavier(part.weight, generator)
            if part.bias is not None:
                part.bias.zero_()
        elif isinstance(part, nn.LayerNorm) and part.elementwise_affine:
            part.weight.fill_(1.0)
            if part.bias is not None:
                part.bias.zero_()


def draw_xavier(weight: Tensor, generator: torch.Generator) -> None:
    """Fill weight (out, in). Drawn in float32 where the generator lives, so device and dtype do not change the draw."""
    if weight.is_meta:
        return
    bound = sqrt(6.0 / sum(weight.shape))
    drawn = torch.empty(weight.shape, dtype=torch.float32, device=generator.device)
    weight.copy_(drawn.uniform_(-bound, bound, generator=generator))
