"""Reference curves of the shipped recipes, and a check that warns when a run of a recipe leaves the expected band.

bridle/config/reference_curves/RECIPE.json holds, for each method (sizes of the codebooks) and phase, a few
steps with mean and spread of loss, token accuracy of the first stage and code usage of every stage, over the
logged rows of some seeds around that step; `benchmarks/expected_curves.py` writes it.
A row at such a step is outside the band if a value v has

    |v − mean| > max(4·spread, floor),  floor = max(10 % of the mean, what is small for this quantity)

Few seeds give a poor estimate of the spread between seeds, hence the floor. Only a run of the unchanged recipe is
compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from bridle.config import Config, differences, load_config, recipe_names, with_statistics
from bridle.config.load import shipped_names
from bridle.errors import BridleError
from bridle.runs.folder import FREE_KEYS

FORMAT = 1
WIDTH = 4.0  # spreads on either side of the mean
SHARE = 0.1  # of the mean, that are always allowed
SAME_STATISTICS = 0.01  # of a standard deviation, by which measured means and deviations may differ
# Keys that do not change a curve, or only as another seed does.
IGNORED = (*FREE_KEYS, "seed", "data.mean", "data.std", "data.cache_mb", "data.bad_share")


class Quantity(NamedTuple):
    """A logged figure: its name in messages, a change that is small, and advice for values below and above the band."""

    words: str
    floor: float
    low: str
    high: str


SLOW = "check that the data is the recipe's and that no steps were skipped"
EASY = "the codes are easier to predict than they should be; check the data for constant or repeated samples"
DYING = "codes go out of use; `bridle codebooks` shows which and what to try"
OTHER = "more codes are used than by the recipe's data; check that the data is the recipe's"
QUANTITIES = {
    "loss": Quantity("loss", 0.0, EASY, SLOW),
    "token_accuracy": Quantity("token accuracy", 0.05, SLOW, EASY),
    "code_usage": Quantity("code usage", 0.1, DYING, OTHER),
}


class Band(NamedTuple):
    """The expected range of a figure at one step."""

    mean: float
    spread: float

    def allowance(self, floor: float) -> float:
        """Largest distance from the mean that is inside the band."""
        return max(WIDTH * self.spread, SHARE * abs(self.mean), floor)


Point = Mapping[str, Sequence[Band]]  # quantity -> one band per stage (or the first stage's, or the only one)


class Curves(NamedTuple):
    """The reference of one recipe and method."""

    mean: tuple[float, ...]  # of the data, per channel
    std: tuple[float, ...]
    phases: Mapping[str, Mapping[int, Point]]  # phase key -> step -> what is expected

    def fit(self, config: Config) -> bool:
        """Does this run normalise its data as the reference runs did? Other data usually has other statistics."""
        for expected, given in ((self.mean, config.data.mean), (self.std, config.data.std)):
            if given is None or len(given) != len(expected):
                return False
            if any(abs(a - b) > SAME_STATISTICS * s for a, b, s in zip(given, expected, self.std, strict=True)):
                return False
        return True


def method_key(sizes: Sequence[int]) -> str:
    """Name of a quantizer by its codebooks: 4x256, or 256+128 where they differ."""
    return f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))


def recipe_of(config: Config) -> Config | None:
    """The shipped recipe of the config's name with the same codebooks; None if there is none of this name."""
    if config.name not in recipe_names():
        return None
    sizes = list(config.quantizer.sizes)
    recipe = load_config(config.name, [f"quantizer.codebooks={len(sizes)}", f"quantizer.codes={sizes}"])
    same = recipe.quantizer.model_copy(update={"codes": config.quantizer.codes})  # 256 and [256, 256] are the same
    return recipe.model_copy(update={"quantizer": same})


def changes(config: Config, recipe: Config) -> list[str]:
    """Settings of a run that move its curves away from the recipe's."""
    found = [line for line in differences(recipe, config) if not line.startswith(IGNORED)]
    if recipe.data.mean is not None and recipe.data.std is not None:  # else measured, and compared by their values
        given = with_statistics(config, recipe.data.mean, recipe.data.std)
        found += [line for line in differences(given, config) if line.startswith("data.")]
    return found


def curve_names() -> list[str]:
    """The recipes with a reference."""
    return shipped_names("reference_curves")


def read_curves(recipe: str, method: str) -> Curves | None:
    """The shipped reference of a recipe and method; None if there is none."""
    if recipe not in curve_names():
        return None
    file = resources.files("bridle.config") / "reference_curves" / f"{recipe}.json"
    return parse_curves(json.loads(file.read_text(encoding="utf-8")), method)


def parse_curves(document: Mapping[str, Any], method: str) -> Curves | None:
    """The reference of one method in a file's content."""
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}, expected {FORMAT}")
    found, statistics = document["methods"].get(method), document["statistics"]
    if found is None:
        return None
    phases = {
        key: {
            int(step): {name: [Band(*map(float, band)) for band in bands] for name, bands in point.items()}
            for step, point in points.items()
        }
        for key, points in found["phases"].items()
    }
    return Curves(tuple(map(float, statistics["mean"])), tuple(map(float, statistics["std"])), phases)


class CurveWatch:
    """Warns once per quantity when a phase leaves the band of its recipe; silent where there is no reference."""

    def __init__(self, key: str, points: Mapping[int, Point], problem: str | None = None) -> None:
        self.key, self.points = key, points
        self.warned: set[str] = set()
        self.problem = problem  # why there is nothing to compare with; returned with the first row

    @classmethod
    def of(cls, config: Config, key: str) -> CurveWatch:
        """The watch of one phase of a run. A reference that cannot be read does not keep a run from running."""
        try:
            recipe = recipe_of(config)
            if recipe is None or changes(config, recipe):
                return cls(key, {})
            curves = read_curves(config.name, method_key(config.quantizer.sizes))
        except (BridleError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return cls(key, {}, f"the expected curves of {config.name} cannot be read ({error}); nothing is compared.")
        return cls(key, curves.phases.get(key, {}) if curves is not None and curves.fit(config) else {})

    def look(self, row: Mapping[str, Any]) -> list[str]:
        """Warnings for the quantities of a row of metrics that are outside their band for the first time."""
        found = [] if self.problem is None else [self.problem]
        self.problem = None
        for name, bands in self.points.get(row["step"], {}).items():
            value, quantity = row.get(name), QUANTITIES.get(name)
            if value is None or quantity is None or name in self.warned:  # a skipped step has no figures
                continue
            text = describe_farthest(value if isinstance(value, list) else [value], bands, quantity)
            if text is not None:
                self.warned.add(name)
                found.append(f"{self.key} step {row['step']}: {text}.")
        return found


def describe_farthest(values: Sequence[float], bands: Sequence[Band], quantity: Quantity) -> str | None:
    """The stage that is farthest outside its band, as a message; None if all are inside."""
    pairs = list(zip(values, bands, strict=False))  # token accuracy is logged for all stages, expected for the first
    far = [abs(v - band.mean) / (band.allowance(quantity.floor) or math.inf) for v, band in pairs]
    if not far or max(far) <= 1.0:
        return None
    stage = far.index(max(far))
    value, band = pairs[stage]
    where = f" of stage {stage + 1}" if len(pairs) > 1 else ""
    advice = quantity.low if value < band.mean else quantity.high
    expected = f"{band.mean:.3g} ± {band.allowance(quantity.floor):.2g}"
    return f"{quantity.words}{where} {value:.3g}, expected {expected} (docs/evaluating.md#expected-curves); {advice}"
