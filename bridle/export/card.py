"""The model card: what a stranger must know before using an exported model, as Markdown with a YAML head (card.md).

Everything comes from the config and from what was measured; what is not known is said to be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from bridle.data.modality import modality_of
from bridle.errors import needs
from bridle.export.trained import Trained
from bridle.report.runs import decimal, percent, thousands
from bridle.runs.results import BASELINES, Evaluation, Results
from bridle.runs.results_file import readable_part


def model_card(trained: Trained) -> str:
    """The README.md of an exported folder."""
    with needs("hub"):
        from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("bridle.export", "."), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )  # the text is Markdown: `plain` escapes what comes from elsewhere
    environment.filters |= {"plain": plain, "short": _short}
    environment.filters |= {"percent": percent, "decimal": decimal, "thousands": thousands}
    facts, config = trained.facts, trained.config
    evaluation = readable_part(Evaluation, dict(facts.evaluation or {}), []) or Evaluation(iteration=0)
    results = readable_part(Results, {"baselines": dict(facts.baselines)}, []) or Results()
    baselines = {words: results.baselines[key] for key, words in BASELINES.items() if key in results.baselines}
    kinds = {"validation": "validation items", "folds": "all items, in folds"}
    return environment.get_template("card.md").render(
        config=config,
        facts=facts,
        modality=modality_of(config),
        tokenizer=trained.own_tokenizer,
        name_as_json=json.dumps(config.name),  # JSON is YAML
        parameters=trained.parameter_counts(),
        probe=evaluation.probe,
        scored=kinds.get(facts.probed_on, "test items"),
        rows={**baselines, "this model": evaluation.probe},
        stages=evaluation.codebooks,
    )


def plain(value: object) -> str:
    """Text from elsewhere on one line, without markup."""
    kept = "".join(c if c.isprintable() else " " for c in str(value))[:300]
    return "".join(f"\\{c}" if c in "\\`*[]<>|#" else c for c in kept)


def _short(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
