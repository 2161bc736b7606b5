"""Network parts that know shapes and nothing else: patches, positions, blocks, windows, masks.

Everything works on grids of any rank and takes plain keyword arguments. Layers draw no random numbers: masks and
drop-path are drawn by the caller and passed in.
"""

from bridle.nn.masking import Mask, draw_mask, gather_tokens, scatter_tokens, visible_count
from bridle.nn.patch import PatchEmbed, patchify, unpatchify
from bridle.nn.position import sincos_position
from bridle.nn.transformer import Attention, Block, Mlp, Transformer, drop_path_scales, initialise
from bridle.nn.window import WindowBlock, Windows, WindowTransformer, auto_window

__all__ = [
    "Attention",
    "Block",
    "Mask",
    "Mlp",
    "PatchEmbed",
    "Transformer",
    "WindowBlock",
    "WindowTransformer",
    "Windows",
    "auto_window",
    "draw_mask",
    "drop_path_scales",
    "gather_tokens",
    "initialise",
    "patchify",
    "scatter_tokens",
    "sincos_position",
    "unpatchify",
    "visible_count",
]
