"""Batches: the same for every number of workers and ranks and after every restart; bad samples replaced and named."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from bridle.data.arrays.memory import TensorSource
from bridle.data.file_source import open_splits
from bridle.data.image.source import EXTENSIONS, Images
from bridle.data.listing.layouts import find_data
from bridle.data.loading.loader import Batch, Loader, normalise, sequential
from bridle.data.loading.moments import measure
from bridle.data.loading.order import Order
from bridle.data.sources import Sample, Source, real_values
from bridle.errors import DataError, UsageError
from bridle.geometry import Geometry
from bridle.seeding import generator


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + torch.rand(x.shape, generator=generator)


class Numbers(TensorSource):
    """Sample i is (1, 4) of the number i, labelled i; some cannot be loaded, by OSError if odd."""

    def __init__(self, size: int, bad: set[int] | None = None, pads: bool = False) -> None:
        x = torch.arange(float(size)).reshape(size, 1, 1).expand(size, 1, 4)
        super().__init__(x=x, labels=range(size), augment=jitter)
        self.bad, self.pads = bad or set(), pads

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if index in self.bad:
            raise OSError(5, "input/output error") if index % 2 else DataError(f"{self.describe(index)} is broken.")
        sample = super().load(index, generator)
        return sample._replace(valid=torch.tensor([True, False])) if self.pads and index % 3 == 0 else sample


def loader(source: Source, *, batch: int = 6, **options: object) -> Loader:
    return Loader(source=source, seed=7, phase="encoder", batch=batch, mean=[0.0], std=[1.0], **options)  # type: ignore[arg-type]


def rows(batches: list[Batch]) -> Batch:
    """Some batches as one, to compare."""
    labels = [batch.label for batch in batches if batch.label is not None]
    return Batch(
        x=torch.cat([batch.x for batch in batches]),
        index=torch.cat([batch.index for batch in batches]),
        label=torch.cat(labels) if labels else None,
        valid=None,
        bad=tuple(bad for batch in batches for bad in batch.bad),
        rows=slice(batches[0].rows.start, batches[-1].rows.stop),
    )


def assert_same(a: Batch, b: Batch) -> None:
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.index, b.index)
    assert (a.label is None and b.label is None) or torch.equal(a.label, b.label)  # type: ignore[arg-type]
    assert a.rows == b.rows


@pytest.fixture
def pictures(tmp_path: Path) -> Source:
    rng = np.random.default_rng(0)
    for i in range(12):
        (tmp_path / str(i % 3)).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(tmp_path / str(i % 3) / f"{i}.jpg")
    (tmp_path / "0" / "0.jpg").write_bytes(b"not a picture")
    found = find_data(root=str(tmp_path), manifest=None, layout="folders", extensions=EXTENSIONS)
    return open_splits(found, partial(Images, geometry=Geometry(3, (8, 8), (4, 4)))).train


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_gives_the_same_bits(pictures: Source, workers: int) -> None:
    here = list(loader(pictures, micro_batch=4).steps(0, 5))
    there = list(loader(pictures, micro_batch=4, workers=workers).steps(0, 5))
    assert len(here) == len(there) == 5
    for a, b in zip(here, there, strict=True):
        assert [batch.rows for batch in a] == [slice(0, 4), slice(4, 6)]
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
            assert one.bad == other.bad


def test_the_thread_count_of_the_main_process_does_not_reach_the_samples() -> None:
    class Threads(Numbers):
        def load(self, index: int, generator: torch.Generator | None) -> Sample:
            return Sample(torch.full((1, 4), float(torch.get_num_threads())))

    torch.set_num_threads(2)
    try:
        batch = next(loader(Threads(4)).steps(0, 1))[0]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert batch.x.unique().tolist() == [1]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [None, 1, 2, 3])
def test_ranks_share_the_rows_of_the_global_batch_in_order(world_size: int, micro_batch: int | None) -> None:
    source = Numbers(30)
    whole = [rows(step) for step in loader(source, batch=12).steps(0, 4)]
    shares = [
        list(loader(source, batch=12, rank=rank, world_size=world_size, micro_batch=micro_batch).steps(0, 4))
        for rank in range(world_size)
    ]
    for step in range(4):
        micro_batches = [batch for share in shares for batch in share[step]]
        assert all(len(batch.x) <= (micro_batch or 12) for batch in micro_batches)
        assert all(len(batch.x) == batch.rows.stop - batch.rows.start for batch in micro_batches)
        assert_same(rows(micro_batches), whole[step])


def test_a_resumed_run_sees_the_rest_of_the_steps() -> None:
    source = Numbers(10)
    tail = list(loader(source).steps(0, 6))[3:]
    resumed = list(loader(source).steps(3, 6))
    for a, b in zip(tail, resumed, strict=True):
        assert_same(rows(a), rows(b))


def test_steps_go_through_epochs_without_a_gap() -> None:
    seen = torch.cat([batch.index for step in loader(Numbers(9)).steps(0, 3) for batch in step])  # 18 rows, 2 epochs
    assert sorted(seen[:9].tolist()) == list(range(9))
    assert sorted(seen[9:].tolist()) == list(range(9))


def test_a_batch_larger_than_the_data_set_repeats_it() -> None:
    batch = next(loader(Numbers(4), batch=10).steps(0, 1))[0]
    assert sorted(torch.bincount(batch.index).tolist()) == [2, 2, 3, 3]


def test_a_row_is_augmented_by_its_own_generator_and_carries_its_label() -> None:
    source = Numbers(9)
    batch = next(loader(source).steps(2, 3))[0]
    index = int(Order(size=9, seed=7, phase="encoder").at(2 * 6 + 4))
    expected = index + torch.rand(1, 4, generator=generator(7, "encoder", 2, "augment", 16))
    assert batch.label is not None
    assert (int(batch.index[4]), int(batch.label[4])) == (index, index)
    assert torch.equal(batch.x[4], expected)


def test_augmentation_can_be_left_out() -> None:
    batch = next(loader(Numbers(9), augment=False).steps(0, 1))[0]
    assert torch.equal(batch.x[:, 0, 0], batch.index.float())


def test_unlabelled_data_has_no_labels_and_unpadded_data_no_valid() -> None:
    source = TensorSource(x=torch.randn(4, 1, 4, generator=generator(0)))
    batch = next(loader(source).steps(0, 1))[0]
    assert batch.label is None
    assert batch.valid is None


def test_padding_is_marked_where_some_samples_have_it() -> None:
    batch = next(loader(Numbers(6, pads=True)).steps(0, 1))[0]
    assert batch.valid is not None
    assert batch.valid.tolist() == [[True, index % 3 != 0] for index in batch.index.tolist()]


def test_samples_are_normalised_per_channel() -> None:
    x = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])  # (1, 2, 2)
    apart = normalise(x, mean=torch.tensor([1.0, 10.0]), std=torch.tensor([0.5, 5.0]))
    assert apart.tolist() == [[[0, 2], [0, 2]]]
    together = normalise(x, mean=torch.tensor([1.0]), std=torch.tensor([1.0]))
    assert together.tolist() == [[[0, 1], [9, 19]]]


def test_moments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="mean has 3 numbers, the samples have 1 channels"):
        next(sequential(Numbers(2), batch=2, mean=[0.0, 0.0, 0.0], std=[1.0]))
    with pytest.raises(UsageError, match="every std above 0"):
        next(sequential(Numbers(2), batch=2, mean=[0.0], std=[0.0]))


def test_a_batch_that_ranks_cannot_share_evenly_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 4"):
        loader(Numbers(8), world_size=4)


# bad samples


def test_a_bad_sample_is_replaced_and_listed_once_with_its_reason() -> None:
    batch = next(loader(Numbers(6, bad={2, 3}), batch=12).steps(0, 1))[0]
    assert not {2, 3} & set(batch.index.tolist())
    assert torch.equal(batch.label, batch.index)  # type: ignore[arg-type]
    assert sorted(batch.bad) == [
        (2, "sample 2", "sample 2 is broken."),
        (3, "sample 3", "sample 3 cannot be read: input/output error."),
    ]


def test_good_samples_keep_their_rows_beside_bad_ones() -> None:
    sound = rows(next(loader(Numbers(12)).steps(0, 1)))
    some = rows(next(loader(Numbers(12, bad={int(sound.index[2])})).steps(0, 1)))
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(sound.x[kept], some.x[kept])
    assert some.index[2] != sound.index[2]


@pytest.mark.parametrize(("workers", "world_size"), [(2, 1), (0, 2), (0, 3)])
def test_replacements_do_not_depend_on_workers_or_ranks(workers: int, world_size: int) -> None:
    source = Numbers(20, bad=set(range(0, 20, 3)))
    expected = [rows(step) for step in loader(source).steps(0, 4)]
    shares = [
        list(loader(source, workers=workers, rank=rank, world_size=world_size).steps(0, 4))
        for rank in range(world_size)
    ]
    for step in range(4):
        together = rows([batch for share in shares for batch in share[step]])
        assert_same(together, expected[step])
        assert set(together.bad) == set(expected[step].bad)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_bad_samples_is_an_error_that_says_so(workers: int) -> None:
    with pytest.raises(
        DataError, match=r"^too many bad samples: 20 draws in a row .* sample \d .*\. Mend or remove"
    ) as caught:
        list(loader(Numbers(2, bad={0, 1}), batch=1, workers=workers).steps(0, 2))
    assert "\n" not in str(caught.value)


def test_numbers_that_are_not_finite_make_a_sample_bad() -> None:
    source = TensorSource(x=torch.tensor([[[1.0, 2.0]], [[float("nan"), 0.0]]]))
    batch = next(loader(source, batch=4).steps(0, 1))[0]
    assert batch.index.tolist() == [0, 0, 0, 0]
    assert [bad.index for bad in batch.bad] == [1]
    assert "not finite" in batch.bad[0].reason


# the first samples, for codebook starts


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_first_samples_come_in_the_same_batches_at_every_world_size(world_size: int) -> None:
    whole = list(loader(Numbers(50), batch=30).first(23, rows=4))
    assert [len(batch.x) for batch in whole] == [4, 4, 4, 4, 4, 3]
    ordered = Order(size=50, seed=7, phase="encoder").at(range(23)).tolist()
    assert torch.cat([batch.index for batch in whole]).tolist() == ordered
    shares = [
        batch
        for rank in range(world_size)
        for batch in loader(Numbers(50), batch=30, rank=rank, world_size=world_size).first(23, rows=4)
    ]
    for a, b in zip(whole, shares, strict=True):
        assert_same(a, b)


def test_the_first_samples_are_not_augmented_and_not_repeated() -> None:
    batches = list(loader(Numbers(5)).first(100, rows=2))
    found = torch.cat([batch.index for batch in batches])
    assert sorted(found.tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(torch.cat([batch.x for batch in batches])[:, 0, 0], found.float())


# evaluation


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_sample_once_in_order(workers: int) -> None:
    batches = list(sequential(Numbers(11), batch=4, mean=[1.0], std=[2.0], workers=workers))
    assert torch.cat([batch.index for batch in batches]).tolist() == list(range(11))
    assert torch.equal(torch.cat([batch.x for batch in batches])[:, 0, 0], (torch.arange(11.0) - 1) / 2)
    assert [batch.rows for batch in batches] == [slice(0, 4), slice(4, 8), slice(8, 11)]


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_stops_at_a_bad_file_and_names_it(pictures: Source, workers: int) -> None:
    with pytest.raises(DataError, match=r"0\.jpg' cannot be read as an image") as caught:
        list(sequential(pictures, batch=4, mean=[0.0], std=[1.0], workers=workers))
    assert "\n" not in str(caught.value)


# moments


def test_measured_moments_are_those_of_all_values_in_float64() -> None:
    x = 1e4 + torch.randn(40, 3, 5, generator=generator(1)) * torch.tensor([0.1, 1.0, 10.0])[:, None]
    found = measure(TensorSource(x=x))
    values = x.double().permute(1, 0, 2).flatten(1).numpy()
    np.testing.assert_allclose(found.mean, values.mean(1), rtol=1e-12)
    np.testing.assert_allclose(found.std, values.std(1), rtol=1e-9)
    assert (found.count, found.constant) == (40, ())


def test_measuring_a_part_spreads_over_the_source() -> None:
    found = measure(Numbers(1000), limit=100)
    assert found.count == 100
    assert abs(found.mean[0] - 499.5) < 100  # three standard errors; the first 100 alone would give 49.5


def test_measuring_skips_bad_samples() -> None:
    found = measure(Numbers(5, bad={0, 1, 2}))
    assert (found.mean, found.count) == ((3.5,), 2)


def test_measuring_leaves_padding_out() -> None:
    source = Numbers(2, pads=True)  # of sample 0 only the first of two tokens is real
    assert measure(source, grid=(2,)).mean[0] == pytest.approx(4 / 6)  # two zeros and four ones
    assert measure(source).mean[0] == pytest.approx(1 / 2)


def test_real_values_are_those_of_real_tokens() -> None:
    valid = torch.tensor([True, True, True, False, False, False])  # on a grid of 2 × 3
    found = real_values(valid[None], (4, 6), (2, 3))[0]
    assert found[:2].all() and not found[2:].any()


def test_measuring_with_workers_gives_the_same_bits() -> None:
    source = Numbers(20, bad={3})
    assert measure(source, workers=2) == measure(source)


def test_constant_data_is_an_error() -> None:
    with pytest.raises(DataError, match=r"all values of the 3 samples measured are the same, \[2\.0\]"):
        measure(TensorSource(x=torch.full((3, 1, 4), 2.0)))


def test_one_constant_channel_gets_a_std_of_one_and_is_named() -> None:
    x = torch.stack([torch.full((3, 4), 2.0), torch.randn(3, 4, generator=generator(0))], dim=1)
    found = measure(TensorSource(x=x))
    assert found.constant == (0,)
    assert found.std[0] == 1


def test_data_without_a_usable_sample_cannot_be_measured() -> None:
    with pytest.raises(DataError, match=r"none of the 1 samples tried can be used; the last one: sample 0 is broken"):
        measure(Numbers(1, bad={0}))
