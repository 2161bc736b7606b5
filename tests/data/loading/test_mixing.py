"""Mixup and cutmix: shares that add up, labels by true area, and partners that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from bridle.config.data_schema import AugmentConfig
from bridle.data.arrays.memory import TensorSource
from bridle.data.loading.loader import Loader
from bridle.data.loading.mixing import Mixed, draw_share, paste_box
from bridle.data.sources import Sample, Viewed, class_shares
from bridle.errors import DataError, UsageError
from bridle.seeding import generator


class Flat:
    """Sample i is the number i everywhere, with class i; `bad` ones cannot be read, `broken` ones are not finite."""

    def __init__(
        self,
        shape: tuple[int, ...] = (1, 8, 6),
        *,
        count: int = 4,
        labelled: bool = True,
        bad: Sequence[int] = (),
        broken: Sequence[int] = (),
    ) -> None:
        self.shape, self.count, self.bad, self.broken = shape, count, bad, broken
        self.classes = [f"class {i}" for i in range(count)] if labelled else None
        self.labels = list(range(count)) if labelled else None

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if index in self.bad:
            raise DataError(f"{self.describe(index)} cannot be read")
        x = torch.full(self.shape, torch.nan if index in self.broken else float(index))
        return Sample(x, None if self.labels is None else index, torch.arange(4) <= index)

    def describe(self, index: int) -> str:
        return f"flat {index}"


class Waves(Flat):
    """A source that mixes for itself, and has views."""

    views = 3

    def load_mixed(self, index: int, other: int, share: float, generator: torch.Generator) -> Sample:
        if {index, other} & set(self.bad):
            raise DataError("one of the two cannot be read")
        return Sample(torch.full(self.shape, 100.0 + share), torch.tensor([float(index), float(other), share, 0.0]))

    def load_view(self, index: int, view: int) -> Sample:
        return Sample(torch.full(self.shape, 10.0 * index + view), index)


def mixup(**options: object) -> AugmentConfig:
    return AugmentConfig(**{"mixup": 0.8, **options})  # type: ignore[arg-type]


def test_mixup_mixes_pictures_and_labels_by_the_same_share() -> None:
    source, partners = Mixed(Flat(), mixup()), set()
    for draw in range(100):
        mixed = source.load(1, generator("mix", draw))
        assert isinstance(mixed.label, torch.Tensor)
        assert torch.isclose(mixed.label.sum(), torch.tensor(1.0))
        assert torch.allclose(mixed.x, (mixed.label * torch.arange(4.0)).sum().expand(1, 8, 6), atol=1e-5)
        partners.update(mixed.label.nonzero().flatten().tolist())
    assert partners == {0, 1, 2, 3}


@pytest.mark.parametrize("concentration", [0.1, 0.8, 5.0])
def test_the_share_follows_the_beta_distribution(concentration: float) -> None:
    randomness = generator("beta")
    shares = [draw_share(concentration, randomness) for _ in range(2000)]
    # Kolmogorov–Smirnov against SciPy's distribution; by chance p < 0.001 once in a thousand seeds
    assert stats.kstest(shares, stats.beta(concentration, concentration).cdf).pvalue > 0.001


def test_a_tiny_concentration_chooses_one_of_the_two() -> None:
    randomness = generator("tiny")
    shares = [draw_share(1e-9, randomness) for _ in range(50)]
    assert {round(share) for share in shares} == {0, 1}
    assert all(min(share, 1 - share) < 1e-6 for share in shares)


@pytest.mark.parametrize("shape", [(1, 8, 6), (3, 5, 16, 12), (2, 40)])
def test_cutmix_labels_have_the_share_of_the_pasted_area(shape: tuple[int, ...]) -> None:
    source = Mixed(Flat(shape), AugmentConfig(cutmix=1.0))
    mixes = 0
    for draw in range(100):
        mixed = source.load(1, generator("cut", draw))
        assert isinstance(mixed.label, torch.Tensor)
        assert torch.allclose(mixed.label[1], (mixed.x == 1).float().mean())
        assert torch.isclose(mixed.label.sum(), torch.tensor(1.0))
        assert torch.equal(mixed.x, mixed.x[:1].expand_as(mixed.x))  # all channels alike
        mixes += bool(0 < mixed.label[1] < 1)
    assert mixes > 40


def test_a_pasted_box_covers_what_the_share_asks() -> None:
    x, other = torch.zeros(3, 100, 200), torch.ones(3, 100, 200)
    for draw in range(30):
        share = draw / 30
        pasted, left = paste_box(x, other, share=share, generator=generator("paste", draw))
        assert abs(left - share) < 0.012
        rows, columns = pasted[0].nonzero().T
        assert len(rows) == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)  # a full box
        assert left == pytest.approx(1 - float(pasted.mean()))
    assert float(x.sum()) == 0


def test_with_both_on_either_is_drawn_half_of_the_time() -> None:
    source = Mixed(Flat((1, 30, 30)), AugmentConfig(mixup=1.0, cutmix=1.0))
    mixed = [source.load(0, generator("both", draw)).x for draw in range(200)]
    cut = [bool((x == x.round()).all()) for x in mixed if float(x.max()) > 0]
    assert 0.35 < np.mean(cut) < 0.65


def test_so_many_samples_are_mixed_as_the_probability_says() -> None:
    source = Mixed(Flat(), mixup(mix_probability=0.3))
    labels = [source.load(0, generator("often", draw)).label for draw in range(300)]
    assert 0.2 < np.mean([isinstance(label, torch.Tensor) for label in labels]) < 0.4
    assert {label for label in labels if not isinstance(label, torch.Tensor)} == {0}


@pytest.mark.parametrize("augment", [AugmentConfig(), mixup(enabled=False), mixup(mix_probability=0.0)])
def test_mixing_that_is_off_changes_nothing(augment: AugmentConfig) -> None:
    sample = Mixed(Flat(), augment).load(2, generator("off"))
    assert sample.label == 2
    assert torch.all(sample.x == 2)


def test_without_a_generator_a_sample_is_itself() -> None:
    sample = Mixed(Flat(), mixup()).load(2, None)
    assert sample.label == 2
    assert torch.all(sample.x == 2)


def test_a_token_is_real_where_it_is_real_in_either() -> None:
    whole = TensorSource(x=torch.rand(4, 1, 8, 6), labels=[0, 1, 2, 3], classes="abcd")
    assert Mixed(whole, mixup()).load(1, generator("valid")).valid is None
    for draw in range(20):
        mixed = Mixed(Flat(), mixup()).load(1, generator("valid", draw))
        assert isinstance(mixed.label, torch.Tensor)
        assert mixed.valid is not None
        assert int(mixed.valid.sum()) == 1 + max(1, int(mixed.label.nonzero().max()))


@pytest.mark.parametrize("source", [Flat(bad=[0, 2, 3]), Flat(broken=[0, 2, 3])])
def test_a_partner_that_cannot_be_used_leaves_the_sample_alone(source: Flat) -> None:
    for draw in range(20):
        sample = Mixed(source, mixup()).load(1, generator("bad", draw))
        assert torch.allclose(sample.x, torch.ones(1, 8, 6))
        shares = sample.label if isinstance(sample.label, torch.Tensor) else class_shares([1], 4)  # or with itself
        assert torch.allclose(shares, torch.tensor([0.0, 1.0, 0.0, 0.0]))


def test_a_sample_that_cannot_be_read_is_reported_itself() -> None:
    for source in (Flat(bad=[1]), Waves(bad=[1])):
        with pytest.raises(DataError, match="flat 1"):
            Mixed(source, mixup(mix_space="waveform")).load(1, generator("bad"))


def test_only_bad_samples_are_quarantined_never_those_they_were_mixed_with() -> None:
    source = Mixed(Flat(broken=[3]), mixup())
    loader = Loader(source=source, seed=0, phase="p", batch=4, mean=[0.0], std=[1.0])
    bad = {entry.index for step in loader.steps(0, 20) for batch in step for entry in batch.bad}
    assert bad == {3}


def test_sources_that_mix_waves_are_asked_to() -> None:
    mixed = Mixed(Waves(), mixup(mix_space="waveform")).load(1, generator("waves"))
    assert isinstance(mixed.label, torch.Tensor)
    assert float(mixed.label[0]) == 1.0
    assert float(mixed.x[0, 0, 0]) == pytest.approx(100 + float(mixed.label[2]))
    for augment in (mixup(), AugmentConfig(cutmix=1.0, mix_space="waveform")):
        assert float(Mixed(Waves(), augment).load(1, generator("waves")).x.max()) <= 3


def test_waves_with_a_bad_partner_stay_unmixed() -> None:
    for draw in range(20):
        sample = Mixed(Waves(bad=[0, 2, 3]), mixup(mix_space="waveform")).load(1, generator("bad", draw))
        assert float(sample.x[0, 0, 0]) in (1.0, pytest.approx(100.5, abs=0.5))


def test_views_pass_through() -> None:
    source = Mixed(Waves(), mixup())
    assert isinstance(source, Viewed)
    assert source.views == 3
    assert float(source.load_view(2, 1).x[0, 0, 0]) == 21
    assert Mixed(Flat(), mixup()).views == 1
    assert Mixed(Flat(), mixup()).load_view(2, 0).label == 2


def test_unlabelled_samples_mix_without_labels() -> None:
    source = Mixed(Flat(labelled=False), mixup())
    mixed = [source.load(1, generator("unlabelled", draw)) for draw in range(20)]
    assert all(sample.label is None for sample in mixed)
    assert any(not torch.all(sample.x == sample.x.round()) for sample in mixed)


def test_labels_without_class_names_say_what_is_missing() -> None:
    source = TensorSource(x=torch.zeros(4, 1, 2, 2), labels=[0, 1, 2, 3])
    with pytest.raises(UsageError, match="classes"):
        Mixed(source, mixup()).load(0, generator("names"))


def test_several_labels_keep_their_sum() -> None:
    class Several(Flat):
        def load(self, index: int, generator: torch.Generator | None) -> Sample:
            return Sample(torch.zeros(1, 2, 2), torch.tensor([1.0, 1.0, 0.0]))

    mixed = Mixed(Several(), mixup()).load(0, generator("several"))
    assert isinstance(mixed.label, torch.Tensor)
    assert torch.allclose(mixed.label, torch.tensor([1.0, 1.0, 0.0]))


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    def batches(workers: int) -> list[torch.Tensor]:
        source = Mixed(Flat(), AugmentConfig(mixup=0.8, cutmix=1.0, mix_probability=0.7))
        loader = Loader(source=source, seed=3, phase="p", batch=4, mean=[0.0], std=[1.0], workers=workers)
        return [batch.x for step in loader.steps(0, 3) for batch in step]

    for here, there in zip(batches(0), batches(2), strict=True):
        assert torch.equal(here, there)
