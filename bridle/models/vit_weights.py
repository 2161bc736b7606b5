"""Weights of a Vision Transformer trained elsewhere, as the start of an encoder.

The file is safetensors and follows one of the namings of `vit_names`. Blocks are taken as they are. What depends on the
geometry is fitted to it:

    patch kernel (D, C', h, w)     other size: bicubic, times (h·w)/(h'·w'), so that a plain patch says the same
                                   one channel instead of C': the mean over channels
                                   t frames per patch: W/t for each, so that a still clip says what its picture says
    patch kernel (D, C', t, h, w)  frames summed for inputs without time, by the same reason
    positions (1 + h·w, D)         bicubic to our grid, the same at every moment of a clip
    no positions, biases apart     the table such models are built with: token number p, column j,
                                   sin(p / 10000^(j/D)) for even j, cos(p / 10000^((j−1)/D)) for odd j
    class token                    its own position added, as the file's model does before the first block

The number of heads cannot be seen in a file; it is the config's. Shapes: D width, T tokens, grid (…, h', w').
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bridle.errors import ConfigError, quoted
from bridle.files import sha256_of
from bridle.geometry import Geometry
from bridle.models.encoder import Encoder
from bridle.models.vit_names import BLOCK, KERNEL, Foreign, first_names, opened, weights_file

STEM = "embed.stem"  # with embed.stem_proj
BESIDE = ("embed.proj.bias", "norm.weight", "norm.bias")  # taken where the file has them
USUAL_HEAD = 64  # width of an attention head in almost every published ViT


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
        parts += [f"not in the file: {first_names(self.missing)}"] if self.missing else []
        parts += [f"not used: {first_names(self.unused)}"] if self.unused else []
        return f"the encoder starts from {'; '.join(parts)}"


class VitShape(NamedTuple):
    """Sizes of the model in a file."""

    width: int
    depth: int
    hidden: int  # width of the MLP
    channels: int
    patch: tuple[int, ...]
    class_token: bool
    positions: int | None  # how many, without that of the class token; None if they are not stored
    learned_elsewhere: bool  # not an export of bridle


def vit_shape(path: str | Path) -> VitShape:
    """The sizes of a ViT in a file, without reading its weights."""
    found = weights_file(path)
    with opened(found) as file:
        foreign = Foreign(file, found)
        stored, elsewhere, depth = foreign.names, foreign.geometry is None, 0
        while any(name.startswith(f"{BLOCK}{depth}.") for name in stored):
            depth += 1
        width, channels, *patch = foreign.kernel_shape()
        hidden = f"{BLOCK}0.mlp.fc1.weight"
        if hidden not in stored:
            names = first_names(foreign.theirs(stored))
            raise ConfigError(f"encoder.weights: {quoted(found)} has no blocks of a ViT; it holds {names}.")
        token = "class_token" in stored
        count = foreign.shape("position")[-2] - (token and elsewhere) if "position" in stored else None
        return VitShape(width, depth, foreign.shape(hidden)[0], channels, tuple(patch), token, count, elsewhere)


def load_vit(encoder: Encoder, path: str | Path) -> Started:
    """Give `encoder` the weights of a ViT; ConfigError, with a list, if its blocks do not fit."""
    path = weights_file(path)
    with opened(path) as file:
        foreign, ours = Foreign(file, path), encoder.state_dict()
        ours["position"] = encoder.position  # in the state only where it is saved
        require_fit(foreign, ours)
        notes: list[str] = []
        values = {name: foreign.take(name) for name in ours if name.startswith(BLOCK)}
        kernel = foreign.take_kernel()
        if foreign.is_whitened:
            notes.append("its whitening of patches is multiplied into the patch kernel")
            kernel = (kernel.flatten(1) @ foreign.take("embed.whitening")).reshape(kernel.shape)
        values[KERNEL] = fit_kernel(kernel, encoder.geometry, notes)
        values |= {name: foreign.take(name) for name in BESIDE if name in foreign.left}
        if foreign.is_whitened:
            values["embed.proj.bias"] = values["embed.proj.bias"] - kernel.flatten(1) @ foreign.take("embed.mean")
        if foreign.pooled_norm:
            notes.append("its fc_norm came after pooling; here it is each token's norm")
        values |= take_stem(foreign, ours, notes)
        values |= take_tokens(foreign, encoder, kernel, notes)
        unused = sorted([*foreign.theirs(foreign.left), *foreign.others])
    missing = sorted(set(ours) - set(values))
    with torch.no_grad():
        for name, value in values.items():
            ours[name].copy_(value.reshape(ours[name].shape))
    head = encoder.width // encoder.heads
    if head != USUAL_HEAD and foreign.geometry is None:
        notes.append(f"heads are {head} wide here, {USUAL_HEAD} in almost every published ViT: check encoder.heads")
    return Started(path, sha256_of(path), len(values), tuple(missing), tuple(unused), tuple(notes))


def take_stem(foreign: Foreign, ours: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """The stem of a model of bridle; of other models, a stem that adds nothing before training."""
    theirs = {name for name in foreign.left if name.startswith(STEM)} if foreign.geometry is not None else set()
    wanted = {name: tuple(value.shape) for name, value in ours.items() if name.startswith(STEM)}
    if not theirs:
        if wanted:
            notes.append("it has no stem: ours adds nothing at first")
        return {name: torch.zeros_like(ours[name]) for name in wanted}
    found = {name: foreign.shape(name) for name in theirs}
    if found != wanted:
        centres = found["embed.stem.centres"][0]
        raise ConfigError(
            f"encoder.weights: the model has a stem of {centres} centres; give encoder.stem={centres} and its patches."
        )
    return {name: foreign.take(name) for name in sorted(theirs)}


def require_fit(foreign: Foreign, ours: Mapping[str, Tensor]) -> None:
    """ConfigError that lists every tensor of the blocks, the patch kernel and the norm that cannot be used."""
    blocks = [name for name in ours if name.startswith(BLOCK)]
    apart = [name for name in blocks if foreign.is_apart and name.endswith(".attn.qkv.bias")]
    halves = [name.replace("qkv.bias", f"{part}_bias") for name in apart for part in "qv"]
    needed = [*(name for name in blocks if name not in apart), *halves]
    wrong = [f"{name} is missing" for name in needed if name not in foreign.left]
    label, width = foreign.names, ours["norm.weight"].numel()
    for name in (*blocks, *BESIDE):
        if name in foreign.left and foreign.shape(name) != tuple(ours[name].shape):
            wrong.append(f"{label[name]} is {list(foreign.shape(name))}, expected {list(ours[name].shape)}")
    for name, axis in ((KERNEL, 0), ("position", -1), ("class_token", -1), *((half, 0) for half in halves)):
        if name in foreign.left and foreign.shape(name)[axis:][:1] != (width,):
            wrong.append(f"{label[name]} is {list(foreign.shape(name))}, expected a width of {width}")
    surplus = [name for name in foreign.left if name.startswith(BLOCK) and name not in needed]
    wrong += [f"{name} has no place here" for name in foreign.theirs(surplus)]
    if wrong:
        raise ConfigError(
            f"encoder.weights: the blocks in {quoted(foreign.path)} do not fit encoder.width, depth and mlp_ratio: "
            f"{first_names(wrong)}."
        )


def fit_kernel(kernel: Tensor, geometry: Geometry, notes: list[str]) -> Tensor:
    """The patch kernel (D, C', h, w) or (D, C', t, h, w) for our patches: (D, C, *patch)."""
    if tuple(kernel.shape[1:]) == (geometry.channels, *geometry.patch):
        return kernel
    frames = kernel.shape[2] if kernel.dim() == 5 else None
    fits = kernel.dim() in (4, 5) and geometry.rank in (2, 3) and geometry.channels in (1, kernel.shape[1])
    if not fits or (frames is not None and geometry.rank == 3 and frames != geometry.patch[0]):
        raise ConfigError(
            f"encoder.weights: a patch kernel {list(kernel.shape)} cannot serve inputs of {list(geometry.shape)} in "
            f"patches of {list(geometry.patch)}; expected (D, channels, h, w) for two axes, or three with time first, "
            "as many frames in a patch, and as many channels, or 1."
        )
    if geometry.channels != kernel.shape[1]:
        notes.append(f"patch kernel averaged over its {kernel.shape[1]} channels")
        kernel = kernel.mean(1, keepdim=True)
    if frames is not None and geometry.rank == 2:
        notes.append(f"patch kernel summed over its {frames} frames")
        kernel, frames = kernel.sum(2), None
    size, (h, w) = tuple(kernel.shape[-2:]), geometry.patch[-2:]
    if size != (h, w):
        notes.append(f"patch kernel {by(size)} resized to {by((h, w))}")
        planes = kernel.flatten(1, -3)  # (D, C·t, h, w)
        kernel = (resize(planes, (h, w)) * (prod(size) / (h * w))).reshape(*kernel.shape[:-2], h, w)
    if geometry.rank == 3 and frames is None:
        t = geometry.patch[0]
        notes.append(f"patch kernel spread over {t} frames")
        kernel = kernel.unsqueeze(2).expand(-1, -1, t, -1, -1) / t  # (D, C, h, w) -> (D, C, t, h, w)
    return kernel


def take_tokens(foreign: Foreign, encoder: Encoder, kernel: Tensor, notes: list[str]) -> dict[str, Tensor]:
    """Class token and positions of the file, as far as it has them and we do."""
    values: dict[str, Tensor] = {}
    own = foreign.take("class_token").reshape(-1) if "class_token" in foreign.left else None
    grid = encoder.geometry.grid
    if "position" in foreign.left:
        table = foreign.take("position").reshape(-1, encoder.width)  # (1 + h·w, D), or (h·w, D)
        before = foreign.geometry.grid if foreign.geometry is not None else None
        if before is None:
            alike = kernel.dim() == 5 or kernel.shape[1] == encoder.geometry.channels == 1
            before = grid_of(len(table), has_class_token=own is not None, like=grid, alike=alike)
        if before is None:
            raise ConfigError(
                f"encoder.weights: {foreign.names['position']} in {quoted(foreign.path)} has {len(table)} positions, "
                "which is neither a square nor our grid, with or without a class token."
            )
        if own is not None and len(table) > prod(before):
            own = own + table[0]
        values["position"] = fit_positions(table[-prod(before) :], before, grid, notes)
    elif foreign.is_apart:
        notes.append(f"positions are the sines and cosines of token numbers 0 to {prod(grid) - 1}, the file has none")
        values["position"] = sequence_position(prod(grid), encoder.width)
    if own is not None and encoder.class_token is not None:
        values["class_token"] = own
    elif own is not None:
        notes.append("its class token is left out; encoder.class_token=true takes it")
    return values


def sequence_position(tokens: int, width: int) -> Tensor:
    """Sines (even columns) and cosines (odd ones) of token numbers: (T, D), computed in float64."""
    rate = 10000.0 ** (-(torch.arange(width) // 2 * 2).double() / width)  # (D,)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * rate  # (T, D)
    return torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos()).float()


def grid_of(count: int, *, has_class_token: bool, like: Sequence[int], alike: bool = False) -> tuple[int, ...] | None:
    """The grid of `count` positions, None if it is not known.

    It is a square, or our own where it has as many. A file whose inputs are of our kind (`alike`) has our own grid
    first, then one that differs in its first axis only, then a square.
    """
    for patches in (count - 1, count) if has_class_token else (count,):
        root = isqrt(max(patches, 0))
        square = (root, root) if root > 0 and root * root == patches else None
        ours = tuple(like) if patches == prod(like) else None
        longer = len(like) == 2 and like[0] != like[1] and patches > 0 and patches % like[1] == 0
        strip = (patches // like[1], like[1]) if longer else None
        found = (ours or strip or square) if alike else (square or ours)
        if found is not None:
            return found
    return None


def fit_positions(table: Tensor, before: tuple[int, ...], grid: Sequence[int], notes: list[str]) -> Tensor:
    """Positions (h·w, D) on grid `before` for our grid: (T, D)."""
    if before == tuple(grid):
        return table
    if len(before) != 2 or len(grid) not in (2, 3):
        raise ConfigError(
            f"encoder.weights: positions on the grid {list(before)} cannot be fitted to our grid {list(grid)}; use a "
            "geometry with the same grid."
        )
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
