"""What the curves of a shipped recipe look like, and a watch that says when a run of it leaves the band.

bridle/config/reference_curves/RECIPE.json holds, for each method (sizes of the codebooks) and phase, a few
steps with mean and spread of loss, token accuracy of the first stage and code usage of every stage, over the
logged rows of some seeds around that step; `benchmarks/expected_curves.py` writes it.
A row at such a step is outside if a value v has

    |v − mean| > max(4·spread, floor),  floor = max(10 % of the mean, what is small for this quantity)

Few seeds say little about the spread between seeds: the floor stands in for it. Only a run of the recipe itself is
compared; whoever changes a setting that moves the curve has nothing to expect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from bridle.config import Config, differences, load_config, recipe_names
from bridle.errors import BridleError
from bridle.runs.folder import FREE_KEYS
from bridle.train.run import with_statistics

FORMAT = 1
WIDTH = 4.0  # spreads on either side of the mean
SHARE = 0.1  # of the mean, that are always allowed
SAME_STATISTICS = 0.01  # of a standard deviation, by which measured means and deviations may differ
# What moves no curve, or moves it only as another seed does.
IGNORED = (*FREE_KEYS, "seed", "data.mean", "data.std", "data.cache_mb", "data.bad_share")


class Quantity(NamedTuple):
    """How a logged figure is called, what is a small change of it, and what to look at when it is off."""

    words: str
    floor: float
    low: str
    high: str


SLOW = "check that the data is the recipe's and that no steps were skipped"
EASY = "the codes are easier to predict than they should be; check the data for constant or repeated samples"
QUANTITIES = {
    "loss": Quantity("loss", 0.0, EASY, SLOW),
    "token_accuracy": Quantity("token accuracy", 0.05, SLOW, EASY),
    "code_usage": Quantity(
        "code usage",
        0.1,
        "codes go out of use; `bridle codebooks` tells which and what to try",
        "more codes are used than by the recipe's data; check that the data is the recipe's",
    ),
}


class Band(NamedTuple):
    """What a figure is expected to be at one step."""

    mean: float
    spread: float

    def allowance(self, floor: float) -> float:
        return max(WIDTH * self.spread, SHARE * abs(self.mean), floor)


Point = Mapping[str, Sequence[Band]]  # quantity -> one band per stage (or the first stage's, or the only one)


def method_key(sizes: Sequence[int]) -> str:
    """Names a quantizer by its codebooks: 4x256, or 256+128 where they differ."""
    return f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))


def recipe_of(config: Config) -> Config | None:
    """The shipped recipe of this name with the same codebooks; None if there is none of this name."""
    if config.name not in recipe_names():
        return None
    sizes = list(config.quantizer.sizes)
    recipe = load_config(config.name, [f"quantizer.codebooks={len(sizes)}", f"quantizer.codes={sizes}"])
    same = recipe.quantizer.model_copy(update={"codes": config.quantizer.codes})  # 256 and [256, 256] are the same
    return recipe.model_copy(update={"quantizer": same})


def changes(config: Config, recipe: Config) -> list[str]:
    """What in a run's config moves its curves away from the recipe's."""
    found = [line for line in differences(recipe, config) if not line.startswith(IGNORED)]
    if recipe.data.mean is not None and recipe.data.std is not None:  # else measured, and compared by their values
        given = with_statistics(config, recipe.data.mean, recipe.data.std)
        found += [line for line in differences(given, config) if line.startswith("data.")]
    return found


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting that moves the curves beside the codebooks' sizes, under its dotted name."""
    found: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else key)
        elif not path.startswith((*IGNORED, "quantizer.codebooks", "quantizer.codes")):
            found[path] = value

    visit(config.model_dump(mode="json"), "")
    return found


class Curves(NamedTuple):
    """The reference of one recipe and method."""

    mean: tuple[float, ...]  # of the data, per channel
    std: tuple[float, ...]
    phases: Mapping[str, Mapping[int, Point]]  # phase key -> step -> what is expected

    def fit(self, config: Config) -> bool:
        """Does this run normalise its data as the reference runs did? Other data usually has other statistics."""
        pairs = zip((self.mean, self.std), (config.data.mean, config.data.std), strict=True)
        return all(
            given is not None
            and len(given) == len(expected)
            and all(abs(a - b) <= SAME_STATISTICS * s for a, b, s in zip(given, expected, self.std, strict=True))
            for expected, given in pairs
        )


def curve_names() -> list[str]:
    """The recipes with a reference."""
    folder = resources.files("bridle.config") / "reference_curves"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def read_curves(recipe: str, method: str) -> Curves | None:
    """The shipped reference of a recipe and method; None if there is none."""
    if recipe not in curve_names():
        return None
    file = resources.files("bridle.config") / "reference_curves" / f"{recipe}.json"
    return parse_curves(json.loads(file.read_text(encoding="utf-8")), method)


def parse_curves(document: Mapping[str, Any], method: str) -> Curves | None:
    """One method's reference in a file's content."""
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']} and not {FORMAT}")
    found = document["methods"].get(method)
    if found is None:
        return None
    phases = {
        key: {
            int(step): {name: [Band(*map(float, band)) for band in bands] for name, bands in point.items()}
            for step, point in points.items()
        }
        for key, points in found["phases"].items()
    }
    statistics = document["statistics"]
    return Curves(tuple(map(float, statistics["mean"])), tuple(map(float, statistics["std"])), phases)


class CurveWatch:
    """Says once per quantity when a phase leaves the band of its recipe; silent where nothing is expected."""

    def __init__(self, key: str, points: Mapping[int, Point], problem: str | None = None) -> None:
        self.key, self.points = key, points
        self.told: set[str] = set()
        self.problem = problem  # why there is nothing to compare with; told with the first row

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
        if curves is None or not curves.fit(config):
            return cls(key, {})
        return cls(key, curves.phases.get(key, {}))

    def look(self, row: Mapping[str, Any]) -> list[str]:
        """What is out of the band in this row of metrics and was not told before."""
        told = [] if self.problem is None else [self.problem]
        self.problem = None
        for name, bands in self.points.get(row["step"], {}).items():
            value, quantity = row.get(name), QUANTITIES.get(name)
            if value is None or quantity is None or name in self.told:  # a skipped step has no figures
                continue
            values = value if isinstance(value, list) else [value]
            text = describe_farthest(values, bands, quantity)
            if text is not None:
                self.told.add(name)
                told.append(f"{self.key} step {row['step']}: {text}.")
        return told


def describe_farthest(values: Sequence[float], bands: Sequence[Band], quantity: Quantity) -> str | None:
    """The stage that is farthest outside its band, in words; None if all are inside."""
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
