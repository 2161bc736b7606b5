"""New digits, moving digits and sounds from a small GPT over codes; at most five CPU-minutes for each.

    python examples/generate.py --out generated
    python examples/generate.py --sets digits --steps 100
    python examples/generate.py --sets digits --transformers      # pip install "bridle[lm]"

For each embedded data set: a tokenizer (RQ 4 × 64 and, to compare, VQ 1 × 256: as many codes in all), a detokenizer,
and a GPT in plain torch on the ids that `bridle sequences --pattern delayed` writes: in step t it predicts code 1 of
token t, code 2 of token t − 1, … at once. Printed are bits per code on held-out data, beside those of the code
frequencies, and whether samples are copies: their distance to the nearest training item, beside that of held-out items.
samples.png shows what was drawn, held-out.png real items decoded from their codes: the best that samples could be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from PIL import Image
from torch import Tensor, nn

import bridle
from bridle import api
from bridle.config import load_config
from bridle.data.audio.inversion import invert_logmel
from bridle.data.audio.modality import front_end
from bridle.data.build import open_data
from bridle.infer.detokenizer_command import detokenizer_run
from bridle.infer.sequences import BOS, EMPTY, Vocabulary, framed, make_vocabulary
from bridle.machine import cpu_seconds

SETS = {"digits": "digits-tiny", "moving-digits": "moving-digits-tiny", "sounds": "sounds-tiny"}
STEPS = {"digits": 600, "moving-digits": 200, "sounds": 200}  # of the GPT; more steps learn the few items by heart
BATCH, SAMPLES, TEMPERATURE, GAP = 32, 64, 0.8, 2


class Result(NamedTuple):
    """What was found on one data set; bits are on held-out items."""

    bits: float  # per code of RQ
    unigram: float  # the same from the frequencies of each stage's codes
    bits_per_token: float  # of RQ, all stages
    vq_bits: float  # per code, and so per token, of VQ
    vq_unigram: float
    copies: float  # share of samples whose codes are those of a training item
    distance: float  # median over samples of the distance to the nearest training item, decoded
    held_out_distance: float  # the same for held-out items
    pictures: Path
    cpu_minutes: float


class GPT(nn.Module):
    """Causal transformer over the steps of the delayed pattern: all ids of a step go in and come out together."""

    def __init__(self, vocabulary: Vocabulary, *, steps: int, width: int = 96, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary.size, width)
        self.position = nn.Parameter(0.02 * torch.randn(steps, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.heads = nn.ModuleList([nn.Linear(width, size) for size in vocabulary.sizes])

    def forward(self, ids: Tensor) -> list[Tensor]:
        """ids (B, S, M) of the steps before -> for each stage logits (B, S, K_m) of the next step's code."""
        S = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(S)
        hidden = self.blocks(self.embed(ids).sum(2) + self.position[:S], mask=mask, is_causal=True)
        return [head(hidden) for head in self.heads]


def steps_of(codes: Tensor, vocabulary: Vocabulary) -> Tensor:
    """codes (N, T, M) -> ids (N, S, M), S = T + M − 1 steps of the delayed pattern."""
    rows = np.stack([vocabulary.encode(one) for one in codes.numpy()])
    return torch.from_numpy(rows).reshape(len(codes), -1, len(vocabulary.sizes))


def shifted(ids: Tensor) -> Tensor:
    """The steps before each step: bos, then all but the last."""
    return torch.cat([torch.full_like(ids[:, :1], BOS), ids[:, :-1]], dim=1)


