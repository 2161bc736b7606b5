"""The model card: what a stranger must know before using an exported model, as Markdown with a YAML head.

Everything comes from the config and from what was measured; what is not known is said to be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from bridle.data.modality import modality_of
from bridle.export.load import Trained
from bridle.report.runs import decimal, items, mapping, percent, thousands
from bridle.runs.results import Evaluation, Results, readable_part

UNKNOWN = "not stated; ask the author of the model before you use it beyond research"


def model_card(trained: Trained) -> str:
    """The README.md of an exported folder."""
    sections = (_head, _summary, _use, _data, _training, _scores, _codebooks, _files)
    written = (list(section(trained)) for section in sections)
    return "\n".join("\n".join(lines) + "\n" for lines in written if lines)


def _head(trained: Trained) -> Iterator[str]:
    yield "---"
    yield "library_name: bridle"
    yield f"pipeline_tag: {modality_of(trained.config).task}"
    codes = "" if trained.own_tokenizer is None else "residual-quantization, "
    yield f"tags: [self-supervised, {codes}bridle]"
    yield f"model_name: {json.dumps(trained.config.name)}"  # JSON is YAML
    yield "---"


def _summary(trained: Trained) -> Iterator[str]:
    config, facts, tokenizer = trained.config, trained.facts, trained.own_tokenizer
    geometry, imported = config.geometry, facts.imported
    yield f"# {plain(config.name)}"
    yield ""
    if imported:
        yield "An encoder whose weights come from elsewhere, in the form of bridle."
        yield f"From {plain(imported.get('file'))} (SHA-256 {plain(imported.get('sha256'))})."
        yield "It has no tokenizer: it gives features, not codes."
    elif tokenizer is None:
        yield "An encoder that was trained without labels to predict the patches that it does not see."
        yield "It has no tokenizer: it gives features, not codes."
    else:
        yield "An encoder that was trained without labels to predict the codes of a residual-quantization tokenizer,"
        yield f"and that tokenizer, after iteration {facts.iteration}."
    yield ""
    size = "×".join(map(str, geometry.input))
    channels = "1 channel" if geometry.channels == 1 else f"{geometry.channels} channels"
    yield f"- input: {channels}, {size}, in patches of {'×'.join(map(str, geometry.patch))}"
    yield f"- encoder: width {config.encoder.width}, {config.encoder.depth} blocks, {config.encoder.heads} heads"
    if tokenizer is not None:
        sizes = ", ".join(map(str, config.quantizer.sizes))
        kind = "trained" if tokenizer.is_trained else "cold start"
        yield f"- tokenizer ({kind}): {config.quantizer.codebooks} codebooks of {sizes} codes"
    counts = ", ".join(f"{name} {thousands(count)}" for name, count in trained.parameter_counts().items())
    stored = "float16, codebooks float32" if facts.half else "float32"
    yield f"- parameters: {counts}; stored as {stored}"


def _use(trained: Trained) -> Iterator[str]:
    tokens = trained.own_tokenizer is not None
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
    yield "bridle embed this-folder FILES --out features.npz"
    yield "```"


def _data(trained: Trained) -> Iterator[str]:
    config, name = trained.config, trained.facts.data
    yield "## Data"
    yield f"- trained on: {modality_of(config).items}" + (f", {plain(name)}" if name else "")
    yield f"- licence of the data: {plain(trained.facts.data_licence or UNKNOWN)}"
    mean, std = config.data.mean, config.data.std
    if mean is not None and std is not None:
        shown = [", ".join(f"{value:.4g}" for value in values) for values in (mean, std)]
        yield f"- normalised by mean {shown[0]} and std {shown[1]}; `model.encode` does it"


def _training(trained: Trained) -> Iterator[str]:
    config, facts = trained.config, trained.facts
    if facts.imported:
        yield "## What was fitted"
        for note in items(facts.imported.get("notes")):
            yield f"- {plain(note)}"
        return
    yield "## Training"
    yield f"Recipe {plain(config.name)}, seed {config.seed}, {config.schedule.mode}; `config.yaml` has every setting."
    yield "To train it again: `bridle pretrain config.yaml --out runs/again`" + (
        " with `data.root=FOLDER`." if modality_of(config).reads_files else "."
    )
    versions = ", ".join(f"{plain(key)} {plain(value)}" for key, value in facts.made_with.items())
    if versions:
        yield f"Made with {versions}."


def _scores(trained: Trained) -> Iterator[str]:
    facts = trained.facts
    probe = _evaluation(trained).probe
    if probe is None:
        if not facts.imported:
            yield "## Scores"
            yield "No evaluation is stored with this model."
        return
    yield "## Scores"
    kinds = {"validation": "validation items", "folds": "all items, in folds"}
    scored = kinds.get(facts.probed_on, "test items")
    yield f"Linear probe on frozen features, {probe.name} on {scored}, with its 95 % interval."
    yield ""
    yield f"| features | score | interval | {scored} |"
    yield "|---|---|---|---|"
    known = readable_part(Results, {"baselines": dict(facts.baselines)}, []) or Results()
    named = known.named_baselines
    for name, scores in {**named, "this model": probe}.items():
        low, high = (percent(value) for value in scores.interval or (None, None))
        yield f"| {name} | {percent(scores.main)} % | {low}–{high} | {thousands(scores.test_items)} |"
    if probe.chance is not None:
        yield ""
        yield f"Chance is {percent(probe.chance)} %. One seed: small gaps mean nothing."


def _evaluation(trained: Trained) -> Evaluation:
    found = dict(trained.facts.evaluation or {})
    return readable_part(Evaluation, found, []) or Evaluation(iteration=0)


def _codebooks(trained: Trained) -> Iterator[str]:
    stages = _evaluation(trained).codebooks
    if not stages:
        return
    yield "## Codebooks"
    yield "Over a full pass of the training data: CUR is the share of codes used, ECU is CUR times entropy over log K."
    yield ""
    yield "| stage | codes | CUR | perplexity | ECU |"
    yield "|---|---|---|---|---|"
    for stage in stages:
        shown = [thousands(stage.codes), decimal(stage.usage_rate), decimal(stage.perplexity, 1)]
        shown.append(decimal(stage.effective_usage))
        yield f"| {stage.stage} | {' | '.join(shown)} |"


def _files(trained: Trained) -> Iterator[str]:
    graphs = trained.facts.graphs
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
