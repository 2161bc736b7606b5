"""A tiny language model over codes: how many bits the next code costs, beside what its frequency alone says.

    python examples/next_code.py

The digits become codes, `bridle sequences` would write them for any trainer; here the same vocabulary is used in
memory. A small GRU learns to predict every id from those before it; it is scored on pictures it has not seen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import bridle
from bridle.data.embedded.sets import digits
from bridle.infer.sequences import Vocabulary, framed, make_vocabulary

STEPS, BATCH = 160, 64


class NextCode(nn.Module):
    """Embedding, one GRU, a linear head."""

    def __init__(self, *, ids: int, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(ids, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, ids)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) -> logits (B, L, ids) of the id that follows each."""
        return self.head(self.gru(self.embed(ids))[0])


def main() -> tuple[float, float]:
    """Bits per code of the model, and of the unigram frequencies, on test pictures."""
    torch.manual_seed(0)
    model = bridle.load("digits-tiny")
    vocabulary = make_vocabulary(model.config.quantizer.sizes, "interleaved")
    splits = digits()
    train, test = (rows_of(model, vocabulary, source.x) for source in (splits.train, splits.test))  # (N, L)
    network = NextCode(ids=vocabulary.size)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for step in range(STEPS):
        batch = train[torch.randint(len(train), (BATCH,))]
        loss = cross_entropy(network, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 40 == 0:
            print(f"step {step}: {loss.item() / np.log(2):.2f} bits per code")
    with torch.no_grad():
        bits = cross_entropy(network, test).item() / np.log(2)
    unigram = unigram_bits(train, test, vocabulary)
    print(f"unigram {unigram:.2f} bits per code, model {bits:.2f} bits per code")
    return bits, unigram


def rows_of(model: bridle.Model, vocabulary: Vocabulary, x: Tensor) -> Tensor:
    """(N, 1, 16, 16) -> ids (N, 1 + T·M): bos and all codes; without eos, since all pictures are equally long."""
    codes = model.tokenize(x).numpy()
    return torch.from_numpy(np.stack([framed(vocabulary.encode(one))[:-1] for one in codes]))


def cross_entropy(network: NextCode, ids: Tensor) -> Tensor:
    """Mean over all codes, in nats."""
    logits = network(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def unigram_bits(train: Tensor, test: Tensor, vocabulary: Vocabulary) -> float:
    """Cross-entropy in bits of the frequencies of each stage's codes in train, plus one each, on test."""
    counts = torch.bincount(train[:, 1:].flatten(), minlength=vocabulary.size).double() + 1
    bits = torch.zeros(vocabulary.size, dtype=torch.float64)
    for first, size in zip(vocabulary.offsets, vocabulary.sizes, strict=True):
        own = counts[first : first + size]
        bits[first : first + size] = -(own / own.sum()).log2()  # which stage comes next is no news
    return float(bits[test[:, 1:]].mean())


if __name__ == "__main__":
    main()
