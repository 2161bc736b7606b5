"""Blocks whose queries attend to other tokens and not to each other (CrossMAE, arXiv 2401.14391).

Shapes: x (B, H, D) queries, context (B, V, D), heads of width D/heads, key_valid (B, V) bool.

    x ← x + CrossAttention(norm1(x), context),   x ← x + Mlp(norm2(x))

A query's result does not depend on which other queries there are, and costs the same whatever the grid has beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from bridle.nn.transformer import NORM_EPS, Mlp, check_heads, keys_or_all


class CrossAttention(nn.Module):
    """Multi-head attention of queries over the tokens of a context."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        check_heads(width=width, heads=heads)
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, key_valid: Tensor | None = None) -> Tensor:
        """(B, H, D) and (B, V, D) -> (B, H, D); only tokens that `key_valid` (B, V) marks are attended to."""
        B, H, D = x.shape
        q = self.q(x).reshape(B, H, self.heads, -1).transpose(1, 2)  # (B, H, D) -> (B, heads, H, D/heads)
        kv = self.kv(context).reshape(B, context.shape[1], 2, self.heads, -1)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, V, 2·D) -> 2 × (B, heads, V, D/heads)
        allowed = None if key_valid is None else keys_or_all(key_valid)[:, None, None, :]  # (B, 1, 1, V)
        out = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        mixed: Tensor = self.proj(out.transpose(1, 2).reshape(B, H, D))
        return mixed


class CrossBlock(nn.Module):
    """One pre-norm block of cross-attention and MLP."""

    def __init__(self, *, width: int, heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = CrossAttention(width=width, heads=heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width=width, hidden=int(width * mlp_ratio))

    def forward(self, x: Tensor, context: Tensor, key_valid: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), context, key_valid)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CrossTransformer(nn.Module):
    """`depth` blocks of queries over the same context: (B, H, D) -> (B, H, D), without a final norm."""

    def __init__(
        self, *, width: int, depth: int, heads: int, mlp_ratio: float = 4.0, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CrossBlock(width=width, heads=heads, mlp_ratio=mlp_ratio) for _ in range(depth))
        self.checkpoint_activations = checkpoint_activations

    def forward(self, x: Tensor, context: Tensor, *, key_valid: Tensor | None = None) -> Tensor:
        """The queries x (B, H, D) after every block; `key_valid` (B, V) marks the tokens of the context that count."""
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                # A block draws no random numbers, so there is no generator state to restore.
                x = checkpoint(block, x, context, key_valid, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, context, key_valid)
        return x
