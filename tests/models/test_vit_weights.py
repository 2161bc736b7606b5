"""Weights of ViTs from elsewhere against a small ViT written from its equations with plain torch functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, softmax

import bridle
from bridle.config import Config
from bridle.errors import ConfigError
from bridle.geometry import Geometry
from bridle.models.encoder import Encoder
from bridle.models.vit_weights import load_vit

D, DEPTH, HEADS, P, GRID = 16, 2, 2, 4, 3  # pictures of 12 × 12 in patches of 4 × 4

Weights = dict[str, Tensor]


def weights(*, grid: int = GRID, patch: int = P, channels: int = 3, class_token: bool = True) -> Weights:
    """Random weights under the names of timm."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 0.2) -> Tensor:
        return scale * torch.randn(*shape, generator=g)

    found = {
        "patch_embed.proj.weight": draw(D, channels, patch, patch),
        "patch_embed.proj.bias": draw(D),
        "pos_embed": draw(1, grid * grid + class_token, D),
        "norm.weight": 1 + draw(D),
        "norm.bias": draw(D),
        "head.weight": draw(10, D),
        "head.bias": draw(10),
    }
    if class_token:
        found["cls_token"] = draw(1, 1, D)
    for i in range(DEPTH):
        for name, shape in {
            "attn.qkv": (3 * D, D),
            "attn.proj": (D, D),
            "mlp.fc1": (4 * D, D),
            "mlp.fc2": (D, 4 * D),
        }.items():
            found[f"blocks.{i}.{name}.weight"] = draw(*shape)
            found[f"blocks.{i}.{name}.bias"] = draw(shape[0])
        for name in ("norm1", "norm2"):
            found[f"blocks.{i}.{name}.weight"] = 1 + draw(D)
            found[f"blocks.{i}.{name}.bias"] = draw(D)
    return found


