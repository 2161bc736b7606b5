"""The quantizer beside other libraries: python benchmarks/quantizer_libraries.py [--quick]

vector-quantize-pytorch, faiss and scikit-learn do the same work as `bridle bench quantizer` measures, on the same
vectors and codebooks, interleaved in one process on one thread. Libraries that are not installed are left out.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch
from bench.quantizer import CODES, ITERATIONS, STAGES, WIDTH, Fixture, run
from bench.timing import Call
from torch import Tensor

LIBRARIES = ("vector-quantize-pytorch", "faiss-cpu", "scikit-learn")


def other_libraries(work: str, data: Fixture) -> dict[str, Call]:
    """Calls of other libraries that do `work`, by name."""
    has_vqp, has_faiss = find_spec("vector_quantize_pytorch") is not None, find_spec("faiss") is not None
    if has_faiss:
        import faiss

        faiss.omp_set_num_threads(1)
    calls: dict[str, Call] = {}
    if work == "assign":
        calls |= {"vector-quantize-pytorch": vqp_forward(data)} if has_vqp else {}
        calls |= {"faiss, beam 1": faiss_assign(data)} if has_faiss else {}
    elif work == "train step":
        calls |= {"vector-quantize-pytorch": vqp_step(data)} if has_vqp else {}
    elif work == "k-means":
        seeds = data.x[:CODES].clone()
        calls |= {"vector-quantize-pytorch": vqp_kmeans(data.x)} if has_vqp else {}
        calls |= {"faiss": faiss_kmeans(data.x, seeds)} if has_faiss else {}
        calls |= {"scikit-learn": sklearn_kmeans(data.x, seeds)} if find_spec("sklearn") is not None else {}
    return calls


def vqp_forward(data: Fixture) -> Call:
    quantizer = vqp_quantizer(data.codes).eval()

    def forward() -> None:
        with torch.no_grad():
            quantizer(data.x[None])

    return forward


def vqp_step(data: Fixture) -> Call:
    quantizer, x = vqp_quantizer(data.codes).train(), data.x.clone().requires_grad_()

    def step() -> None:
        _, _, loss = quantizer(x[None])
        loss.sum().backward()
        x.grad = None

    return step


def vqp_quantizer(codes: list[Tensor]) -> torch.nn.Module:
    from vector_quantize_pytorch import ResidualVQ

    quantizer: torch.nn.Module = ResidualVQ(
        dim=WIDTH, codebook_size=CODES, num_quantizers=STAGES, decay=0.99, commitment_weight=0.25
    )
    for layer, code in zip(quantizer.layers, codes, strict=True):
        layer._codebook.embed.data.copy_(code[None])
        layer._codebook.embed_avg.data.copy_(code[None])
    return quantizer


def vqp_kmeans(x: Tensor) -> Call:
    from vector_quantize_pytorch.vector_quantize_pytorch import kmeans

    return lambda: kmeans(x[None], CODES, ITERATIONS, sample_fn=lambda samples, count: samples[:, :count])


def faiss_assign(data: Fixture) -> Call:
    import faiss

    quantizer = faiss.ResidualQuantizer(WIDTH, STAGES, CODES.bit_length() - 1)
    quantizer.max_beam_size = 1
    faiss.copy_array_to_vector(torch.stack(data.codes).numpy().ravel(), quantizer.codebooks)
    quantizer.is_trained = True
    points = data.x.numpy()
    return lambda: quantizer.compute_codes(points)


def faiss_kmeans(x: Tensor, seeds: Tensor) -> Call:
    import faiss

    points = x.numpy()

    def solve() -> None:
        solver = faiss.Kmeans(
            WIDTH, CODES, niter=ITERATIONS, min_points_per_centroid=1, max_points_per_centroid=len(points), seed=0
        )
        solver.train(points, init_centroids=seeds.numpy())

    return solve


def sklearn_kmeans(x: Tensor, seeds: Tensor) -> Call:
    from sklearn.cluster import KMeans

    solver = KMeans(CODES, init=seeds.numpy(), n_init=1, max_iter=ITERATIONS, tol=0, algorithm="lloyd")
    points = x.numpy()
    return lambda: solver.fit(points)


def main() -> int:
    quick = "--quick" in sys.argv
    table = run(
        sizes=(8192,) if quick else (8192, 65536),
        repeats=3 if quick else 7,
        tell=lambda text: print(f"measuring {text}", file=sys.stderr),
        others=other_libraries,
        libraries=LIBRARIES,
    )
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
