"""Train a recipe through the package and score its features cheaply; one JSON line per run.

    python benchmarks/method_rows.py RECIPE [key=value …] --set NAME --row NAME --rows FILE [--keep DIR]
    python benchmarks/method_rows.py RECIPE [key=value …] --set NAME --baselines --rows FILE

Features are collected once: the mean and the deviation of each block's tokens, over all tokens and per place of
probe.axis; block 0 is the embedding, "stack" is the stem, if
there is one, and all blocks side by side. Then a ridge classifier (strength by
leave-one-out on training items), the same with 1, 5 and 10 labels a class (five draws), and 10 nearest neighbours by
cosine read them. Features are standardised by the unlabelled training items. probe.on=validation scores no test item.
CPU-minutes are those of training, with decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import RidgeClassifierCV
from torch import Tensor

from bridle import api
from bridle.config import Config, load_config, read_config
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.sources import Views
from bridle.data.subset import subset_of
from bridle.evaluate.classical import evenly_spaced, fit_classical
from bridle.evaluate.evaluator import Evaluator, probe_header
from bridle.evaluate.features import Features, raw_features
from bridle.evaluate.scorers.fewshot import class_orders
from bridle.export.trained import read_trained
from bridle.machine import cpu_seconds
from bridle.models.build import build_encoder
from bridle.models.encoder import STEM, Encoder
from bridle.nn.pooling import axis_pool, deviation_pool
from bridle.runs.results_file import ResultsFile
from bridle.seeding import generator
from bridle.train.run import open_machine

STRENGTHS = 10.0 ** np.arange(-1, 6)
SHOTS, DRAWS, NEIGHBOURS = (1, 5, 10), 5, 10


def scores(pairs: Callable[[], Iterator[Any]], few: bool = True) -> dict[str, float]:
    """Accuracies in percent by name, means over folds and draws."""
    found: dict[str, list[float]] = {}

    def note(name: str, predicted: Any, y: Any) -> None:
        found.setdefault(name, []).append(100 * float((predicted == y).mean()))

    for pair in pairs():
        mean, std = pair.train.x.mean(0), pair.train.x.std(0) + 1e-6
        x, z = ((part.x - mean) / std for part in (pair.train, pair.test))
        y, wanted = pair.train.y, pair.test.y
        note("linear", RidgeClassifierCV(STRENGTHS).fit(x, y).predict(z), wanted)
        if not few:
            continue
        for kind, a, b in (("knn", x, z), ("knn_plain", pair.train.x, pair.test.x)):
            note(kind, nearest(a, y, b), wanted)
        for draw in range(DRAWS):
            order = class_orders(y, generator(0, "few shots", pair.name, draw))
            for n in SHOTS:
                rows = np.concatenate([own[:n] for own in order])
                fitted = RidgeClassifierCV(STRENGTHS).fit(x[rows], y[rows])
                note(f"shots{n}", fitted.predict(z), wanted)
    return {name: round(float(np.mean(values)), 2) for name, values in found.items()}


def nearest(x: Any, y: Any, z: Any) -> Any:
    """The votes of the nearest training items by cosine, weighted by exp(cos/0.07)."""
    a, b = (torch.nn.functional.normalize(torch.from_numpy(part).float(), dim=1) for part in (x, z))
    cosine, index = (b @ a.t()).topk(NEIGHBOURS, dim=1)
    votes = torch.zeros(len(b), int(y.max()) + 1)
    votes.scatter_add_(1, torch.from_numpy(y)[index], (cosine / 0.07).exp())
    return votes.argmax(1).numpy()


def evaluator_of(config: Config, folder: Path) -> Evaluator:
    splits = open_data(config)
    results = ResultsFile(folder / "scores.json", probe_header(config))
    return Evaluator(config, splits, open_machine(config.runtime), results, ProgressLine())


def collected(
    evaluator: Evaluator, features: Callable[[Tensor, Tensor | None], Tensor]
) -> tuple[Features, Features | None]:
    collect = evaluator.collector.features(features)
    return collect(evaluator.train), None if evaluator.test is None else collect(evaluator.test)


def columns(found: tuple[Features, Features | None], keep: Any) -> tuple[Features, Features | None]:
    train, test = found
    return train._replace(x=train.x[:, keep]), None if test is None else test._replace(x=test.x[:, keep])


def read_encoder(
    evaluator: Evaluator, encoder: Encoder, blocks: list[int], wanted: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Scores by reading: block, pooling; all readings, or those `wanted`."""
    grid, axis = encoder.geometry.grid, evaluator.config.probe.axis
    readings: dict[str, slice] = {}
    encoder.eval()

    def features(x: Tensor, valid: Tensor | None) -> Tensor:
        parts: list[Tensor] = []
        for n, encoded in zip(blocks, encoder.layers(x, wanted=blocks, valid=valid), strict=True):
            for name, kept in (("all", None), ("axis", axis)):
                begin = sum(part.shape[1] for part in parts)
                parts += [axis_pool(encoded.z, grid, kept, valid), deviation_pool(encoded.z, grid, kept, valid).float()]
                block = "stem" if n == STEM else f"block{n}"
                readings[f"{block}-{name}"] = slice(begin, sum(part.shape[1] for part in parts))
                if kept is None:
                    readings[f"{block}-mean"] = slice(begin, begin + encoder.layer_width(n))
        return torch.cat(parts, dim=1)

    found = collected(evaluator, features)
    read = {
        name: scores(evaluator.pairs(*columns(found, keep)), few=not name.endswith("mean"))
        for name, keep in readings.items()
        if not wanted or name in wanted
    }
    for pooling in ("all", "axis"):
        if wanted and f"stack-{pooling}" not in wanted:
            continue
        kept = [np.arange(keep.start, keep.stop) for name, keep in readings.items() if name.endswith(f"-{pooling}")]
        read[f"stack-{pooling}"] = scores(evaluator.pairs(*columns(found, np.concatenate(kept))))
    return read