def oracle(w: Weights, x: Tensor) -> Tensor:
    """Features (B, 1 + T, D) of pictures (B, C, H, W), class token first, all in float64."""
    w, x = {name: value.double() for name, value in w.items()}, x.double()

    def norm(z: Tensor, name: str) -> Tensor:
        return layer_norm(z, (D,), w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

    def dense(z: Tensor, name: str) -> Tensor:
        return linear(z, w[f"{name}.weight"], w[f"{name}.bias"])

    stride = w["patch_embed.proj.weight"].shape[-1]
    z = conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=stride).flatten(2).transpose(1, 2)
    z = torch.cat([w["cls_token"].expand(len(x), 1, D), z], dim=1) + w["pos_embed"]
    for i in range(DEPTH):
        q, k, v = dense(norm(z, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").chunk(3, dim=-1)
        heads = []
        for h in range(HEADS):
            part = slice(h * D // HEADS, (h + 1) * D // HEADS)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / (D // HEADS) ** 0.5
            heads.append(softmax(scores, dim=-1) @ v[..., part])
        z = z + dense(torch.cat(heads, dim=-1), f"blocks.{i}.attn.proj")
        z = z + dense(gelu(dense(norm(z, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")), f"blocks.{i}.mlp.fc2")
    return norm(z, "norm")


def as_torchvision(w: Weights, *, older: bool) -> Weights:
    first, second = ("mlp.linear_1", "mlp.linear_2") if older else ("mlp.0", "mlp.3")
    renamed = {
        "patch_embed.proj": "conv_proj",
        "pos_embed": "encoder.pos_embedding",
        "cls_token": "class_token",
        "head": "heads.head",
    }
    inside = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attn.proj": "self_attention.out_proj",
        "attn.qkv.weight": "self_attention.in_proj_weight",
        "attn.qkv.bias": "self_attention.in_proj_bias",
        "mlp.fc1": first,
        "mlp.fc2": second,
    }

    def rename(name: str) -> str:
        if name.startswith("norm."):
            return name.replace("norm.", "encoder.ln.")
        if not name.startswith("blocks."):
            start = next(ours for ours in renamed if name.startswith(ours))
            return renamed[start] + name.removeprefix(start)
        _, number, rest = name.split(".", 2)
        start = next(ours for ours in inside if rest.startswith(ours))
        return f"encoder.layers.encoder_layer_{number}.{inside[start]}{rest.removeprefix(start)}"

    return {rename(name): value for name, value in w.items()}


def build(geometry: Geometry, **options: object) -> Encoder:
    settings = {"width": D, "depth": DEPTH, "heads": HEADS, "class_token": True, **options}
    encoder = Encoder(geometry=geometry, saved_position=True, **settings)  # type: ignore[arg-type]
    return encoder.eval()


def stored(tmp_path: Path, w: Weights) -> Path:
    save_file({name: value.contiguous() for name, value in w.items()}, tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


PICTURES = Geometry(3, (12, 12), (P, P))


@pytest.mark.parametrize("kind", ["timm", "prefixed", "torchvision", "older torchvision"])
def test_features_are_those_of_the_model_the_weights_come_from(tmp_path: Path, kind: str) -> None:
    w = weights()
    path = stored(
        tmp_path,
        {
            "timm": w,
            "prefixed": {f"model.{name}": value for name, value in w.items()},
            "torchvision": as_torchvision(w, older=False),
            "older torchvision": as_torchvision(w, older=True),
        }[kind],
    )
    encoder = build(PICTURES)
    started = load_vit(encoder, path)
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    z, expected = encoder(x), oracle(w, x)
    assert (z.z - expected[:, 1:]).abs().max() < 1e-5
    assert (z.class_token - expected[:, 0]).abs().max() < 1e-5
    assert started.missing == ()
    assert len(started.unused) == 2  # the classification head
    assert all("head" in name for name in started.unused)


def test_half_precision_files_are_read(tmp_path: Path) -> None:
    encoder = build(PICTURES)
    load_vit(encoder, stored(tmp_path, {name: value.half() for name, value in weights().items()}))
    assert encoder.position.dtype == torch.float32
    assert (encoder.position - weights()["pos_embed"][0, 1:]).abs().max() < 1e-3


def test_one_channel_sees_the_mean_over_colours(tmp_path: Path) -> None:
    w = weights()
    encoder = build(Geometry(1, (12, 12), (P, P)))
    started = load_vit(encoder, stored(tmp_path, w))
    x = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    # A third of the grey picture in each colour: the sum over three kernels is then their mean.
    assert (encoder(x).z - oracle(w, x.expand(-1, 3, -1, -1) / 3)[:, 1:]).abs().max() < 1e-5
    assert "patch kernel averaged over its 3 channels" in started.notes


def test_a_clip_that_stands_still_starts_as_its_picture(tmp_path: Path) -> None:
    w = weights()
    encoder = build(Geometry(3, (4, 12, 12), (2, P, P)))
    load_vit(encoder, stored(tmp_path, w))
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    clip = x[:, :, None].expand(-1, -1, 4, -1, -1)
    tokens = encoder.embed(clip) + encoder.position  # (B, 2·9, D)
    picture = conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=P).flatten(2).transpose(1, 2)
    picture = picture + w["pos_embed"][:, 1:]
    assert (tokens[:, :9] - picture).abs().max() < 1e-5
    assert (tokens[:, 9:] - picture).abs().max() < 1e-5


def test_a_resized_kernel_answers_a_plain_patch_alike(tmp_path: Path) -> None:
    w = weights(patch=8)
    w["patch_embed.proj.weight"] = torch.ones(D, 3, 8, 8) * torch.arange(D)[:, None, None, None] / D
    for patch in (4, 16):
        encoder = build(Geometry(3, (3 * patch, 3 * patch), (patch, patch)))
        started = load_vit(encoder, stored(tmp_path, w))
        plain = torch.full((1, 3, 3 * patch, 3 * patch), 0.5)
        expected = 0.5 * 3 * 64 * torch.arange(D) / D + w["patch_embed.proj.bias"]
        assert (encoder.embed(plain) - expected).abs().max() < 1e-3
        assert f"patch kernel 8×8 resized to {patch}×{patch}" in started.notes


def test_positions_are_interpolated_to_a_grid_of_another_shape(tmp_path: Path) -> None:
    w = weights(grid=8)
    down = torch.linspace(0, 1, 8)[:, None].expand(8, 8)
    w["pos_embed"][0, 1:] = down.reshape(-1, 1)
    encoder = build(Geometry(3, (4 * P, 16 * P), (P, P)))
    started = load_vit(encoder, stored(tmp_path, w))
    table = encoder.position.reshape(4, 16, D)
    centres = (torch.arange(4) + 0.5) * 2 - 0.5  # of our rows, in rows of the file
    assert (table[1:3, :, 0] - (centres / 7)[1:3, None]).abs().max() < 0.02  # a ramp stays a ramp, away from the edge
    assert (table - table[:, :1]).abs().max() < 1e-5  # and says nothing of columns
    assert "positions 8×8 resized to 4×16" in started.notes


def test_positions_without_one_for_the_class_token_are_understood(tmp_path: Path) -> None:
    w = weights()
    w["pos_embed"] = w["pos_embed"][:, 1:]
    encoder = build(PICTURES)
    load_vit(encoder, stored(tmp_path, w))
    assert torch.equal(encoder.position, w["pos_embed"][0])
    assert encoder.class_token is not None
    assert torch.equal(encoder.class_token, w["cls_token"].flatten())


def test_what_the_file_lacks_or_has_too_much_of_is_listed(tmp_path: Path) -> None:
    w = weights(class_token=False)
    del w["pos_embed"], w["norm.weight"]
    w["decoder_embed.weight"] = torch.zeros(3)
    encoder = build(PICTURES)
    before = encoder.position.clone()
    started = load_vit(encoder, stored(tmp_path, w))
    assert started.missing == ("class_token", "norm.weight", "position")
    assert started.unused == ("decoder_embed.weight", "head.bias", "head.weight")
    assert torch.equal(encoder.position, before)
    line = started.describe()
    assert "not in the file: class_token, norm.weight, position" in line
    assert "\n" not in line


def change(name: str, value: Tensor | None) -> Callable[[Weights], None]:
    def apply(w: Weights) -> None:
        w.pop(name, None)
        if value is not None:
            w[name] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change("blocks.1.attn.qkv.bias", None), "blocks.1.attn.qkv.bias is missing"),
        (change("blocks.0.mlp.fc1.weight", torch.zeros(8, D)), r"fc1.weight is \[8, 16\], expected \[64, 16\]"),
        (change("blocks.2.norm1.weight", torch.zeros(D)), "blocks.2.norm1.weight has no place here"),
        (change("blocks.0.ls1.gamma", torch.zeros(D)), "blocks.0.ls1.gamma has no place here"),
        (change("pos_embed", torch.zeros(1, 8, D)), "8 positions, which is neither a square nor our grid"),
        (change("pos_embed", torch.zeros(1, 10, 6)), "pos_embed is .* expected a width of 16"),
        (change("patch_embed.proj.weight", torch.zeros(D, 3 * P * P)), "a patch kernel"),
        (change("patch_embed.proj.weight", torch.zeros(D, 4, P, P)), "a patch kernel"),
        (change("patch_embed.proj.weight", None), "is not a ViT with the names of timm or torchvision"),
        (change("norm.weight", torch.full((D,), torch.nan)), "not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_list(
    tmp_path: Path, spoil: Callable[[Weights], None], reason: str
) -> None:
    w = weights()
    spoil(w)
    encoder = build(PICTURES)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    with pytest.raises(ConfigError, match=reason) as caught:
        load_vit(encoder, stored(tmp_path, w))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())  # nothing half done


def test_only_safetensors_are_opened(tmp_path: Path) -> None:
    encoder = build(PICTURES)
    torch.save(weights(), tmp_path / "vit.pth")
    with pytest.raises(ConfigError, match="convert the file to safetensors first"):
        load_vit(encoder, tmp_path / "vit.pth")
    (tmp_path / "vit.safetensors").write_bytes((tmp_path / "vit.pth").read_bytes())
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_vit(encoder, tmp_path / "vit.safetensors")
    for missing in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ConfigError, match="does not exist or is not a file"):
            load_vit(encoder, missing)


def test_a_run_starts_from_the_weights_and_goes_on_without_the_file(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    w = {name: value for name, value in weights(grid=8, patch=2, channels=1).items() if not name.startswith("head")}
    path = stored(tmp_path, w)
    config = small(
        f"encoder.weights={path}", "encoder.class_token=true", "probe.enabled=false", "schedule.iterations=1"
    )
    frozen = config.model_copy(
        update={"encoder_phase": config.encoder_phase.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0})}
    )
    bridle.pretrain(frozen, out=tmp_path / "run")
    path.unlink()
    model = bridle.load(tmp_path / "run")
    assert torch.equal(model.encoder.position, w["pos_embed"][0, 1:])
    assert torch.allclose(model.encoder.trunk.blocks[1].attn.qkv.weight, w["blocks.1.attn.qkv.weight"], atol=1e-6)
    record = json.loads((tmp_path / "run" / "encoder_start.json").read_text())
    assert len(record["sha256"]) == 64
    assert record["missing"] == []
    longer = frozen.model_copy(update={"schedule": config.schedule.model_copy(update={"iterations": 2})})
    # The tokenizer's encoder is built anew with sin-cos positions; the main one keeps what it has.
    bridle_config = (tmp_path / "run" / "config.yaml").read_text().replace("  iterations: 1\n", "  iterations: 2\n")
    (tmp_path / "run" / "config.yaml").write_text(bridle_config)
    bridle.pretrain(longer, out=tmp_path / "run")
    model = bridle.load(tmp_path / "run")
    assert torch.equal(model.encoder.position, w["pos_embed"][0, 1:])
    assert not torch.equal(model.tokenizer.encoder.position, model.encoder.position)
    assert not any("position" in name for name in model.tokenizer.state_dict())


def test_weights_that_do_not_fit_leave_no_run_behind(tmp_path: Path, small: Callable[..., Config]) -> None:
    config = small(f"encoder.weights={tmp_path / 'none.safetensors'}")
    with pytest.raises(ConfigError, match="does not exist"):
        bridle.pretrain(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
