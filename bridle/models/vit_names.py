"""How libraries name the parts of a Vision Transformer, and a file that follows one of these namings.

    timm, MAE and its kin    patch_embed, blocks.N, norm; fc_norm where a fine-tuned model pooled before its norm
    with q_bias and v_bias   the same, but the bias of q, k, v is two tensors: k has none; positions are not stored
    torchvision              conv_proj, encoder.layers.encoder_layer_N, encoder.ln
    bridle                   the model.safetensors of an exported folder, with its config.json beside it

Names may have a prefix such as `model.`. A file is opened only if it is safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bridle.errors import ConfigError, quoted
from bridle.geometry import Geometry

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".npz")
SHOWN = 6  # names in a message before it says "and N more"
POOLED_NORM = "fc_norm"


class Names(NamedTuple):
    """How one library names the parts of a ViT."""

    kernel: str
    bias: str
    position: str
    class_token: str
    norm: str
    block: str  # with {} for the number
    parts: Mapping[str, str]  # ours inside a block -> theirs
    q_and_v: tuple[str, str] | None = None  # the biases of q and v where they are apart

    def of_blocks(self, depth: int) -> dict[str, str]:
        """Our names of all block tensors -> theirs."""
        return {
            f"trunk.blocks.{i}.{ours}": self.block.format(i) + theirs
            for i in range(depth)
            for ours, theirs in self.parts.items()
        }

    def biases(self, depth: int) -> dict[str, tuple[str, str]]:
        """Our names of the biases of q, k, v -> the two of theirs, where they are apart."""
        if self.q_and_v is None:
            return {}
        q, v = self.q_and_v
        return {
            f"trunk.blocks.{i}.attn.qkv.bias": (self.block.format(i) + q, self.block.format(i) + v)
            for i in range(depth)
        }


def both(**layers: str) -> dict[str, str]:
    """Weight and bias of each layer, our name -> theirs; __ stands for a dot in ours."""
    return {
        f"{ours.replace('__', '.')}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in layers.items()
        for kind in ("weight", "bias")
    }


TIMM = Names(
    kernel="patch_embed.proj.weight",
    bias="patch_embed.proj.bias",
    position="pos_embed",
    class_token="cls_token",
    norm="norm",
    block="blocks.{}.",
    parts=both(norm1="norm1", norm2="norm2", attn__qkv="attn.qkv", attn__proj="attn.proj")
    | both(mlp__fc1="mlp.fc1", mlp__fc2="mlp.fc2"),
)
APART = TIMM._replace(
    parts={ours: theirs for ours, theirs in TIMM.parts.items() if ours != "attn.qkv.bias"},
    q_and_v=("attn.q_bias", "attn.v_bias"),
)
TORCHVISION = Names(
    kernel="conv_proj.weight",
    bias="conv_proj.bias",
    position="encoder.pos_embedding",
    class_token="class_token",
    norm="encoder.ln",
    block="encoder.layers.encoder_layer_{}.",
    parts=both(norm1="ln_1", norm2="ln_2", attn__proj="self_attention.out_proj", mlp__fc1="mlp.0", mlp__fc2="mlp.3")
    | {f"attn.qkv.{kind}": f"self_attention.in_proj_{kind}" for kind in ("weight", "bias")},
)
# Older torchvision files number the two layers of the MLP in another way.
OLDER = TORCHVISION._replace(
    parts={**TORCHVISION.parts, **both(mlp__fc1="mlp.linear_1", mlp__fc2="mlp.linear_2")},
)
OURS = Names(
    kernel="embed.proj.weight",
    bias="embed.proj.bias",
    position="position",
    class_token="class_token",
    norm="norm",
    block="trunk.blocks.{}.",
    parts={name: name for name in TIMM.parts},
)


class Foreign:
    """A file's tensors by name, without its prefix; each is read when it is asked for."""

    def __init__(self, file: Any, path: Path) -> None:
        self.file, self.path = file, path
        stored = list(file.keys())
        self.geometry: Geometry | None = None  # of the model the file is of, where that is written down
        own = f"encoder.{OURS.kernel}"
        kinds = (OURS,) if own in stored else (TIMM, TORCHVISION)
        kernels = [(name, kind) for kind in kinds for name in stored if prefixed(name, kind.kernel)]
        if own in stored:
            kernels, self.geometry = [(own, OURS)], exported_geometry(path)
        if len(kernels) != 1:
            raise ConfigError(
                f"encoder.weights: {quoted(path)} is not a ViT with the names of timm or torchvision: expected one "
                f"{TIMM.kernel} or {TORCHVISION.kernel}, found {len(kernels)}; it holds {first_names(stored)}."
            )
        kernel, self.names = kernels[0]
        self.prefix = kernel.removesuffix(self.names.kernel)
        self.left = {name.removeprefix(self.prefix) for name in stored if name.startswith(self.prefix)}
        self.others = [name for name in stored if not name.startswith(self.prefix)]
        self.is_whitened = self.names is OURS and "embed.whitening" in self.left
        if any(".mlp.linear_1." in name for name in self.left):
            self.names = OLDER
        if any(name.endswith(".attn.q_bias") for name in self.left):
            self.names = APART
        self.pooled_norm = f"{self.names.norm}.weight" not in self.left and f"{POOLED_NORM}.weight" in self.left
        if self.pooled_norm:
            self.names = self.names._replace(norm=POOLED_NORM)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.prefix + name).get_shape())

    def kernel_shape(self) -> tuple[int, ...]:
        """(D, C, *patch)."""
        found = self.shape(self.names.kernel)
        return found if self.geometry is None else (found[0], self.geometry.channels, *self.geometry.patch)

    def take(self, name: str) -> Tensor:
        """A tensor in float32."""
        self.left.discard(name)
        value: Tensor = self.file.get_tensor(self.prefix + name).float()
        if not bool(torch.isfinite(value).all()):
            raise ConfigError(f"encoder.weights: {name} in {quoted(self.path)} holds values that are not finite.")
        return value

    def take_kernel(self) -> Tensor:
        """The patch kernel (D, C, *patch)."""
        wanted, kernel = self.kernel_shape(), self.take(self.names.kernel)
        if kernel[0].numel() * kernel.shape[0] != torch.Size(wanted).numel():
            raise ConfigError(
                f"encoder.weights: {self.names.kernel} in {quoted(self.path)} is {list(kernel.shape)}, which is not "
                f"the {list(wanted)} that its config.json says."
            )
        return kernel.reshape(wanted)


