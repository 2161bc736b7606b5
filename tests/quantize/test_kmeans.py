"""k-means for codebook starts: distinct seeds, Lloyd steps, empty clusters, and data that do not suffice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bridle.quantize.kmeans import Clusters, CodebookWarning, choose_seeds, first_distinct, kmeans, lloyd, row_keys
from bridle.quantize.nearest import nearest

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inertia(points: Tensor, centres: Tensor) -> float:
    return float(torch.cdist(points.double(), centres.double()).amin(1).square().sum())


def test_well_separated_groups_are_found_exactly() -> None:
    groups = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    points = (groups[:, None] + 0.1 * torch.randn(4, 25, 2, generator=seeded())).reshape(-1, 2)
    means = points.view(4, 25, 2).mean(1)
    # Random seeds may leave two groups to share a centre; the best of a few tries is the grouping itself.
    tries = [kmeans(points, 4, iterations=10, generator=seeded(s)).centres for s in range(8)]
    best = min(tries, key=lambda centres: inertia(points, centres))
    torch.testing.assert_close(best[nearest(means, best).pick], means, rtol=1e-5, atol=1e-5)


def test_one_lloyd_step_worked_by_hand() -> None:
    points = torch.tensor([[0.0], [1.0], [5.0], [7.0]])
    centres, made = lloyd(points, torch.tensor([[0.0], [5.5]]), iterations=1)
    assert centres.tolist() == [[0.5], [6.0]]
    assert made == 1


def test_inertia_never_rises_from_step_to_step() -> None:
    points = torch.randn(500, 8, generator=seeded())
    seeds = points[:16]
    path = [inertia(points, lloyd(points, seeds, iterations=i)[0]) for i in range(8)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(path))


def test_it_stops_when_nothing_moves_any_more() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    centres, made = lloyd(points, torch.tensor([[0.0], [10.0]]), iterations=50)
    assert centres.tolist() == [[0.5], [10.5]]
    assert made < 5


def test_seeds_are_distinct_points_even_among_many_duplicates() -> None:
    points = torch.cat([torch.zeros(1000, 3), torch.arange(1, 31).float()[:, None].expand(30, 3)])
    seeds = choose_seeds(points, 20, generator=seeded())
    assert seeds.distinct == 20
    assert len(torch.unique(seeds.centres, dim=0)) == 20


def test_minus_zero_and_zero_are_the_same_point() -> None:
    keys = row_keys(torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, -1.0]]))
    assert keys[0] == keys[1] != keys[2]


def test_different_rows_have_different_keys() -> None:
    rows = torch.cartesian_prod(*[torch.arange(-8.0, 8.0)] * 4)  # 65,536 small integers, permuted and negated too
    assert len(torch.unique(row_keys(rows))) == len(rows)


def test_the_first_of_each_kind_is_kept_in_order() -> None:
    points = torch.tensor([[1.0], [1.0], [2.0], [1.0], [3.0]])
    assert first_distinct(points, torch.tensor([3, 2, 0, 1, 4]), 2).tolist() == [3, 2]
    assert first_distinct(points, torch.tensor([3, 2, 0, 1, 4]), 9).tolist() == [3, 2, 4]


def test_an_empty_cluster_takes_the_farthest_point() -> None:
    points = torch.tensor([[0.0], [1.0], [2.0], [40.0]])
    centres, _ = lloyd(points, torch.tensor([[1.0], [-500.0]]), iterations=1)  # nobody is near −500
    assert centres.tolist() == [[1.0], [40.0]]


def test_empty_clusters_take_different_points_although_the_farthest_are_equal() -> None:
    points = torch.tensor([[0.0], [1.0], [9.0], [9.0], [9.0], [5.0]])
    centres, _ = lloyd(points, torch.tensor([[0.0], [-500.0], [-600.0]]), iterations=1)
    assert sorted(centres[1:].flatten().tolist()) == [5.0, 9.0]


def test_relabelling_by_differences_gives_the_sums_from_scratch() -> None:
    points = torch.randn(300, 4, generator=seeded())
    old, new = (torch.randint(5, (300,), generator=seeded(s)) for s in (1, 2))
    new = torch.where(torch.arange(300) % 4 == 0, new, old)  # few enough to be moved one by one
    clusters, fresh = Clusters.empty(torch.zeros(5, 4)), Clusters.empty(torch.zeros(5, 4))
    clusters.relabel(points, None, old)
    clusters.relabel(points, old, new)
    fresh.relabel(points, None, new)
    assert torch.equal(clusters.n, fresh.n)
    torch.testing.assert_close(clusters.sums, fresh.sums, rtol=0, atol=1e-12)


def test_too_few_distinct_points_give_the_points_and_jittered_copies_and_a_warning() -> None:
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    with pytest.warns(CodebookWarning, match="only 2 distinct points for 5 codes"):
        found = kmeans(points, 5, iterations=10, generator=seeded())
    assert found.distinct == 2
    assert {tuple(row) for row in found.centres[:2].tolist()} == {(1.0, 0.0), (0.0, 1.0)}
    assert len(torch.unique(found.centres, dim=0)) == 5
    assert torch.cdist(found.centres[2:], points).amin(1).max() < 0.01


def test_constant_points_give_finite_distinct_codes() -> None:
    for value in (0.0, 3.0):
        with pytest.warns(CodebookWarning, match="only 1 distinct"):
            centres = kmeans(torch.full((50, 4), value), 8, iterations=10, generator=seeded()).centres
        assert centres.isfinite().all()
        assert len(torch.unique(centres, dim=0)) == 8


def test_the_same_seed_gives_the_same_centres() -> None:
    points = torch.randn(300, 6, generator=seeded())
    first, second = (kmeans(points, 10, iterations=5, generator=seeded(3)).centres for _ in range(2))
    other = kmeans(points, 10, iterations=5, generator=seeded(4)).centres
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