def baselines(evaluator: Evaluator) -> dict[str, dict[str, float]]:
    config, geometry = evaluator.config, evaluator.config.geometry.build()
    began = cpu_seconds()
    some = evaluator.collector.batches(Views(subset_of(evaluator.train, evenly_spaced(len(evaluator.train)))))
    found = collected(evaluator, fit_classical(some, geometry, config.seed))
    minutes = (cpu_seconds() - began) / 60
    raw = collected(evaluator, lambda x, valid: raw_features(x, valid, grid=geometry.grid))
    rows = {
        "classical": {**scores(evaluator.pairs(*found)), "cpu_minutes": round(minutes, 2)},
        "raw": scores(evaluator.pairs(*raw)),
    }
    untrained = read_encoder(
        evaluator, build_encoder(config), [0, config.encoder.depth]
    )  # plain input: nothing is measured
    return rows | {f"untrained {name}": value for name, value in untrained.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--set", dest="data", required=True)
    parser.add_argument("--row", default="")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument(
        "--blocks", default="", help="which blocks are read, 1 to depth, and 0 is the embedding; default: all"
    )
    parser.add_argument("--readings", default="", help="which are scored, such as stack-axis,block4-all; default: all")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    config = load_config(args.recipe, args.overrides)
    command = " ".join([args.recipe, *(text for text in args.overrides if not text.startswith("data.root="))])
    line: dict[str, Any] = {"set": args.data, "row": args.row, "seed": config.seed, "on": config.probe.on}
    with tempfile.TemporaryDirectory() as place:
        folder = args.keep or Path(place) / "run"
        began = cpu_seconds()
        if args.baselines:
            started = api.pretrain(config.model_copy(update={"max_steps": 1}), out=folder)  # for the normalisation
            evaluator = evaluator_of(read_config(started.folder / "config.yaml"), Path(place))
            line |= {"row": "baselines", "scores": baselines(evaluator)}
        else:
            started = api.pretrain(config, out=folder)
            line["cpu_minutes"] = round((cpu_seconds() - began) / 60, 2)
            own = read_config(started.folder / "config.yaml")
            evaluator = evaluator_of(own, Path(place))
            given = [int(n) for n in args.blocks.split(",")] if args.blocks else None
            for n in range(1, own.schedule.iterations + 1) if own.schedule.tokenizer == "renew" else [None]:
                encoder = read_trained(started.folder, iteration=n).encoder
                line.setdefault("scores", {})[f"iter{n or own.schedule.iterations}"] = read_encoder(
                    evaluator,
                    encoder,
                    given or encoder.blocks("all"),
                    args.readings.split(",") if args.readings else (),
                )
    with args.rows.open("a") as file:
        file.write(json.dumps({**line, "command": command}) + "\n")
    print(json.dumps(line), file=sys.stderr)


if __name__ == "__main__":
    main()
