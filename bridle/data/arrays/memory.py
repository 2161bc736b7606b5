"""Sources that live in memory or in somebody else's torch Dataset.

Shapes: N samples of (C, *input), float32, not yet normalised.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from bridle.data.sources import Sample
from bridle.errors import DataError, UsageError, quoted
from bridle.seeding import mix

Augment = Callable[[Tensor, torch.Generator], Tensor]  # (C, *input) -> (C, *input), a pure function of its arguments

# Where dicts hold input and label, the first that is there.
X_KEYS = (
    *("image", "pixel_values", "img", "picture", "video", "audio", "input_values", "signal", "x", "input", "inputs"),
    *("array", "data", "values"),
)
Y_KEYS = ("label", "labels", "target", "y", "class", "fine_label")
COLOURS = (1, 3)  # channels of pictures


class TensorSource:
    """Samples held in one tensor `x` (N, C, *input)."""

    def __init__(
        self,
        *,
        x: Tensor,
        labels: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
        augment: Augment | None = None,
        name: str = "sample",
    ) -> None:
        if labels is not None and len(labels) != len(x):
            raise DataError(f"{len(x)} samples came with {len(labels)} labels; expected one label for each sample.")
        self.x = x.float()
        self.labels: Sequence[int] | None = None if labels is None else [int(label) for label in labels]
        self.classes = classes
        self.augment = augment
        self.name = name

    def __len__(self) -> int:
        return len(self.x)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        x = self.x[index]
        if generator is not None and self.augment is not None:
            x = self.augment(x, generator)
        return Sample(x=x, label=None if self.labels is None else self.labels[index])

    def describe(self, index: int) -> str:
        return f"{self.name} {index}"


# What a dataset holds instead of a tensor (a picture of any size, a decoded sound) as (x, valid); None: as it is.
Convert = Callable[[object, torch.Generator | None], tuple[Tensor, Tensor | None] | None]


class Item(NamedTuple):
    """What an item of somebody's dataset is understood to be."""

    x: object  # a Tensor (C, *input) where it could be made one
    label: object = None
    how: tuple[str, ...] = ()  # what was read and changed, in words


def parted(item: object) -> Item:
    """Input and label of an item that is a dict or a pair, the input as it is."""
    if isinstance(item, Mapping):
        x_key, y_key = (next((key for key in keys if key in item), None) for keys in (X_KEYS, Y_KEYS))
        if x_key == "array" and is_sound(item):  # not the input of something, but a sound itself
            return Item(item, item.get(y_key))
        how = [f"{word} {key!r}" for word, key in (("input", x_key), ("label", y_key)) if key]
        return Item(item.get(x_key), item.get(y_key), tuple(how))
    return Item(*(*item, None, None)[:2]) if isinstance(item, tuple | list) else Item(item)


def is_picture(x: object) -> bool:
    """Is it a PIL image?"""
    return hasattr(x, "convert") and hasattr(x, "getbands")


def is_sound(x: object) -> bool:
    """Is it a decoded sound of a Hugging Face dataset, {"array": …, "sampling_rate": …}?"""
    return hasattr(x, "get_all_samples") or (isinstance(x, Mapping) and "array" in x and "sampling_rate" in x)


def understand(item: object, *, axes: int = 2) -> Item:
    """An item as input and label: a pair or a dict of arrays, tensors or PIL images, uint8 and H×W×C too.

    An input of fewer than `axes` axes gets one channel.
    """
    x: Any
    x, label, told = parted(item)
    how = list(told)
    if isinstance(x, Mapping):
        x = x.get("array")
    if is_picture(x):
        how.append("a PIL image")
        x = np.array(x if x.mode in ("L", "RGB") else x.convert("RGB"))
        x = x[..., None] if x.ndim == 2 else x
    if isinstance(x, np.ndarray) and x.dtype.kind in "iufb":
        x = torch.from_numpy(np.array(x))  # a copy, because torch takes neither reversed nor read-only arrays
    if not isinstance(x, Tensor):
        return Item(x, label, tuple(how))
    if x.ndim == 3 and x.shape[-1] in COLOURS and x.shape[0] not in COLOURS:
        x = x.permute(2, 0, 1)
        how.append("height × width × channels turned to channels first")
    if x.ndim < axes:
        x = x[None]
        how.append("one channel")
    if x.dtype == torch.uint8:
        x = x.float() / 255
        how.append("bytes divided by 255")
    return Item(x, label, tuple(how))


