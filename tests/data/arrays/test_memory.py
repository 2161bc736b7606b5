"""Tensors and torch datasets as sources."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from bridle.data.arrays.memory import DatasetSource, TensorSource, understand
from bridle.errors import DataError, UsageError


class Noisy(Dataset[tuple[Tensor, int]]):
    """Items that draw from all three global generators."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [float(index), float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([drawn]), index % 2


class Items(Dataset[object]):
    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        if isinstance(self.items[index], Exception):
            raise self.items[index]  # type: ignore[misc]
        return self.items[index]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_random_transforms_follow_the_generator_that_is_passed_in() -> None:
    source = DatasetSource(Noisy(), shape=(1, 4))
    assert torch.equal(source.load(2, drawn(5)).x, source.load(2, drawn(5)).x)
    different = source.load(2, drawn(5)).x != source.load(2, drawn(6)).x
    assert different.tolist() == [[False, True, True, True]]


def test_without_a_generator_an_item_is_always_the_same() -> None:
    source = DatasetSource(Noisy(), shape=(1, 4))
    first = source.load(1, None).x
    torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(source.load(1, None).x, first)
    assert not torch.equal(source.load(0, None).x[0, 1:], first[0, 1:])


def test_the_global_generators_are_put_back() -> None:
    source = DatasetSource(Noisy(), shape=(1, 4))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (float(torch.rand(())), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    source.load(0, drawn(0))
    assert (float(torch.rand(())), np.random.rand(), random.random()) == expected


def test_the_global_generators_are_put_back_after_an_error() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(DataError, match=r"Items\[0\] raised ValueError: 'broken'"):
        DatasetSource(Items(ValueError("broken")), shape=(1,)).load(0, drawn(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("label", [3, np.int64(3), torch.tensor(3), torch.tensor([3]), np.array([3])])
def test_a_label_of_any_library_counts(label: object) -> None:
    assert DatasetSource(Items((torch.zeros(2), label)), shape=(2,)).load(0, None).label == 3


@pytest.mark.parametrize("extra", [0.5, torch.tensor([1, 2]), {"box": 1}, "dog", torch.tensor(1.0)])
def test_what_is_not_a_whole_number_is_no_label(extra: object) -> None:
    assert DatasetSource(Items((torch.zeros(2), extra)), shape=(2,)).load(0, None).label is None


def test_items_may_be_bare_tensors_arrays_or_short_tuples() -> None:
    source = DatasetSource(Items(torch.ones(2), np.ones(2)[::-1], (torch.ones(2),)), shape=(2,))
    for index in range(3):
        sample = source.load(index, None)
        assert sample.x.dtype == torch.float32
        assert sample.x.tolist() == [1, 1]
        assert sample.label is None


def test_a_wrong_shape_names_both_shapes() -> None:
    with pytest.raises(DataError, match=r"Items\[0\] has shape \[3, 5\]; expected \[3, 4\]"):
        DatasetSource(Items(torch.zeros(3, 5)), shape=(3, 4)).load(0, None)


def test_whole_numbers_are_refused_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"dtype torch.int16; expected floating point, for example x.float\(\) / 255"):
        DatasetSource(Items(torch.zeros(1, 2, dtype=torch.int16)), shape=(1, 2)).load(0, None)


@pytest.mark.parametrize("item", ["picture", {"z": torch.zeros(2)}, (), None, np.array(["a", "b"])])
def test_an_item_without_a_tensor_is_refused(item: object) -> None:
    with pytest.raises(DataError, match=r"expected a tensor of shape \[2\]"):
        DatasetSource(Items(item), shape=(2,)).load(0, None)


def test_a_stream_without_index_is_refused() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.zeros(2)])

    with pytest.raises(UsageError, match="Stream has no length or index"):
        DatasetSource(Stream(), shape=(2,))


def test_published_labels_are_known_without_loading() -> None:
    data = TensorDataset(torch.zeros(4, 2))
    assert DatasetSource(data, shape=(2,)).labels is None
    data.targets = torch.tensor([3, 1, 0, 2])  # type: ignore[attr-defined]
    assert DatasetSource(data, shape=(2,)).labels == [3, 1, 0, 2]
    assert DatasetSource(Subset(data, [2, 0]), shape=(2,)).labels == [0, 3]
    assert DatasetSource(Subset(data, [2, 0]), shape=(2,)).load(1, None).label == 3


def test_published_classes_are_known_also_through_a_subset() -> None:
    assert DatasetSource(Subset(Noisy(), [1]), shape=(1, 4)).classes == ["a", "b"]


def test_a_tensor_source_augments_only_with_a_generator() -> None:
    source = TensorSource(x=torch.zeros(2, 1, 3), labels=[5, 6], augment=lambda x, g: x + torch.rand((), generator=g))
    assert source.load(1, None).x.tolist() == [[0, 0, 0]]
    assert source.load(1, None).label == 6
    assert torch.equal(source.load(0, drawn(1)).x, torch.rand((), generator=drawn(1)).expand(1, 3))


def test_labels_that_do_not_fit_the_samples_are_an_error() -> None:
    with pytest.raises(DataError, match="3 samples came with 2 labels"):
        TensorSource(x=torch.zeros(3, 1, 2), labels=[0, 1])


PIXELS = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)  # height, width, channels


@pytest.mark.parametrize(
    ("item", "label"),
    [
        ({"image": Image.fromarray(PIXELS), "label": 3}, 3),
        ({"pixel_values": PIXELS, "name": "a"}, None),
        ((Image.fromarray(PIXELS), np.int64(2)), 2),
        ([torch.from_numpy(PIXELS), 1], 1),
        (PIXELS.transpose(2, 0, 1) / np.float32(255), None),
    ],
)
def test_items_as_people_write_them_are_understood(item: object, label: int | None) -> None:
    found = DatasetSource(Items(item), shape=(3, 4, 5)).load(0, None)
    assert torch.equal(found.x, torch.from_numpy(PIXELS.transpose(2, 0, 1).copy()) / 255)
    assert found.label == label


def test_a_sound_in_a_dict_and_a_grey_picture_have_one_channel() -> None:
    sound = understand({"audio": {"array": np.zeros(7), "sampling_rate": 16_000}, "label": 1})
    grey = understand(Image.new("L", (5, 4)))
    assert isinstance(sound.x, torch.Tensor) and isinstance(grey.x, torch.Tensor)
    assert (tuple(sound.x.shape), tuple(grey.x.shape)) == ((1, 7), (1, 4, 5))
    assert sound.how == ("input 'audio'", "label 'label'", "one channel")
    assert "a PIL image" in grey.how and "bytes divided by 255" in grey.how