def exported_geometry(path: Path) -> Geometry:
    """What an exported folder says of the inputs of its model."""
    beside = path.parent / "config.json"
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))["geometry"]
        return Geometry(int(found["channels"]), tuple(map(int, found["input"])), tuple(map(int, found["patch"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"encoder.weights: {quoted(path)} is of bridle, but {quoted(beside)} does not tell its geometry; give the "
            "whole exported folder."
        ) from error


def prefixed(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file for reading; anything else is refused with what to do about it."""
    if path.suffix.lower() in PICKLES:
        raise ConfigError(
            f"encoder.weights: {quoted(path)} is not safetensors; opening a pickle can run any program, so convert the "
            f"file to safetensors first: bridle convert {quoted(path)} --out weights.safetensors"
        )
    if not path.is_file():
        raise ConfigError(f"encoder.weights: {quoted(path)} does not exist or is not a file; give a .safetensors file.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"encoder.weights: {quoted(path)} cannot be read as safetensors: {quoted(error)}.") from error


def weights_file(path: str | Path) -> Path:
    """The file itself, or that of an exported folder."""
    found = Path(path)
    return found / "model.safetensors" if (found / "config.json").is_file() else found


def first_names(names: Sequence[str]) -> str:
    """Names from a file for a message, the first few of them."""
    shown = ", ".join(quoted(name).strip("'") for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
