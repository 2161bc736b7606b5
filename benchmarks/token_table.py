"""Codes as a product: reconstruction, probe, retrieval, language model, steadiness; one JSON line per run.

    python benchmarks/token_table.py RECIPE [key=value …] --set NAME --row NAME --rows FILE [--items N] [--lm-steps N]
    python benchmarks/token_table.py --table FILE

A row is one tokenizer with one seed (`seed=1`): the first one of the recipe, whose codebooks are k-means of the data,
or with `--trained` the one at the end of the whole recipe. Rows are appended, so that they can be made one by one.

    reconstruction   PSNR or log-spectral distance by number of stages, as `bridle codebooks --reconstruct` measures it
    probe            accuracy of ridge regression on bags of codes: how often each code of each stage occurs in an item
    retrieval        mAP of finding training items with the query's label by the cosine of tf-idf weighted bags
    language model   bits per token of a small GPT (examples/generate.py), and as a share of the raw bits
    steady           share of equal codes per stage after re-encoding: JPEG at three qualities, MP3 at three bit rates

`--table` prints means with 95 % intervals over seeds (Student).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from sklearn.linear_model import RidgeClassifierCV
from sklearn.metrics import average_precision_score
from torch import Tensor

import bridle
from bridle import api
from bridle.config import load_config
from bridle.data.audio.modality import front_end
from bridle.data.build import open_data
from bridle.data.loading.loader import load_samples, stack_valid
from bridle.data.sources import Audible, Sample, Source
from bridle.evaluate.codebooks.command import reconstruct_run
from bridle.evaluate.reconstruction import anchors
from bridle.evaluate.reconstruction.measure import is_spectrogram
from bridle.infer.detokenizer_command import detokenizer_run
from bridle.machine import cpu_seconds
from bridle.runs.reconstruction import RateDistortion
from bridle.runs.results import read_record

QUALITIES, KBITS = (90, 50, 20), (64, 32, 16)
STRENGTHS = 10.0 ** np.arange(-3, 5)


class Part(NamedTuple):
    """Some items of a split: codes (N, T, M), valid (N, T), labels (N,), and which items of the source they are."""

    source: Source
    indices: list[int]
    codes: Tensor
    valid: Tensor
    labels: np.ndarray


def main() -> None:
    """Make a row, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--set", dest="data")
    parser.add_argument("--row")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--items", type=int, default=400, help="items of each split that are tokenized")
    parser.add_argument("--lm-steps", type=int, default=200)
    parser.add_argument("--trained", action="store_true", help="train the whole recipe first")
    parser.add_argument("--table", type=Path)
    args = parser.parse_intermixed_args()
    if args.table is not None:
        print_table([json.loads(line) for line in args.table.read_text().splitlines()])
        return
    torch.set_num_threads(1)
    line = make_row(args.recipe, args.overrides, items=args.items, lm_steps=args.lm_steps, trained=args.trained)
    named = {"set": args.data, "row": args.row, **line}
    with args.rows.open("a") as file:
        file.write(json.dumps(named) + "\n")
    print(json.dumps(named), file=sys.stderr)