def code_loss(network: GPT, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Mean cross-entropy over all codes, in nats; where the pattern has a gap nothing is predicted."""
    total, count = torch.zeros(()), 0
    for m, logits in enumerate(network(shifted(ids))):
        codes = ids[..., m] - vocabulary.offsets[m]
        real = codes >= 0
        total = total + nn.functional.cross_entropy(logits[real], codes[real], reduction="sum")
        count += int(real.sum())
    return total / count


def fit(network: nn.Module, loss: Callable[[Tensor], Tensor], rows: Tensor, steps: int) -> None:
    """AdamW with one cycle of the learning rate on random rows."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    network.train()
    for _ in range(steps):
        value = loss(rows[torch.randint(len(rows), (BATCH,))])
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    network.eval()


@torch.no_grad()
def sample(network: GPT, vocabulary: Vocabulary, *, tokens: int, count: int) -> Tensor:
    """`count` new items: codes (count, T, M), drawn step by step."""
    M, empty = len(vocabulary.sizes), torch.tensor(EMPTY)
    ids = torch.full((count, 1, M), BOS)
    for step in range(tokens + M - 1):
        found = []
        for m, logits in enumerate(network(ids)):
            drawn = torch.multinomial((logits[:, -1] / TEMPERATURE).softmax(-1), 1)[:, 0] + vocabulary.offsets[m]
            found.append(drawn if 0 <= step - m < tokens else empty.expand(count))
        ids = torch.cat([ids, torch.stack(found, 1)[:, None]], dim=1)
    return torch.from_numpy(
        np.stack([vocabulary.decode(one) for one in ids[:, 1:].flatten(1).numpy()]).astype(np.int64)
    )


def unigram_bits(train: Tensor, test: Tensor) -> float:
    """Bits per code (N, T, M) from the frequencies of each stage's codes in train, plus one each."""
    found = []
    for m in range(train.shape[-1]):
        counts = torch.bincount(train[..., m].flatten(), minlength=int(max(train.max(), test.max())) + 1).double() + 1
        found.append(-(counts / counts.sum()).log2()[test[..., m]].mean())
    return float(torch.stack(found).mean())


def tokenizer_of(recipe: str, out: Path, overrides: Sequence[str]) -> bridle.Model:
    """A run whose first tokenizer has its codebooks, which needs no training of the encoder."""
    short = ["schedule.iterations=1", "max_steps=1", "probe.enabled=false", "runtime.threads=1"]
    return bridle.load(api.pretrain(load_config(recipe, [*short, *overrides]), out=out).folder, device="cpu")


def train_gpt(train: Tensor, test: Tensor, sizes: Sequence[int], steps: int) -> tuple[GPT, Vocabulary, float]:
    """A GPT on codes (N, T, M), its vocabulary, and its bits per code on held-out ones."""
    vocabulary = make_vocabulary(sizes, "delayed")
    rows, held = steps_of(train, vocabulary), steps_of(test, vocabulary)
    network = GPT(vocabulary, steps=rows.shape[1])
    fit(network, lambda ids: code_loss(network, ids, vocabulary), rows, steps)
    with torch.no_grad():
        return network, vocabulary, float(code_loss(network, held, vocabulary)) / log(2)


def transformers_bits(train: Tensor, test: Tensor, sizes: Sequence[int], steps: int) -> float:
    """Bits per code of Hugging Face's GPT-2 on the same ids, one after the other; needs `transformers`."""
    import transformers  # type: ignore[import-not-found,unused-ignore]

    vocabulary = make_vocabulary(sizes, "delayed")
    rows, held = (
        torch.from_numpy(np.stack([framed(vocabulary.encode(one))[:-1] for one in codes.numpy()]))
        for codes in (train, test)
    )
    shape = {"n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": rows.shape[1]}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocabulary.size, **shape))

    def loss(ids: Tensor) -> Tensor:
        logits, wanted = network(ids[:, :-1]).logits, ids[:, 1:]
        real = wanted >= vocabulary.offsets[0]  # gaps of the pattern are no codes
        return nn.functional.cross_entropy(logits[real], wanted[real])

    fit(network, loss, rows, steps)
    with torch.no_grad():
        return float(loss(held)) / log(2)


def nearest(x: Tensor, train: Tensor) -> float:
    """Median over x (N, …) of the root mean square distance to the nearest of train."""
    distance = torch.cdist(x.flatten(1), train.flatten(1)).min(1).values
    return float(distance.median() / x[0].numel() ** 0.5)


