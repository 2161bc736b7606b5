"""The quantizer beside faiss, vector-quantize-pytorch and scikit-learn where they do the same thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bridle.quantize import ResidualQuantizer
from bridle.quantize.kmeans import choose_seeds, lloyd

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latents(rows: int, width: int, *, seed: int = 0) -> Tensor:
    """Clustered, so that codes matter."""
    draws = seeded(seed)
    centres = 4 * torch.randn(20, width, generator=draws)
    return centres[torch.randint(20, (rows,), generator=draws)] + torch.randn(rows, width, generator=draws)


def quantizer_with(codebooks: list[Tensor]) -> ResidualQuantizer:
    """Plain Euclidean residual quantization with given codes."""
    sizes, width = [len(book) for book in codebooks], codebooks[0].shape[1]
    rq = ResidualQuantizer(codebooks=len(sizes), codes=sizes, width=width, residual="none")
    rq.start_codebooks(latents(max(sizes) * 4, width), generator=seeded())
    for stage, book in zip(rq.books, codebooks, strict=True):
        stage.restart(book)
    return rq


def test_codes_agree_with_faiss_at_beam_one_on_its_own_codebooks() -> None:
    faiss = pytest.importorskip("faiss")
    faiss.omp_set_num_threads(1)
    oracle = faiss.ResidualQuantizer(16, 4, 8)  # width, stages, bits
    oracle.train_type = faiss.ResidualQuantizer.Train_default
    oracle.max_beam_size = 1
    oracle.cp.niter = 4
    oracle.train(latents(3000, 16).numpy())
    oracle.max_beam_size = 1
    books = torch.from_numpy(faiss.vector_to_array(oracle.codebooks).reshape(4, 256, 16))
    x = latents(2000, 16, seed=1)
    theirs = torch.from_numpy(oracle.compute_codes(x.numpy())).long()  # 8 bits a stage: one byte each
    rq = quantizer_with(list(books))
    ours = rq(x)
    agree = (ours.codes == theirs).all(1)
    assert agree.double().mean() > 0.999
    torch.testing.assert_close(ours.q[agree], torch.from_numpy(oracle.decode(theirs.byte().numpy()))[agree])


def test_codes_and_sums_agree_with_vector_quantize_pytorch() -> None:
    library = pytest.importorskip("vector_quantize_pytorch")
    torch.manual_seed(0)
    oracle = library.ResidualVQ(dim=12, codebook_size=32, num_quantizers=3).eval()
    x = latents(500, 12)
    with torch.no_grad():
        quantized, codes, _ = oracle(x[None])
    ours = quantizer_with([book.detach().clone() for book in oracle.codebooks])(x)
    assert (ours.codes == codes[0]).all(1).double().mean() > 0.999
    torch.testing.assert_close(ours.q, quantized[0], rtol=1e-4, atol=1e-4)


def test_the_ema_step_agrees_with_vector_quantize_pytorch_when_every_code_is_used() -> None:
    library = pytest.importorskip("vector_quantize_pytorch")
    x = latents(400, 12)
    code = x[torch.randperm(400, generator=seeded())[:8]]
    oracle = library.VectorQuantize(dim=12, codebook_size=8, decay=0.9, eps=1e-3, threshold_ema_dead_code=0)
    book = oracle._codebook
    for buffer, value in ((book.embed, code), (book.embed_avg, code), (book.cluster_size, torch.ones(8))):
        buffer.data.copy_(value[None])
    oracle.train()(x[None])
    rq = ResidualQuantizer(codebooks=1, codes=8, width=12, residual="none", decay=0.9, eps=1e-3)
    rq.start_codebooks(x, generator=seeded())
    rq.books[0].restart(code)
    found = rq(x)
    assert (found.statistics().n[0] > 0).all()
    rq.ema_update(found)
    torch.testing.assert_close(rq.books[0].usage.float(), book.cluster_size[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rq.code_vectors()[0], book.embed[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_inertia_is_within_two_percent_of_scikit_learn_from_the_same_start(seed: int) -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    points = latents(3000, 16, seed=seed)
    seeds = choose_seeds(points, 64, generator=seeded(seed)).centres
    centres, _ = lloyd(points, seeds, iterations=10)
    oracle = cluster.KMeans(64, init=seeds.numpy(), n_init=1, max_iter=10, algorithm="lloyd", tol=0).fit(points.numpy())
    inertia = float(torch.cdist(points.double(), centres.double()).amin(1).square().sum())
    assert inertia == pytest.approx(oracle.inertia_, rel=0.02)
    assert np.median(np.abs(oracle.cluster_centers_ - centres.numpy())) < 1e-3