def make_row(
    recipe: str, overrides: Sequence[str], *, items: int, lm_steps: int, trained: bool = False
) -> dict[str, Any]:
    """Everything that is measured of one tokenizer."""
    began = cpu_seconds()
    short = ["schedule.iterations=1", "probe.enabled=false", *([] if trained else ["max_steps=1"])]
    own = [text for text in overrides if not text.startswith("detokenizer.")]
    with tempfile.TemporaryDirectory() as place:
        folder = api.pretrain(load_config(recipe, [*short, *own]), out=Path(place) / "run").folder
        extra = [text for text in overrides if text.startswith("detokenizer.")]
        detokenizer_run(folder, ["max_steps=null", *extra])
        (path,) = reconstruct_run(folder)
        rates = read_record(RateDistortion, path)
        model = bridle.load(folder, device="cpu")
        train, test = parts_of(model, items)
        sizes = model.config.quantizer.sizes
        raw = sum(map(log2, sizes))
        shown = [text for text in overrides if not text.startswith("data.root=")]
        return {
            "seed": model.config.seed,
            "codebooks": list(sizes),
            "bits_per_token": raw,
            "rate": rates.by_stages[-1].rate,
            "unit": rates.unit,
            "psnr": [point.psnr for point in rates.by_stages],
            "log_spectral_distance": [point.log_spectral_distance for point in rates.by_stages],
            "probe": probe(train, test, sizes),
            "map": retrieval(train, test, sizes),
            **language_model(train, test, sizes, lm_steps, raw),
            "steady": steady(model, test, items=min(64, items)),
            "items": [len(train.codes), len(test.codes)],
            "cpu_minutes": round((cpu_seconds() - began) / 60, 2),
            "command": " ".join([recipe, *shown]),
        }


def parts_of(model: bridle.Model, items: int) -> tuple[Part, Part]:
    """Tokenized training and test items; of data with folds the last fold is the test part."""
    splits = open_data(model.config)
    if splits.test is not None:
        chosen = [(splits.train, range(len(splits.train))), (splits.test, range(len(splits.test)))]
    else:
        folds = np.array(splits.folds)
        last = folds == folds.max()
        chosen = [(splits.train, np.flatnonzero(~last)), (splits.train, np.flatnonzero(last))]
    train, test = (tokenized(model, source, np.array(indices), items) for source, indices in chosen)
    return train, test


def tokenized(model: bridle.Model, source: Source, indices: np.ndarray, items: int) -> Part:
    """At most `items` of the items at `indices`, evenly spaced."""
    places = np.unique(np.linspace(0, len(indices) - 1, min(items, len(indices))).round().astype(int))
    wanted = indices[places].tolist()
    loaded = zip(wanted, load_samples(source, wanted, workers=model.config.data.workers), strict=True)
    found = {index: sample for index, sample in loaded if isinstance(sample, Sample)}
    samples = list(found.values())
    x, valid = torch.stack([sample.x for sample in samples]), stack_valid(samples)
    codes = model.tokenize(x, valid=valid)
    marks = torch.ones(codes.shape[:2], dtype=torch.bool) if valid is None else valid
    return Part(source, list(found), codes, marks, np.array([sample.label for sample in samples]))


def bags(part: Part, sizes: Sequence[int]) -> np.ndarray:
    """(N, K_1 + … + K_M): how often each code of each stage occurs among an item's real tokens."""
    columns = []
    for m, size in enumerate(sizes):
        one_hot = torch.nn.functional.one_hot(part.codes[..., m], size) * part.valid[..., None]
        columns.append(one_hot.sum(1))
    return torch.cat(columns, dim=1).numpy().astype(np.float64)


def probe(train: Part, test: Part, sizes: Sequence[int]) -> float:
    """Accuracy in % of ridge regression on square roots of the bags' shares."""
    x, z = (np.sqrt(found / found.sum(1, keepdims=True)) for found in (bags(train, sizes), bags(test, sizes)))
    return round(100 * float(RidgeClassifierCV(STRENGTHS).fit(x, train.labels).score(z, test.labels)), 2)


def retrieval(train: Part, test: Part, sizes: Sequence[int]) -> float:
    """mAP in %: every test item ranks all training items."""
    x, z = bags(train, sizes), bags(test, sizes)
    idf = np.log((1 + len(x)) / (1 + (x > 0).sum(0))) + 1

    def weighted(counts: np.ndarray) -> np.ndarray:
        found = np.log1p(counts) * idf
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    scores = weighted(z) @ weighted(x).T
    queries = [n for n, label in enumerate(test.labels) if (train.labels == label).any()]
    return round(
        100 * float(np.mean([average_precision_score(train.labels == test.labels[n], scores[n]) for n in queries])), 2
    )