def draw(x: Tensor, path: Path) -> Path:
    """Pictures in a square grid; clips (N, 1, frames, H, W) one per row; spectrograms with time to the right."""
    low, high = 0.0, 1.0
    if float(x.min()) < -2:  # log-mel features
        x, low, high = x.transpose(-1, -2).flip(-2), float(x.min()), float(x.max())
    side = int(len(x) ** 0.5)
    x = ((x[:, 0] - low) / (high - low)).clamp(0, 1)
    cells = x[:12] if x.ndim == 4 else x[: side * side].unflatten(0, (side, side))  # (rows, columns, H, W)
    cells = nn.functional.pad(cells, (GAP, GAP, GAP, GAP), value=0.5)
    pixels = cells.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    Image.fromarray((pixels * 255).byte().numpy()).save(path)
    return path


def generate(name: str, out: Path, steps: int, with_transformers: bool) -> Result:
    """Tokenizers, detokenizer, language models and samples of one embedded data set."""
    began, folder = cpu_seconds(), out / name
    rq = tokenizer_of(SETS[name], folder / "rq", [])
    vq = tokenizer_of(SETS[name], folder / "vq", ["quantizer.codebooks=1", "quantizer.codes=256"])
    detokenizer_run(
        folder / "rq", ["max_steps=null", f"detokenizer.steps={min(400, 2 * steps)}", "detokenizer.warmup_steps=10"]
    )
    splits: Any = open_data(rq.config)
    x, held = splits.train.x, splits.test.x
    codes, held_codes = rq.tokenize(x), rq.tokenize(held)
    network, vocabulary, bits = train_gpt(codes, held_codes, rq.config.quantizer.sizes, steps)
    vq_codes, vq_held = vq.tokenize(x), vq.tokenize(held)
    vq_bits = train_gpt(vq_codes, vq_held, vq.config.quantizer.sizes, steps)[2]
    new = sample(network, vocabulary, tokens=rq.geometry.tokens, count=SAMPLES)
    known = {row.tobytes() for row in codes.numpy()}
    decoded, others = rq.decode_to_input(new), rq.decode_to_input(held_codes[:SAMPLES])
    reference = rq.decode_to_input(codes)
    draw(others, folder / "held-out.png")
    if name == "sounds":
        for number, features in enumerate(decoded[:8, 0]):
            wave = invert_logmel(features, front_end(rq.config)).clamp(-1, 1)
            soundfile.write(folder / f"{number}.wav", wave.numpy(), rq.config.audio.sample_rate)
    if with_transformers:
        found = transformers_bits(codes, held_codes, rq.config.quantizer.sizes, steps)
        print(f"{name}: transformers' GPT-2, one id after the other: {found:.2f} bits per code")
    return Result(
        bits=bits,
        unigram=unigram_bits(codes, held_codes),
        bits_per_token=bits * len(vocabulary.sizes),
        vq_bits=vq_bits,
        vq_unigram=unigram_bits(vq_codes, vq_held),
        copies=sum(row.tobytes() in known for row in new.numpy()) / len(new),
        distance=nearest(decoded, reference),
        held_out_distance=nearest(others, reference),
        pictures=draw(decoded, folder / "samples.png"),
        cpu_minutes=(cpu_seconds() - began) / 60,
    )


def main(
    out: Path = Path("generated"),
    sets: Sequence[str] = tuple(SETS),
    steps: int | None = None,
    *,
    with_transformers: bool = False,
) -> dict[str, Result]:
    """Generate from each of the sets; results by name."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {name: generate(name, out, steps or STEPS[name], with_transformers) for name in sets}
    for name, result in found.items():
        print(
            f"{name}: RQ {result.bits:.2f} bits per code (unigram {result.unigram:.2f}), "
            f"{result.bits_per_token:.1f} per token; VQ {result.vq_bits:.2f} (unigram {result.vq_unigram:.2f})"
        )
        print(
            f"  {100 * result.copies:.0f} % of {SAMPLES} samples have the codes of a training item; distance to the "
            f"nearest one {result.distance:.3f}, of held-out items {result.held_out_distance:.3f}; "
            f"{result.cpu_minutes:.1f} CPU-minutes; {result.pictures}"
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("generated"))
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--steps", type=int, help="of each GPT")
    parser.add_argument("--transformers", action="store_true")
    given = parser.parse_args()
    main(given.out, given.sets, given.steps, with_transformers=given.transformers)
