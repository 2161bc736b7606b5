"""Codes become ids and codes again without loss, whatever their sizes, lengths, pattern and packing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_blocks import unpack

from bridle.infer.sequences import SPECIAL, framed, make_vocabulary, packed

PATTERNS = st.sampled_from(["interleaved", "delayed", "stage1"])


@st.composite
def files(draw: st.DrawFn) -> tuple[list[int], list[np.ndarray]]:
    """Codebook sizes and the codes (T, M) of one to five files."""
    sizes = draw(st.lists(st.integers(1, 1024), min_size=1, max_size=5))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = np.min_scalar_type(max(sizes) - 1)
    return sizes, [np.stack([seed.integers(0, k, T) for k in sizes], 1).astype(dtype) for T in lengths]


@settings(deadline=None)
@given(files(), PATTERNS)
def test_decode_undoes_encode(made: tuple[list[int], list[np.ndarray]], pattern: str) -> None:
    sizes, all_codes = made
    vocabulary = make_vocabulary(sizes, pattern)
    for codes in all_codes:
        kept = codes[:, : len(vocabulary.sizes)]
        ids = vocabulary.encode(kept)
        assert ids.size == 0 or len(SPECIAL) - 1 <= ids.min() <= ids.max() < vocabulary.size
        for shown in (ids, framed(ids), np.concatenate([framed(ids), [0, 0, 0]])):
            again = vocabulary.decode(shown)
            assert np.array_equal(again, kept)
            assert again.dtype == np.min_scalar_type(max(vocabulary.sizes) - 1)


@settings(deadline=None)
@given(files(), PATTERNS, st.integers(2, 17))
def test_unpacking_undoes_packing(made: tuple[list[int], list[np.ndarray]], pattern: str, context: int) -> None:
    sizes, all_codes = made
    vocabulary = make_vocabulary(sizes, pattern)
    rows = [framed(vocabulary.encode(codes[:, : len(vocabulary.sizes)])) for codes in all_codes]
    blocks = list(packed(rows, context=context))
    assert all(len(block) == context for block in blocks)
    again = list(unpack(blocks))
    assert len(again) == len(rows)
    assert all(np.array_equal(one, other) for one, other in zip(again, rows, strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), PATTERNS)
def test_whatever_a_model_writes_is_codes_or_a_clear_error(ids: list[int], pattern: str) -> None:
    from bridle.errors import DataError

    vocabulary = make_vocabulary([8, 8, 8], pattern)
    try:
        codes = vocabulary.decode(np.array(ids, dtype=np.int64))
    except DataError:
        return
    assert codes.shape[1] == len(vocabulary.sizes)
    assert codes.size == 0 or codes.max() < 8
