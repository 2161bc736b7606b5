"""How long the plain encoder step takes beside bridle's: python benchmarks/reference_step.py [MODALITY SIZE]

The plain step is `PlainStep` of `bench/step.py`: the tokenizer at every step, logits and loss at all positions,
torch's AdamW as it comes, the same architecture. `bridle bench step` prints the whole table.
"""

from __future__ import annotations

import sys

from bench.step import BUDGETS, MODALITIES, SIZES, chosen_model, run


def main() -> int:
    modality, size = (sys.argv[1:] + ["image", "tiny"][len(sys.argv) - 1 :])[:2]
    if modality not in MODALITIES or size not in SIZES:
        print(f"expected one of {', '.join(MODALITIES)} and one of {', '.join(SIZES)}", file=sys.stderr)
        return 2
    row = run([chosen_model(modality, size)])[0]
    print(f"{row.name}, {row.rows} rows: plain {row.seconds('plain'):.3f} CPU seconds")
    for who, budget in BUDGETS.items():
        print(f"{who}: {row.seconds(who):.3f} CPU seconds, {row.ratio(who):.2f} of plain (budget {budget})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