def language_model(train: Part, test: Part, sizes: Sequence[int], steps: int, raw: float) -> dict[str, float]:
    """Bits per token of a GPT on items without padding, and of code frequencies; the former also as a share of raw."""
    example = Path(__file__).parents[1] / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", example)
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    codes, held = (part.codes[part.valid.all(1)] for part in (train, test))
    torch.manual_seed(0)
    bits = len(sizes) * generate.train_gpt(codes, held, sizes, steps)[2]
    unigram = len(sizes) * generate.unigram_bits(codes, held)
    return {"lm_bits": round(bits, 3), "unigram_bits": round(unigram, 3), "lm_share": round(bits / raw, 4)}


def steady(model: bridle.Model, test: Part, *, items: int) -> dict[str, list[float]]:
    """Share of equal codes per stage, by codec and setting."""
    found: dict[str, list[float]] = {}
    sound = is_spectrogram(model.config)
    samples = [test.source.load(index, None) for index in test.indices[:items]]
    for setting in KBITS if sound else QUALITIES:
        equal = []
        for index, sample, codes, valid in zip(test.indices, samples, test.codes, test.valid, strict=False):
            x = reencoded_sound(model, test.source, index, sample, setting) if sound else reencoded(sample.x, setting)
            again = model.tokenize(x[None], valid=valid[None])[0]
            equal.append((again == codes)[valid].double().mean(0))
        name = f"MP3 {setting}" if sound else f"JPEG {setting}"
        found[name] = [round(float(share), 4) for share in torch.stack(equal).mean(0)]
    return found


def reencoded(x: Tensor, quality: int) -> Tensor:
    """A picture, or a clip frame by frame, as JPEG and back."""
    return (anchors.jpeg if x.ndim == 3 else anchors.jpeg_frames)(x, quality).decoded


def reencoded_sound(model: bridle.Model, source: Source, index: int, sample: Sample, kbits: int) -> Tensor:
    """The features of a recording after MP3; what was padding stays as it was."""
    assert isinstance(source, Audible)
    wave, rate = source.listen(index)
    features = front_end(model.config)(anchors.sound(wave, rate, "libmp3lame", kbits).decoded)
    x = sample.x.clone()
    count = min(len(features), x.shape[1])
    x[0, :count] = features[:count]
    return x


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line of Markdown per set and row, means ± half of the 95 % interval over seeds; stages from first to last."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["row"]), []).append(row)
    names = "data | codes | bits a token | PSNR or LSD dB | probe % | mAP % | LM bits a token (of raw) | equal codes %"
    print(f"| {names} | CPU min | seeds |")
    print("|---" * 10 + "|")
    for (data, name), found in groups.items():
        lost = [row["psnr"] if row["psnr"][-1] is not None else row["log_spectral_distance"] for row in found]
        middle = list(found[0]["steady"])[1]
        kept = [[100 * share for share in row["steady"][middle]] for row in found]
        cells = [
            *(data, name, f"{found[0]['bits_per_token']:g}", by_stage(lost)),
            *(spread([row[key] for row in found]) for key in ("probe", "map")),
            f"{spread([row['lm_bits'] for row in found])} ({np.mean([row['lm_share'] for row in found]):.2f})",
            f"{by_stage(kept)} ({middle})",
            f"{np.mean([row['cpu_minutes'] for row in found]):.1f}",
            ", ".join(str(row["seed"]) for row in found),
        ]
        print(f"| {' | '.join(cells)} |")


def by_stage(rows: Sequence[Sequence[float]]) -> str:
    """The means of each stage over seeds, with an interval for the last."""
    *earlier, last = zip(*rows, strict=True)
    return " / ".join([*(f"{np.mean(values):.1f}" for values in earlier), spread(last)])


def spread(values: Sequence[float]) -> str:
    """Mean, and half of Student's 95 % interval where there are several values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.1f}"
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{mean:.1f} ±{half:.1f}"


if __name__ == "__main__":
    main()
