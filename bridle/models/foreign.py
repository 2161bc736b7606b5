"""Weights of a Vision Transformer trained elsewhere, as the start of an encoder.

The file is safetensors, its names those of timm (patch_embed, blocks.N, norm) or torchvision (conv_proj,
encoder.layers.encoder_layer_N, encoder.ln), with or without a prefix such as `model.`. Blocks are taken as they are.
What depends on the geometry is fitted to it:

    patch kernel (D, C', h, w)     other size: bicubic, times (h·w)/(h'·w'), so that a plain patch says the same
                                   one channel instead of C': the mean over channels
                                   t frames per patch: W/t for each, so that a still clip says what its picture says
    positions (1 + h·w, D)         bicubic to our grid, the same at every moment of a clip
    class token                    its own position added, as the file's model does before the first block

The number of heads cannot be seen in a file; it is the config's. Shapes: D width, T tokens, grid (…, h', w').
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isqrt, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import interpolate

from bridle.errors import ConfigError, quoted
from bridle.geometry import Geometry
from bridle.models.encoder import Encoder

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".npz")
USUAL_HEAD = 64  # width of an attention head in almost every published ViT
SHOWN = 6  # names in a message before it says "and N more"


class Started(NamedTuple):
    """What an encoder took from a file, and what it did not."""

    path: Path
    sha256: str
    taken: int  # tensors of ours that have values from the file
    missing: tuple[str, ...]  # of ours, left at their random start or sin-cos table
    unused: tuple[str, ...]  # of the file's
    notes: tuple[str, ...]  # what was fitted, and how

    def record(self) -> dict[str, Any]:
        """For a JSON file in the run directory."""
        return {"format": 1, **self._asdict(), "path": str(self.path)}

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{self.taken} tensors from {quoted(self.path)}", *self.notes]
        parts += [f"not in the file: {several(self.missing)}"] if self.missing else []
        parts += [f"not used: {several(self.unused)}"] if self.unused else []
        return f"the encoder starts from {'; '.join(parts)}"


class Names(NamedTuple):
    """How one library names the parts of a ViT."""

    kernel: str
    bias: str
    position: str
    class_token: str
    norm: str
    block: str  # with {} for the number
    parts: Mapping[str, str]  # ours inside a block -> theirs

    def of_blocks(self, depth: int) -> dict[str, str]:
        """Our names of all block tensors -> theirs."""
        return {
            f"trunk.blocks.{i}.{ours}": self.block.format(i) + theirs
            for i in range(depth)
            for ours, theirs in self.parts.items()
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


class Foreign:
    """A file's tensors by name, without its prefix; each is read when it is asked for."""

    def __init__(self, file: Any, path: Path) -> None:
        self.file, self.path = file, path
        stored = list(file.keys())
        kernels = [(name, kind) for kind in (TIMM, TORCHVISION) for name in stored if prefixed(name, kind.kernel)]
        if len(kernels) != 1:
            raise ConfigError(
                f"encoder.weights: {quoted(path)} is not a ViT with the names of timm or torchvision: expected one "
                f"{TIMM.kernel} or {TORCHVISION.kernel}, found {len(kernels)}; it holds {several(stored)}."
            )
        kernel, self.names = kernels[0]
        self.prefix = kernel.removesuffix(self.names.kernel)
        self.left = {name.removeprefix(self.prefix) for name in stored if name.startswith(self.prefix)}
        self.others = [name for name in stored if not name.startswith(self.prefix)]
        if any(".mlp.linear_1." in name for name in self.left):
            self.names = OLDER

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.prefix + name).get_shape())

    def take(self, name: str) -> Tensor:
        """A tensor in float32."""
        self.left.discard(name)
        value: Tensor = self.file.get_tensor(self.prefix + name).float()
        if not bool(torch.isfinite(value).all()):
            raise ConfigError(f"encoder.weights: {name} in {quoted(self.path)} holds values that are not finite.")
        return value


