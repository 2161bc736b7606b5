"""The model card: what a stranger must know before using an exported model, as Markdown with a YAML head.

Everything comes from the config and from what was measured; what is not known is said to be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bridle.config import Config
from bridle.data.modality import modality_of
from bridle.report.numbers import decimal, percent, thousands
from bridle.report.runs import items, main_score, mapping, number, score_name, whole

UNKNOWN = "not stated; ask whoever trained the model before you use it beyond research"
BASELINES = {"raw": "raw features", "untrained": "untrained encoder", "classical": "whitened k-means"}


def model_card(config: Config, about: Mapping[str, Any]) -> str:
    """The README.md of an exported folder; `about` is its config.json."""
    parts = [_head(config, about), _summary(config, about), _use(about), _data(config, about)]
    parts += [_training(config, about), _scores(about), _codebooks(about), _files(about)]
    return "\n".join("\n".join(part) + "\n" for part in (list(lines) for lines in parts) if part)


def _head(config: Config, about: Mapping[str, Any]) -> Iterator[str]:
    yield "---"
    yield "library_name: bridle"
    yield f"pipeline_tag: {modality_of(config).task}"
    codes = "" if about.get("tokenizer") is None else "residual-quantization, "
    yield f"tags: [self-supervised, {codes}bridle]"
    yield f"model_name: {json.dumps(config.name)}"  # JSON is YAML
    yield "---"


def _summary(config: Config, about: Mapping[str, Any]) -> Iterator[str]:
    geometry, imported = config.geometry, mapping(about.get("imported"))
    yield f"# {plain(config.name)}"
    yield ""
    if imported:
        yield "An encoder whose weights come from elsewhere, in the form of bridle."
        yield f"From {plain(imported.get('file'))} (SHA-256 {plain(imported.get('sha256'))})."
        yield "It has no tokenizer: it gives features, not codes."
    elif about.get("tokenizer") is None:
        yield "An encoder that was trained without labels to predict the patches that it does not see."
        yield "It has no tokenizer: it gives features, not codes."
    else:
        yield "An encoder that was trained without labels to predict the codes of a residual-quantization tokenizer,"
        yield f"and that tokenizer, after iteration {whole(about.get('iteration'))}."
    yield ""
    size = "×".join(map(str, geometry.input))
    channels = "1 channel" if geometry.channels == 1 else f"{geometry.channels} channels"
    yield f"- input: {channels}, {size}, in patches of {'×'.join(map(str, geometry.patch))}"
    yield f"- encoder: width {config.encoder.width}, {config.encoder.depth} blocks, {config.encoder.heads} heads"
    if about.get("tokenizer") is not None:
        sizes = ", ".join(map(str, config.quantizer.sizes))
        yield f"- tokenizer ({plain(about.get('tokenizer'))}): {config.quantizer.codebooks} codebooks of {sizes} codes"
    counts = ", ".join(f"{plain(name)} {thousands(count)}" for name, count in mapping(about.get("parameters")).items())
    stored = "float16, codebooks float32" if about.get("half") else "float32"
    yield f"- parameters: {counts}; stored as {stored}"


def _use(about: Mapping[str, Any]) -> Iterator[str]:
    tokens = about.get("tokenizer") is not None
    yield "## How to load it"
    yield "```python"
    yield "import bridle"
    yield ""
    yield 'model = bridle.load("this-folder")   # or the id of this repository on the hub'
    if tokens:
        yield "codes = model.tokenize(x)             # x (B, C, *input) in the units of the data -> (B, T, M)"
    yield "z = model.encode(x)                   # (B, T, D)"
    yield "```"
    yield "```bash"
    if tokens:
        yield "bridle tokenize this-folder FILES --out codes.npz"
    yield "bridle embed this-folder FILES --out features.npz --pool mean"
    yield "```"


def _data(config: Config, about: Mapping[str, Any]) -> Iterator[str]:
    name = about.get("data")
    yield "## Data"
    yield f"- trained on: {modality_of(config).items}" + (f", {plain(name)}" if name else "")
    yield f"- licence of the data: {plain(about.get('data_licence') or UNKNOWN)}"
    mean, std = config.data.mean, config.data.std
    if mean is not None and std is not None:
        shown = [", ".join(f"{value:.4g}" for value in values) for values in (mean, std)]
        yield f"- normalised by mean {shown[0]} and std {shown[1]}; `model.encode` does it"


def _training(config: Config, about: Mapping[str, Any]) -> Iterator[str]:
    if about.get("imported"):
        yield "## What was fitted"
        for note in items(mapping(about["imported"]).get("notes")):
            yield f"- {plain(note)}"
        return
    yield "## Training"
    yield f"Recipe {plain(config.name)}, seed {config.seed}, {config.schedule.mode}; `config.yaml` has every setting."
    yield "To train it again: `bridle pretrain config.yaml --out runs/again`" + (
        " with `data.root=FOLDER`." if modality_of(config).reads_files else "."
    )
    versions = ", ".join(f"{plain(key)} {plain(value)}" for key, value in mapping(about.get("made_with")).items())
    if versions:
        yield f"Made with {versions}."


def _scores(about: Mapping[str, Any]) -> Iterator[str]:
    evaluation = mapping(about.get("evaluation"))
    probe = mapping(evaluation.get("probe"))
    if not probe:
        if not about.get("imported"):
            yield "## Scores"
            yield "No evaluation is stored with this model."
        return
    yield "## Scores"
    kinds = {"validation": "validation items", "folds": "all items, in folds"}
    scored = kinds.get(str(about.get("probed_on")), "test items")
    yield f"Linear probe on frozen features, {score_name(probe)} on {scored}, with its 95 % interval."
    yield ""
    yield f"| features | score | interval | {scored} |"
    yield "|---|---|---|---|"
    named = {
        BASELINES[key]: mapping(value) for key, value in mapping(about.get("baselines")).items() if key in BASELINES
    }
    for name, scores in {**named, "this model": probe}.items():
        low, high = (percent(value) for value in [*items(scores.get("interval")), None, None][:2])
        row = f"{percent(main_score(scores))} % | {low}–{high} | {thousands(scores.get('test_items'))}"
        yield f"| {name} | {row} |"
    if number(probe.get("chance")) is not None:
        yield ""
        yield f"Chance is {percent(probe.get('chance'))} %. One seed: small gaps mean nothing."


def _codebooks(about: Mapping[str, Any]) -> Iterator[str]:
    stages = [mapping(stage) for stage in items(mapping(about.get("evaluation")).get("codebooks"))]
    if not stages:
        return
    yield "## Codebooks"
    yield "Over a full pass of the training data: CUR is the share of codes used, ECU is CUR times entropy over log K."
    yield ""
    yield "| stage | codes | CUR | perplexity | ECU |"
    yield "|---|---|---|---|---|"
    for place, stage in enumerate(stages, start=1):
        shown = [thousands(stage.get("codes")), decimal(stage.get("usage_rate")), decimal(stage.get("perplexity"), 1)]
        shown.append(decimal(stage.get("effective_usage")))
        yield f"| {place} | {' | '.join(shown)} |"


def _files(about: Mapping[str, Any]) -> Iterator[str]:
    graphs = mapping(about.get("graphs"))
    if not graphs:
        return
    yield "## Graphs"
    yield "Inputs and outputs are those of `model.encode` and `model.tokenize`: normalisation is inside, any batch."
    for name, checked in graphs.items():
        yield f"- `{plain(name)}`: {plain(mapping(checked).get('check'))}"


def plain(value: object) -> str:
    """Text from elsewhere on one line, without markup."""
    kept = "".join(c if c.isprintable() else " " for c in str(value))[:300]
    return "".join(f"\\{c}" if c in "\\`*[]<>|#" else c for c in kept)
