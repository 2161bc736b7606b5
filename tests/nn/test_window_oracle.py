"""Window attention against full attention under an explicit (T, T) matrix built with loops, in float64."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridle.nn.transformer import Block, Transformer, initialise
from bridle.nn.window import WindowTransformer

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def interval(position: int, n: int, window: int, shifted: bool) -> int:
    """Which of the intervals between cuts a position falls into; cuts at s, s + w, s + 2w, ..."""
    shift = window // 2 if shifted and window < n else 0
    cuts = range(shift, 2 * n + window, window)
    return sum(1 for cut in cuts if cut <= position)


def may_attend(grid: tuple[int, ...], window: tuple[int, ...], shifted: bool) -> Tensor:
    places = list(itertools.product(*(range(n) for n in grid)))
    allowed = torch.zeros(len(places), len(places), dtype=torch.bool)
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            allowed[i, j] = all(
                interval(p, n, w, shifted) == interval(q, n, w, shifted)
                for p, q, n, w in zip(a, b, grid, window, strict=True)
            )
    return allowed


def block_by_hand(block: Block, x: Tensor, allowed: Tensor) -> Tensor:
    """One pre-norm block with attention written out; allowed (B, T, T)."""
    D, H = x.shape[-1], block.attn.heads
    q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
    heads = []
    for h in range(H):
        part = slice(h * D // H, (h + 1) * D // H)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / (D // H) ** 0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        heads.append(weights @ v[..., part])
    x = x + block.attn.proj(torch.cat(heads, dim=-1))
    return x + block.mlp(block.norm2(x))


def network(grid: tuple[int, ...], window: tuple[int, ...], depth: int = 3) -> WindowTransformer:
    net = WindowTransformer(width=8, depth=depth, heads=2, grid=grid, window=window).double()
    initialise(net, generator=seeded())
    return net


def assert_equal_to_full_attention(
    grid: tuple[int, ...], window: tuple[int, ...], valid: Tensor | None, seed: int = 0
) -> None:
    net = network(grid, window)
    x = torch.randn(2, prod(grid), 8, generator=seeded(seed), dtype=torch.float64)
    expected = x
    for i, block in enumerate(net.blocks):
        allowed = may_attend(grid, window, shifted=i % 2 == 1).expand(2, -1, -1)
        if valid is not None:
            allowed = (allowed & valid[:, None, :]) | torch.eye(prod(grid), dtype=torch.bool)
        expected = block_by_hand(block, expected, allowed)
    torch.testing.assert_close(net(x, key_valid=valid), expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("grid", "window"),
    [
        ((11,), (4,)),
        ((13,), (7,)),
        ((12,), (4,)),
        ((13, 5), (7, 5)),
        ((14, 14), (7, 7)),
        ((16, 8), (8, 8)),
        ((9, 11), (7, 7)),
        ((5, 4, 3), (2, 3, 2)),
        ((7, 7, 7), (4, 4, 4)),
        ((4, 2, 6), (2, 2, 3)),
    ],
)
def test_windows_equal_full_attention_under_an_explicit_matrix(
    grid: tuple[int, ...], window: tuple[int, ...], padded: bool
) -> None:
    valid = torch.rand(2, prod(grid), generator=seeded(3)) > 0.3 if padded else None
    assert_equal_to_full_attention(grid, window, valid)


@settings(max_examples=25, deadline=None)
@given(
    axes=st.lists(
        st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=2
    ),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_windows_of_any_size_equal_full_attention(axes: list[tuple[int, int]], padded: bool, seed: int) -> None:
    grid, window = tuple(n for n, _ in axes), tuple(w for _, w in axes)
    valid = torch.rand(2, prod(grid), generator=seeded(seed)) > 0.5 if padded else None
    assert_equal_to_full_attention(grid, window, valid, seed)


@pytest.mark.parametrize("grid", [(8,), (7, 5), (8, 8), (4, 3, 6)])
@pytest.mark.parametrize("padded", [False, True])
def test_one_window_over_the_whole_grid_is_global_attention(grid: tuple[int, ...], padded: bool) -> None:
    net = network(grid, grid)
    plain = Transformer(width=8, depth=3, heads=2).double()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(2, prod(grid), 8, generator=seeded(), dtype=torch.float64)
    valid = torch.rand(2, prod(grid), generator=seeded(3)) > 0.3
    if not padded:
        valid[:] = True
    out, expected = net(x, key_valid=valid if padded else None), plain(x, key_valid=valid if padded else None)
    torch.testing.assert_close(out[valid], expected[valid], atol=1e-12, rtol=1e-12)


def test_gradients_equal_finite_differences_on_a_padded_grid() -> None:
    net = network((5,), (4,), depth=2)
    valid = torch.tensor([[True, True, False, True, True]])
    x = torch.randn(1, 5, 8, generator=seeded(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: net(x, key_valid=valid)[valid], (x,))