def prefixed(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


def load_vit(encoder: Encoder, path: str | Path) -> Started:
    """Give `encoder` the weights of a ViT; ConfigError, with a list, if its blocks do not fit."""
    path = Path(path)
    with opened(path) as file:
        foreign = Foreign(file, path)
        names, ours = foreign.names, encoder.state_dict()
        ours["position"] = encoder.position  # in the state only where it is saved
        wanted = names.of_blocks(encoder.depth)
        require_fit(foreign, ours, wanted)
        notes: list[str] = []
        values = {mine: foreign.take(theirs) for mine, theirs in wanted.items()}
        values["embed.proj.weight"] = fit_kernel(foreign.take(names.kernel), encoder.geometry, notes)
        for mine, theirs in {"embed.proj.bias": names.bias, **both(norm=names.norm)}.items():
            if theirs in foreign.left:
                values[mine] = foreign.take(theirs)
        values |= take_tokens(foreign, encoder, notes)
        unused = sorted([*foreign.left, *foreign.others])
    missing = sorted(set(ours) - set(values))
    with torch.no_grad():
        for name, value in values.items():
            ours[name].copy_(value.reshape(ours[name].shape))
    head = encoder.width // encoder.heads
    if head != USUAL_HEAD:
        notes.append(f"heads are {head} wide here, {USUAL_HEAD} in almost every published ViT: check encoder.heads")
    return Started(path, fingerprint(path), len(values), tuple(missing), tuple(unused), tuple(notes))


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file for reading; anything else is refused with what to do about it."""
    if path.suffix.lower() in PICKLES:
        raise ConfigError(
            f"encoder.weights: {quoted(path)} is not safetensors; opening a pickle can run any program, so convert the "
            "file to safetensors first."
        )
    if not path.is_file():
        raise ConfigError(f"encoder.weights: {quoted(path)} does not exist or is not a file; give a .safetensors file.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"encoder.weights: {quoted(path)} cannot be read as safetensors: {quoted(error)}.") from error


def require_fit(foreign: Foreign, ours: Mapping[str, Tensor], wanted: Mapping[str, str]) -> None:
    """ConfigError that lists every tensor of the blocks, the patch kernel and the norm that cannot be used."""
    names = foreign.names
    checked = {**wanted, "embed.proj.bias": names.bias, **both(norm=names.norm)}
    wrong = [f"{theirs} is missing" for theirs in wanted.values() if theirs not in foreign.left]
    wrong += [
        f"{theirs} is {list(foreign.shape(theirs))}, expected {list(ours[mine].shape)}"
        for mine, theirs in checked.items()
        if theirs in foreign.left and foreign.shape(theirs) != tuple(ours[mine].shape)
    ]
    width = ours["norm.weight"].numel()
    for name, axis in ((names.kernel, 0), (names.position, -1), (names.class_token, -1)):
        if name in foreign.left and foreign.shape(name)[axis:][:1] != (width,):
            wrong.append(f"{name} is {list(foreign.shape(name))}, expected a width of {width}")
    block = re.compile(re.escape(names.block).replace(r"\{\}", r"\d+"))
    known = set(wanted.values())
    wrong += [f"{name} has no place here" for name in sorted(foreign.left) if block.match(name) and name not in known]
    if wrong:
        raise ConfigError(
            f"encoder.weights: the blocks in {quoted(foreign.path)} do not fit encoder.width, depth and mlp_ratio: "
            f"{several(wrong)}."
        )


def fit_kernel(kernel: Tensor, geometry: Geometry, notes: list[str]) -> Tensor:
    """The patch kernel (D, C', h, w) for our patches: (D, C, *patch)."""
    if kernel.dim() != 4 or geometry.rank not in (2, 3) or geometry.channels not in (1, kernel.shape[1]):
        raise ConfigError(
            f"encoder.weights: a patch kernel {list(kernel.shape)} cannot serve inputs of {list(geometry.shape)}; "
            "expected (D, channels, h, w) for two axes, or three with time first, and as many channels, or 1."
        )
    if geometry.channels != kernel.shape[1]:
        notes.append(f"patch kernel averaged over its {kernel.shape[1]} channels")
        kernel = kernel.mean(1, keepdim=True)
    size, (h, w) = tuple(kernel.shape[2:]), geometry.patch[-2:]
    if size != (h, w):
        notes.append(f"patch kernel {by(size)} resized to {by((h, w))}")
        kernel = resize(kernel, (h, w)) * (prod(size) / (h * w))
    if geometry.rank == 3:
        t = geometry.patch[0]
        notes.append(f"patch kernel spread over {t} frames")
        kernel = kernel.unsqueeze(2).expand(-1, -1, t, -1, -1) / t  # (D, C, h, w) -> (D, C, t, h, w)
    return kernel


def take_tokens(foreign: Foreign, encoder: Encoder, notes: list[str]) -> dict[str, Tensor]:
    """Class token and positions of the file, as far as it has them and we do."""
    names, values = foreign.names, {}
    own = foreign.take(names.class_token).reshape(-1) if names.class_token in foreign.left else None
    if names.position in foreign.left:
        table = foreign.take(names.position).reshape(-1, encoder.width)  # (1 + h·w, D), or (h·w, D)
        grid = encoder.geometry.grid
        before = grid_of(len(table), has_class_token=own is not None, like=grid[-2:])
        if before is None:
            raise ConfigError(
                f"encoder.weights: {names.position} in {quoted(foreign.path)} has {len(table)} positions, which is "
                "neither a square nor our grid, with or without a class token."
            )
        if own is not None and len(table) > prod(before):
            own = own + table[0]
        values["position"] = fit_positions(table[-prod(before) :], before, grid, notes)
    if own is not None and encoder.class_token is not None:
        values["class_token"] = own
    elif own is not None:
        notes.append("its class token is left out; encoder.class_token=true takes it")
    return values


def grid_of(count: int, *, has_class_token: bool, like: Sequence[int]) -> tuple[int, int] | None:
    """The grid of `count` positions: a square, or our own where it has as many; None if it is neither."""
    for patches in (count - 1, count) if has_class_token else (count,):
        if patches > 0 and isqrt(patches) ** 2 == patches:
            return isqrt(patches), isqrt(patches)
        if patches == prod(like):
            return like[0], like[1]
    return None


def fit_positions(table: Tensor, before: tuple[int, int], grid: Sequence[int], notes: list[str]) -> Tensor:
    """Positions (h·w, D) on grid `before` for our grid: (T, D)."""
    h, w = grid[-2:]
    if before != (h, w):
        notes.append(f"positions {by(before)} resized to {by((h, w))}")
        plane = table.reshape(1, *before, -1).permute(0, 3, 1, 2)  # (h·w, D) -> (1, D, h, w)
        table = resize(plane, (h, w)).flatten(2)[0].t()  # (1, D, h', w') -> (h'·w', D)
    if len(grid) == 3:
        notes.append(f"positions repeated at {grid[0]} moments")
        table = table.repeat(grid[0], 1)  # row-major: a moment's places lie together
    return table


def resize(planes: Tensor, size: tuple[int, int]) -> Tensor:
    return interpolate(planes, size=size, mode="bicubic", antialias=True)


def by(size: Sequence[int]) -> str:
    return "×".join(map(str, size))


def several(names: Sequence[str]) -> str:
    """Names from a file for a message, the first few of them."""
    shown = ", ".join(quoted(name).strip("'") for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