class DatasetSource:
    """Any map-style torch Dataset whose items are a tensor (C, *input) or a pair (tensor, label).

    The dataset's own random transforms become functions of the generator: the global generators of torch, numpy and
    random are seeded around each call and put back after it. Without a generator they are seeded by the index.
    Labels count where they are whole numbers; anything else beside the input is left aside (`understand`).
    `convert` makes samples of pictures and sounds of any size.
    """

    def __init__(self, dataset: Dataset[Any], *, shape: tuple[int, ...], convert: Convert | None = None) -> None:
        require_indexed(dataset)
        self.dataset, self.convert = dataset, convert
        self.shape = tuple(shape)
        self.labels: Sequence[int] | None = known_labels(dataset)
        self.classes: Sequence[str] | None = known_classes(dataset)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        seed = mix("dataset", index) if generator is None else int(torch.randint(2**62, (), generator=generator))
        with global_randomness(seed):
            try:
                item = self.dataset[index]
            except Exception as error:  # whatever a user's code raises concerns this sample only
                raise DataError(f"{self.describe(index)} raised {type(error).__name__}: {quoted(error)}.") from error
        try:
            converted = None if self.convert is None else self.convert(parted(item).x, generator)
        except DataError as error:
            raise DataError(f"{self.describe(index)}: {error}") from error
        if converted is None:
            return self._sample(item, index)
        return Sample(converted[0], self._label(index, parted(item).label), converted[1])

    def describe(self, index: int) -> str:
        return f"{type(self.dataset).__name__}[{index}]"

    def _sample(self, item: object, index: int) -> Sample:
        x, given, _ = understand(item, axes=len(self.shape))
        wanted = list(self.shape)
        if not isinstance(x, Tensor):
            wrong = (
                f"is a {type(item).__name__} holding {type(x).__name__}; expected a tensor of shape {wanted}, an array "
                "or a PIL image, or a pair or dict of it and a label."
            )
        elif list(x.shape) != wanted:
            wrong = (
                f"has shape {list(x.shape)}; expected {wanted} (channels, *input). Resize it, or set geometry to fit."
            )
        elif not x.is_floating_point():
            wrong = f"has dtype {x.dtype}; expected floating point, for example x.float() / 255."
        else:
            return Sample(x=x.detach().to("cpu", torch.float32), label=self._label(index, given))
        raise DataError(f"{self.describe(index)} {wrong}")

    def _label(self, index: int, given: object) -> int | None:
        return self.labels[index] if self.labels is not None else whole_number(given)


def require_indexed(dataset: object) -> None:
    """UsageError for a dataset without length and index, with the way to write a stream of Hugging Face to disk."""
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
        return
    hint = (
        " Write the stream once: datasets.Dataset.from_generator(lambda: iter(STREAM.decode(False)), "
        "features=STREAM.features).save_to_disk('FOLDER'); then train with data.root=FOLDER."
    )
    raise UsageError(
        f"{type(dataset).__name__} has no length or index; bridle needs a map-style dataset with __len__ and "
        "__getitem__, so that every sample has its place in the order and runs continue exactly."
        + (hint if type(dataset).__module__.startswith("datasets.") else "")
    )


def whole_number(value: object) -> int | None:
    """`value` as an int where it is a single whole number, of Python, numpy or torch; else None."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy() if value.dtype != torch.bfloat16 else None
    if isinstance(value, (np.ndarray, np.generic)):
        return int(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind in "iub" else None
    return int(value) if isinstance(value, int) else None


def known_labels(dataset: object) -> list[int] | None:
    """Labels a dataset publishes as `targets`, `labels` or a column, also through torch's Subset; None without any."""
    if isinstance(dataset, Subset):
        whole = known_labels(dataset.dataset)
        return None if whole is None else [whole[i] for i in dataset.indices]
    column = label_column(dataset)
    for found in (*(getattr(dataset, name, None) for name in ("targets", "labels")), column and dataset[column]):  # type: ignore[index]
        if isinstance(found, (Sequence, Tensor, np.ndarray)) and len(found) == len(dataset):  # type: ignore[arg-type]
            labels = [label for label in map(whole_number, found) if label is not None]
            if len(labels) == len(found):
                return labels
    return None


def label_column(dataset: object) -> str | None:
    """The column of labels of a Hugging Face dataset; None for other datasets, or without one."""
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or not isinstance(getattr(dataset, "features", None), Mapping):
        return None
    return next((key for key in Y_KEYS if key in columns), None)


def known_classes(dataset: object) -> list[str] | None:
    """The names a dataset publishes as `classes` or in `features`, also through torch's Subset; None without any."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    column = label_column(dataset)
    found = getattr(dataset, "classes", None) or (column and getattr(dataset.features[column], "names", None))  # type: ignore[attr-defined]
    return [str(name) for name in found] if isinstance(found, (list, tuple)) else None


@contextmanager
def global_randomness(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of torch, numpy and random inside the block; put them back after it."""
    ours, theirs = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)
