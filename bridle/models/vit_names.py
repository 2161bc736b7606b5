"""Files with the weights of a Vision Transformer, read under our names whatever library named them.

    timm, MAE and its kin    patch_embed, blocks.N, norm; fc_norm where a fine-tuned model pooled before its norm
    with q_bias and v_bias   the same, but the bias of q, k, v is two tensors: k has none; positions are not stored
    torchvision              conv_proj, encoder.layers.encoder_layer_N, encoder.ln
    bridle                   the model.safetensors of an exported folder, with its config.json beside it

Names may have a prefix such as `model.`. A file is opened only if it is safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bridle.errors import ConfigError, quoted
from bridle.geometry import Geometry

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".npz")
SHOWN = 6  # names in a message before it says "and N more"
KERNEL = "embed.proj.weight"
BLOCK = "trunk.blocks."
# What is replaced in the names of a library, in this order, to get ours; what is inside timm's blocks is named alike.
TIMM = {
    "^patch_embed[.]proj": "embed.proj",
    "^pos_embed$": "position",
    "^cls_token$": "class_token",
    "^blocks[.]": BLOCK,
}
TORCHVISION = {
    "^conv_proj": "embed.proj",
    "^encoder[.]pos_embedding$": "position",
    "^encoder[.]ln[.]": "norm.",
    "^encoder[.]layers[.]encoder_layer_": BLOCK,
    "[.]ln_": ".norm",
    "[.]self_attention[.]in_proj_": ".attn.qkv.",
    "[.]self_attention[.]out_proj": ".attn.proj",
    "[.]mlp[.](0|linear_1)[.]": ".mlp.fc1.",  # older files have linear_1 and linear_2
    "[.]mlp[.](3|linear_2)[.]": ".mlp.fc2.",
}
KERNELS = {"patch_embed.proj.weight": TIMM, "conv_proj.weight": TORCHVISION}  # by which a library is recognised


def our_name(name: str, replaced: Mapping[str, str]) -> str:
    """The name of a tensor in our encoder."""
    for pattern, ours in replaced.items():
        name = re.sub(pattern, ours, name)
    return name


class Foreign:
    """A file's tensors by our names; each is read when it is asked for.

    geometry: of the model the file is of, None unless that is an export of bridle. is_apart: is the bias of q, k, v two
    tensors? pooled_norm: did the file's model pool before its norm? left: names that were not taken yet.
    """

    def __init__(self, file: Any, path: Path) -> None:
        self.file, self.path = file, path
        stored = list(file.keys())
        found = [(name.removesuffix(kernel), kind) for kernel, kind in KERNELS.items() for name in stored
                 if f".{name}".endswith(f".{kernel}")]  # fmt: skip
        self.geometry: Geometry | None = None
        if f"encoder.{KERNEL}" in stored:
            found, self.geometry = [("encoder.", {})], exported_geometry(path)
        if len(found) != 1:
            raise ConfigError(
                f"encoder.weights: {quoted(path)} is not a ViT with the names of timm or torchvision: expected one "
                f"{' or '.join(KERNELS)}, found {len(found)}; it holds {first_names(stored)}."
            )
        self.prefix, kind = found[0]
        inside = [name.removeprefix(self.prefix) for name in stored if name.startswith(self.prefix)]
        self.others = [name for name in stored if not name.startswith(self.prefix)]
        self.pooled_norm = kind is TIMM and "norm.weight" not in inside and "fc_norm.weight" in inside
        kind = kind | {"^fc_norm[.]": "norm."} if self.pooled_norm else kind
        self.names = {our_name(name, kind): name for name in inside}  # ours -> the file's, without prefix
        self.left = set(self.names)
        self.is_whitened = self.geometry is not None and "embed.whitening" in self.names
        self.is_apart = any(name.endswith(".attn.q_bias") for name in self.names)

    def theirs(self, names: Iterable[str]) -> list[str]:
        """Names as the file has them, sorted; ours where it has none."""
        return sorted(self.names.get(name, name) for name in names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.prefix + self.names[name]).get_shape())

    def kernel_shape(self) -> tuple[int, ...]:
        """(D, C, *patch)."""
        found = self.shape(KERNEL)
        return found if self.geometry is None else (found[0], self.geometry.channels, *self.geometry.patch)

    def take(self, name: str) -> Tensor:
        """A tensor in float32; of biases that are apart, q, zeros and v together."""
        if self.is_apart and name.endswith(".attn.qkv.bias"):
            q, v = (self.take(name.replace("qkv.bias", f"{part}_bias")) for part in "qv")
            return torch.cat([q, torch.zeros_like(q), v])
        self.left.discard(name)
        value: Tensor = self.file.get_tensor(self.prefix + self.names[name]).float()
        if not bool(torch.isfinite(value).all()):
            label = self.names[name]
            raise ConfigError(f"encoder.weights: {label} in {quoted(self.path)} holds values that are not finite.")
        return value

    def take_kernel(self) -> Tensor:
        """The patch kernel (D, C, *patch)."""
        wanted, kernel = self.kernel_shape(), self.take(KERNEL)
        if kernel.numel() != torch.Size(wanted).numel():
            raise ConfigError(
                f"encoder.weights: {self.names[KERNEL]} in {quoted(self.path)} is {list(kernel.shape)}, which is not "
                f"the {list(wanted)} that its config.json says."
            )
        return kernel.reshape(wanted)


def exported_geometry(path: Path) -> Geometry:
    """The geometry of an exported model, from the config.json beside its weights."""
    beside = path.parent / "config.json"
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))["geometry"]
        return Geometry(int(found["channels"]), tuple(map(int, found["input"])), tuple(map(int, found["patch"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"encoder.weights: {quoted(path)} is of bridle, but {quoted(beside)} does not hold its geometry; give the "
            "whole exported folder."
        ) from error


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
