"""The residual quantizer as a part of another model: the bottleneck of a small autoencoder.

    python examples/quantizer_in_another_model.py

Three calls are all there is: start the codebooks on real vectors, use `straight_through` in the forward, and update
the codebooks after the optimizer's step.
"""

from __future__ import annotations

import torch
from torch import nn

from bridle.data.embedded.sets import digits
from bridle.quantize import ResidualQuantizer

STAGES, CODES, WIDTH = 4, 64, 16


def main() -> list[float]:
    """Mean squared error of test pictures rebuilt from 1 to 4 stages of codes."""
    torch.manual_seed(0)
    splits = digits()
    x, test = splits.train.x.flatten(1), splits.test.x.flatten(1)  # (N, 256)
    encoder = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, WIDTH))
    decoder = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 256))
    # `none`: the vectors are quantized as they are, not scaled to length one.
    quantizer = ResidualQuantizer(codebooks=STAGES, codes=CODES, width=WIDTH, residual="none")
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        quantizer.start_codebooks(encoder(x), generator=generator)

    for step in range(400):
        batch = x[torch.randint(len(x), (128,), generator=generator)]
        z = encoder(batch)
        found = quantizer(z)  # changes nothing
        rebuilt = decoder(found.straight_through)
        commitment = (z - found.q.detach()).square().sum(-1).mean()  # keeps the encoder near its codes
        loss = (rebuilt - batch).square().mean() + 0.01 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        quantizer.ema_update(found)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    with torch.no_grad():
        codes = quantizer(encoder(test)).codes  # (N, 4): 24 bits a picture
        errors = [
            float((decoder(quantizer.decode(codes, stages=m)) - test).square().mean()) for m in range(1, STAGES + 1)
        ]
    print(f"variance of a pixel {float(test.var(0).mean()):.4f}")
    for m, error in enumerate(errors, start=1):
        print(f"{m} of {STAGES} stages, {6 * m:>2} bits: mean squared error {error:.4f}")
    return errors


if __name__ == "__main__":
    main()
