"""Weights named as MAE, AudioMAE and VideoMAE name them, against those models written down from their equations.

MAE: class token, sin-cos positions stored with it, patches of pictures. AudioMAE: the same with one channel on a
(time, frequency) grid. VideoMAE: tubelets, no class token, biases of q and v apart, positions by token number and not
stored. Fine-tuned ones that pool by mean have fc_norm in place of norm.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, conv3d, gelu, layer_norm, linear, softmax

import bridle
from bridle.errors import ConfigError, UsageError
from bridle.export.vit_import import import_vit
from bridle.geometry import Geometry
from bridle.models.encoder import Encoder
from bridle.models.vit_weights import grid_of, load_vit, vit_shape

D, DEPTH, HEADS = 16, 2, 2
Weights = dict[str, Tensor]


def draw(*shape: int, seed: int = 0, scale: float = 0.2) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def blocks(*, apart: bool) -> Weights:
    found: Weights = {}
    for i in range(DEPTH):
        sizes = {"attn.proj": (D, D), "mlp.fc1": (4 * D, D), "mlp.fc2": (D, 4 * D)}
        for name, shape in sizes.items():
            found[f"blocks.{i}.{name}.weight"] = draw(*shape, seed=i)
            found[f"blocks.{i}.{name}.bias"] = draw(shape[0], seed=i)
        found[f"blocks.{i}.attn.qkv.weight"] = draw(3 * D, D, seed=i)
        if apart:
            found |= {f"blocks.{i}.attn.{name}_bias": draw(D, seed=i + ord(name)) for name in "qv"}
        else:
            found[f"blocks.{i}.attn.qkv.bias"] = draw(3 * D, seed=i)
        for name in ("norm1", "norm2"):
            found[f"blocks.{i}.{name}.weight"] = 1 + draw(D, seed=i)
            found[f"blocks.{i}.{name}.bias"] = draw(D, seed=i + 9)
    return found


def masked_autoencoder(*, channels: int, patch: int, grid: tuple[int, int]) -> Weights:
    """The file of a pretrained MAE or AudioMAE, its decoder included."""
    return {
        "cls_token": draw(1, 1, D),
        "pos_embed": draw(1, 1 + math.prod(grid), D),
        "patch_embed.proj.weight": draw(D, channels, patch, patch),
        "patch_embed.proj.bias": draw(D),
        "norm.weight": 1 + draw(D),
        "norm.bias": draw(D, seed=3),
        "mask_token": draw(1, 1, 8),
        "decoder_blocks.0.norm1.weight": draw(8),
        "decoder_embed.weight": draw(8, D),
        **blocks(apart=False),
    }


def tubelet_autoencoder() -> Weights:
    """The encoder of a VideoMAE file: tubelets of 2×4×4."""
    return {
        "patch_embed.proj.weight": draw(D, 3, 2, 4, 4),
        "patch_embed.proj.bias": draw(D),
        "norm.weight": 1 + draw(D),
        "norm.bias": draw(D, seed=3),
        **blocks(apart=True),
    }


def through_blocks(w: Weights, z: Tensor) -> Tensor:
    """Pre-norm blocks in float64, one head after the other."""
    for i in range(DEPTH):
        at = f"blocks.{i}."

        def dense(x: Tensor, name: str, at: str = at) -> Tensor:
            return linear(x, w[f"{at}{name}.weight"], w[f"{at}{name}.bias"])

        def norm(x: Tensor, name: str, at: str = at) -> Tensor:
            return layer_norm(x, (D,), w[f"{at}{name}.weight"], w[f"{at}{name}.bias"], eps=1e-6)

        bias = w.get(f"{at}attn.qkv.bias")
        if bias is None:
            q, v = w[f"{at}attn.q_bias"], w[f"{at}attn.v_bias"]
            bias = torch.cat((q, torch.zeros_like(v), v))
        q, k, v = linear(norm(z, "norm1"), w[f"{at}attn.qkv.weight"], bias).chunk(3, -1)
        width = D // HEADS
        heads = [slice(h * width, (h + 1) * width) for h in range(HEADS)]
        mixed = [softmax(q[..., h] @ k[..., h].transpose(1, 2) / width**0.5, -1) @ v[..., h] for h in heads]
        z = z + dense(torch.cat(mixed, -1), "attn.proj")
        z = z + dense(gelu(dense(norm(z, "norm2"), "mlp.fc1")), "mlp.fc2")
    return z


def oracle(weights: Weights, x: Tensor) -> Tensor:
    """Features of the patches (B, T, D), after the final norm."""
    w = {name: value.double() for name, value in weights.items()}
    kernel, bias = w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]
    convolve = conv2d if kernel.dim() == 4 else conv3d
    z = convolve(x.double(), kernel, bias, stride=tuple(kernel.shape[2:])).flatten(2).transpose(1, 2)
    if "cls_token" in w:
        z = torch.cat([w["cls_token"].expand(len(x), -1, -1), z], 1) + w["pos_embed"]
    else:
        table = np.array([[p / 10000 ** (2 * (j // 2) / D) for j in range(D)] for p in range(z.shape[1])])
        table[:, 0::2], table[:, 1::2] = np.sin(table[:, 0::2]), np.cos(table[:, 1::2])
        z = z + torch.from_numpy(table)
    z = layer_norm(through_blocks(w, z), (D,), w["norm.weight"], w["norm.bias"], eps=1e-6)
    return z[:, 1:] if "cls_token" in w else z


def stored(tmp_path: Path, w: Weights) -> Path:
    save_file(w, tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


CASES = {
    "MAE": (masked_autoencoder(channels=3, patch=4, grid=(3, 3)), (3, 12, 12), "image"),
    "AudioMAE": (masked_autoencoder(channels=1, patch=16, grid=(4, 8)), (1, 64, 128), "audio"),
    "VideoMAE": (tubelet_autoencoder(), (3, 16, 12, 12), "video"),
}


@pytest.mark.parametrize("kind", list(CASES))
@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_an_imported_encoder_gives_the_features_of_its_model(tmp_path: Path, kind: str, prefix: str) -> None:
    w, shape, recipe = CASES[kind]
    path = stored(tmp_path, {prefix + name: value for name, value in w.items()})
    extra = ["geometry.input=[16, 12, 12]"] if kind == "VideoMAE" else []  # its positions are not stored
    found = import_vit(path, tmp_path / "e", overrides=[f"encoder.heads={HEADS}", *extra])
    assert found.recipe == recipe
    assert found.trained.config.geometry.build().shape == shape
    model = bridle.load(tmp_path / "e")
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    mean, std = (moment.view(-1, *(1,) * (len(shape) - 1)) for moment in (model.mean, model.std))
    assert torch.allclose(model.encode(x).double(), oracle(w, (x - mean) / std), atol=1e-5)
    with pytest.raises(UsageError, match="has no tokenizer, so it gives no codes"):
        model.tokenize(x)
    assert not any("not in the file" in line for line in found.lines)


def test_an_import_embeds_files_and_says_what_it_left(tmp_path: Path) -> None:
    w = {**CASES["MAE"][0], "fc_norm.weight": 2 + draw(D), "fc_norm.bias": draw(D)}
    del w["norm.weight"], w["norm.bias"]
    found = import_vit(stored(tmp_path, w), tmp_path / "e", overrides=["encoder.heads=2"], data_licence="CC0")
    said = "\n".join(found.lines)
    assert "its fc_norm came after pooling" in said
    assert "not used: decoder_blocks.0.norm1.weight, decoder_embed.weight, mask_token" in said
    assert "(encoder.heads=N if not so)" in said
    Image.fromarray(np.full((20, 30, 3), 99, np.uint8)).save(tmp_path / "a.png")
    model = bridle.load(tmp_path / "e")
    assert model.encode_file(tmp_path / "a.png").z.shape == (9, D)
    assert torch.equal(model.encoder.norm.weight, w["fc_norm.weight"])
    assert "licence of the data: CC0" in (tmp_path / "e" / "README.md").read_text()
    with pytest.raises(UsageError, match="is an export of bridle already"):
        import_vit(tmp_path / "e", tmp_path / "again")


def test_tubelets_serve_pictures_and_other_sizes(tmp_path: Path) -> None:
    path, still = stored(tmp_path, tubelet_autoencoder()), torch.rand(1, 3, 8, 8)
    made = {}
    for shape, patch in (((4, 8, 8), (2, 4, 4)), ((8, 8), (4, 4)), ((4, 16, 16), (2, 8, 8))):
        encoder = Encoder(geometry=Geometry(3, shape, patch), width=D, depth=DEPTH, heads=HEADS, saved_position=True)
        load_vit(encoder, path)
        made[patch] = encoder
    clip = still[:, :, None].expand(-1, -1, 4, -1, -1)
    assert torch.allclose(made[2, 4, 4].embed(clip)[:, :4], made[4, 4].embed(still), atol=1e-5)
    grey = torch.full((1, 3, 4, 16, 16), 0.3)  # a plain patch says the same at any size
    plain = made[2, 4, 4].embed(torch.full((1, 3, 4, 8, 8), 0.3))
    assert torch.allclose(made[2, 8, 8].embed(grey)[0, 0], plain[0, 0], atol=0.02)  # but for the edges of bicubic
    three = Encoder(geometry=Geometry(3, (6, 8, 8), (3, 4, 4)), width=D, depth=DEPTH, heads=HEADS, saved_position=True)
    with pytest.raises(ConfigError, match="as many frames in a patch"):
        load_vit(three, path)


@pytest.mark.parametrize(
    ("count", "like", "alike", "grid"),
    [
        (197, (14, 14), False, (14, 14)),
        (257, (32, 8), False, (16, 16)),  # a picture's square, though we have as many
        (257, (32, 8), True, (32, 8)),  # of our own kind: the same grid
        (513, (32, 8), True, (64, 8)),  # a longer recording, the same bands
        (197, (7, 7), True, (14, 14)),
        (12, (5, 5), True, None),
    ],
)
def test_the_grid_of_positions_is_told_by_the_kind_of_input(
    count: int, like: tuple[int, int], alike: bool, grid: tuple[int, int] | None
) -> None:
    assert grid_of(count, has_class_token=True, like=like, alike=alike) == grid


def test_a_file_that_does_not_fit_is_refused_with_a_list(tmp_path: Path) -> None:
    w = tubelet_autoencoder()
    del w["blocks.1.attn.v_bias"]
    w["blocks.0.gamma_1"] = draw(D)
    path = stored(tmp_path, w)
    assert vit_shape(path).depth == DEPTH
    with pytest.raises(ConfigError, match=r"blocks.1.attn.v_bias is missing, blocks.0.gamma_1 has no place here"):
        import_vit(path, tmp_path / "e", overrides=["encoder.heads=2"])
    assert not (tmp_path / "e").exists()
    save_file({"patch_embed.proj.weight": draw(D, 3, 4, 4)}, path)
    with pytest.raises(ConfigError, match="has no blocks of a ViT"):
        import_vit(path, tmp_path / "e")


@pytest.mark.parametrize("name", ["123", "true", "1e5", "my model: #2", "[a, b]"])
def test_any_name_of_a_file_will_do(tmp_path: Path, name: str) -> None:
    path = stored(tmp_path, masked_autoencoder(channels=3, patch=4, grid=(4, 4)))
    path = path.rename(tmp_path / f"{name}.safetensors")
    found = import_vit(path, tmp_path / "e", overrides=["encoder.heads=2"])
    assert found.trained.config.name == (name if name.isalnum() else "imported")
    assert found.trained.config.encoder.weights == path.name
