"""Our layers against torch's own with the same weights: convolution, multi-head attention, encoder layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bridle.geometry import Geometry
from bridle.nn.cross import CrossBlock, CrossTransformer
from bridle.nn.patch import PatchEmbed
from bridle.nn.transformer import Attention, Block, Transformer, initialise

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def jitter(module: nn.Module) -> None:
    """Random values everywhere, so that no bias or norm weight hides behind 0 or 1."""
    generator = seeded(9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@pytest.mark.parametrize(
    ("conv", "geometry"),
    [
        (nn.Conv1d, Geometry(3, (24,), (4,))),
        (nn.Conv2d, Geometry(3, (12, 10), (4, 2))),
        (nn.Conv3d, Geometry(2, (4, 9, 10), (2, 3, 5))),
    ],
)
def test_patch_embedding_equals_a_convolution(conv: type[nn.Conv2d], geometry: Geometry) -> None:
    embed = PatchEmbed(geometry=geometry, width=6).double()
    jitter(embed)
    other = conv(geometry.channels, 6, kernel_size=geometry.patch, stride=geometry.patch).double()
    with torch.no_grad():
        other.weight.copy_(embed.proj.weight.reshape(other.weight.shape))
        other.bias.copy_(embed.proj.bias)
    x = torch.randn(2, *geometry.shape, generator=seeded(), dtype=torch.float64)
    expected = other(x).flatten(2).transpose(1, 2)  # (B, D, *grid) -> (B, T, D)
    torch.testing.assert_close(embed(x), expected, atol=1e-12, rtol=1e-12)


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.proj.weight)
        theirs.out_proj.bias.copy_(ours.proj.bias)


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_equals_multihead_attention(heads: int, padded: bool) -> None:
    ours = Attention(width=12, heads=heads).double()
    jitter(ours)
    theirs = nn.MultiheadAttention(12, heads, batch_first=True).double()
    copy_attention(ours, theirs)
    x = torch.randn(3, 7, 12, generator=seeded(), dtype=torch.float64)
    valid = None
    if padded:
        valid = torch.ones(3, 7, dtype=torch.bool)
        valid[1, 4:] = False
        valid[2, :3] = False
    ignored = None if valid is None else ~valid
    expected = theirs(x, x, x, key_padding_mask=ignored, need_weights=False)[0]
    torch.testing.assert_close(ours(x, valid), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_a_block_equals_torchs_prenorm_encoder_layer(padded: bool) -> None:
    ours = Block(width=8, heads=2).double()
    jitter(ours)
    theirs = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    ).double()
    copy_attention(ours.attn, theirs.self_attn)
    pairs = [(ours.norm1, theirs.norm1), (ours.norm2, theirs.norm2)]
    pairs += [(ours.mlp.fc1, theirs.linear1), (ours.mlp.fc2, theirs.linear2)]
    for mine, other in pairs:
        other.load_state_dict(mine.state_dict())
    x = torch.randn(2, 5, 8, generator=seeded(), dtype=torch.float64)
    valid = torch.tensor([[True] * 5, [True, True, False, True, False]]) if padded else None
    expected = theirs(x, src_key_padding_mask=None if valid is None else ~valid)
    torch.testing.assert_close(ours(x, key_valid=valid), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
def test_cross_blocks_equal_torchs_decoder_layer_without_self_attention(padded: bool) -> None:
    ours = CrossTransformer(width=12, depth=2, heads=3, mlp_ratio=2.0).double()
    jitter(ours)
    x, context = (torch.randn(2, n, 12, generator=seeded(n), dtype=torch.float64) for n in (5, 7))
    key_valid = torch.arange(7) < torch.tensor([[7], [4]]) if padded else None
    expected = x
    for block in ours.blocks:
        assert isinstance(block, CrossBlock)
        attention = nn.MultiheadAttention(12, 3, batch_first=True).double()
        kv = block.attn.kv
        with torch.no_grad():
            attention.in_proj_weight.copy_(torch.cat([block.attn.q.weight, kv.weight]))
            attention.in_proj_bias.copy_(torch.cat([block.attn.q.bias, kv.bias]))
            attention.out_proj.load_state_dict(block.attn.proj.state_dict())
        asked = attention(
            block.norm1(expected), context, context, key_padding_mask=None if key_valid is None else ~key_valid
        )[0]
        expected = expected + asked
        expected = expected + block.mlp.fc2(nn.functional.gelu(block.mlp.fc1(block.norm2(expected))))
    found = ours(x, context, key_valid=key_valid)
    torch.testing.assert_close(found, expected)
    again = CrossTransformer(width=12, depth=2, heads=3, mlp_ratio=2.0, checkpoint_activations=True).double()
    again.load_state_dict(ours.state_dict())
    torch.testing.assert_close(again(x, context, key_valid=key_valid), expected)


def test_a_query_does_not_depend_on_the_other_queries_and_padding_is_nobodys_key() -> None:
    blocks = CrossTransformer(width=8, depth=2, heads=2).double()
    jitter(blocks)
    x, context = (torch.randn(2, n, 8, generator=seeded(n), dtype=torch.float64) for n in (5, 6))
    key_valid = torch.tensor([[True] * 6, [True, True, False, True, False, False]])
    found = blocks(x, context, key_valid=key_valid)
    torch.testing.assert_close(blocks(x[:, [3, 1]], context, key_valid=key_valid), found[:, [3, 1]])
    spoilt = torch.where(key_valid[..., None], context, 1e3)
    torch.testing.assert_close(blocks(x, spoilt, key_valid=key_valid), found)
    assert blocks(x, context, key_valid=torch.zeros_like(key_valid)).isfinite().all()


def test_gradients_equal_finite_differences() -> None:
    net = Transformer(width=4, depth=2, heads=2).double()
    initialise(net, generator=seeded())
    valid = torch.tensor([[True, True, False], [True, True, True]])
    drop = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[0.0, 2.0], [2.0, 0.0]]], dtype=torch.float64)
    x = torch.randn(2, 3, 4, generator=seeded(), dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return net(x, key_valid=valid, drop=drop)[valid]

    assert torch.autograd.gradcheck(run, (x,))
