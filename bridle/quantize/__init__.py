"""Residual quantization on its own: codebooks, k-means start, EMA update, code usage.

    rq = ResidualQuantizer(codebooks=4, codes=256, width=256)
    rq.start_codebooks(x, generator=torch.Generator().manual_seed(0))
    found = rq(x)
    rq.ema_update(found)

Shapes: S rows or (B, T) tokens, Dq code width, M codebooks, K codes.
"""

from bridle.quantize.codebook import Codebook
from bridle.quantize.initialise import StartReport
from bridle.quantize.kmeans import CodebookWarning
from bridle.quantize.residual import ResidualQuantizer
from bridle.quantize.result import Quantized, Statistics

__all__ = ["Codebook", "CodebookWarning", "Quantized", "ResidualQuantizer", "StartReport", "Statistics"]
