"""Two gloo processes against one: the same codebooks, bit for bit on both ranks, through start, reset and updates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bridle import distributed
from bridle.errors import NonFiniteError
from bridle.quantize import ResidualQuantizer
from bridle.quantize.usage import CodeAge, UsageCounter

torch.set_num_threads(1)
RULES = ("once", "perstage", "released", "none", "independent")
STEPS = 5


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def global_batch(step: int) -> Tensor:
    """(B, T, Dq) = (8, 40, 16); every world size sees these rows in this order."""
    return 2 * torch.randn(8, 40, 16, generator=seeded(step)) + 0.5


def my_rows(x: Tensor) -> Tensor:
    """This rank's share: unequal on purpose, 3 samples on rank 0 and 5 on rank 1."""
    if not dist.is_initialized():
        return x
    return x[:3] if dist.get_rank() == 0 else x[3:]


def train(rq: ResidualQuantizer, *, padded: bool) -> dict[str, Tensor]:
    """A start, a forced reset and some updates; returns what must not depend on the number of processes."""
    generator = seeded(77)
    seen: dict[str, Tensor] = {}
    valid = torch.arange(40).expand(8, 40) < torch.arange(33, 41)[:, None] if padded else None
    mine = None if valid is None else my_rows(valid)
    rq.start_codebooks(my_rows(global_batch(0)), generator=generator, valid=mine)
    counter, ages = UsageCounter(rq.codes, positions=40), CodeAge(rq.codes)
    for step in range(1, STEPS + 1):
        if step == 3:
            with torch.no_grad():
                rq.books[0].code[:2] = 1e3  # nobody chooses these: the reset must redraw them
            seen["redrawn"] = torch.tensor(rq.reset_rare(my_rows(global_batch(step)), generator=generator, valid=mine))
        found = rq(my_rows(global_batch(step)), valid=mine)
        counter.update(found.codes, valid=mine)
        chosen = ages.count(found.codes.flatten(0, 1) if mine is None else found.codes[mine])
        ages.update(distributed.sum_over_ranks(chosen))
        rq.ema_update(found)
        for m, code in enumerate(rq.code_vectors()):
            seen[f"code{m}.step{step}"] = code.clone()
    total = counter.over_ranks()
    seen |= {f"counts{m}": counts for m, counts in enumerate(total.counts)}
    seen |= {f"joint{m}": joint for m, joint in enumerate(total.joint)}
    seen |= ages.state()
    seen["next draw"] = torch.rand(4, generator=generator)
    return seen


def scenarios() -> dict[str, tuple[Callable[[], ResidualQuantizer], bool]]:
    def built(**options: object) -> Callable[[], ResidualQuantizer]:
        return lambda: ResidualQuantizer(**{"codebooks": 4, "codes": 12, "width": 16, **options})  # type: ignore[arg-type]

    rules = {f"rule {rule}": (built(residual=rule), False) for rule in RULES}
    return rules | {
        "padded": (built(), True),
        "uniform": (built(start="uniform", reset_below=3), False),
        "soft": (built(soft=3), False),
    }


def work(out: Path) -> None:
    """What every process does."""
    early = {name: build() for name, (build, _) in scenarios().items()}  # before there is a process group
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    results: dict[str, Tensor] = {}
    for name, (_, padded) in scenarios().items():
        results |= {f"{name}: {key}": value for key, value in train(early[name], padded=padded).items()}
    late = scenarios()["rule once"][0]()
    results |= {f"late: {key}": value for key, value in train(late, padded=False).items()}
    results |= refusals()
    results |= learn_by_gradient()
    torch.save(results, out / f"rank{os.environ.get('RANK', 'alone')}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def learn_by_gradient() -> dict[str, Tensor]:
    """Codes as parameters under DistributedDataParallel; equal halves, so that the mean of means is the mean."""
    rq = ResidualQuantizer(codebooks=2, codes=6, width=16, update="gradient")
    rq.start_codebooks(my_rows(global_batch(0)), generator=seeded(3))
    model = nn.parallel.DistributedDataParallel(rq) if dist.is_initialized() else rq
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        x = global_batch(step)
        half = x if not dist.is_initialized() else x[4 * dist.get_rank() :][:4]
        model(half).codebook_term.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"gradient: code{m}": code.clone() for m, code in enumerate(rq.code_vectors())}


def refusals() -> dict[str, Tensor]:
    """NaN on the last rank only: every rank must refuse, and keep its codebooks."""
    rq, generator = scenarios()["rule once"][0](), seeded(5)
    rq.start_codebooks(my_rows(global_batch(0)), generator=generator)
    before = [code.clone() for code in rq.code_vectors()]
    x = global_batch(1)
    x[-1, -1, 0] = float("nan")
    bad, refused = my_rows(x), 0
    for call in (
        lambda: rq.start_codebooks(bad, generator=generator),
        lambda: rq.reset_rare(bad, generator=generator),
        lambda: rq.ema_update(rq(bad)),
    ):
        try:
            call()
        except NonFiniteError:
            refused += 1
    kept = all(torch.equal(a, b) for a, b in zip(before, rq.code_vectors(), strict=True))
    return {"refused": torch.tensor(refused), "kept": torch.tensor(kept)}


def run_to_the_end(command: list[str], environment: dict[str, str]) -> None:
    """Run a command; if it hangs, ask it to stop, so that it also ends the processes it started."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"{command} did not end:\n{output}")
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    out = tmp_path_factory.mktemp("ranks")
    alone = [sys.executable, __file__, str(out)]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**plain, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    for command in (alone, [*two, __file__, str(out)]):
        run_to_the_end(command, environment)
    return {name: torch.load(out / f"rank{name}.pt", weights_only=True) for name in ("alone", "0", "1")}


def test_both_ranks_hold_the_same_codebooks_bit_for_bit_after_every_update(runs: dict[str, dict[str, Tensor]]) -> None:
    assert len(runs["0"]) > 200
    assert runs["0"].keys() == runs["1"].keys()
    assert [key for key in runs["0"] if not torch.equal(runs["0"][key], runs["1"][key])] == []


def test_two_processes_end_with_the_codebooks_of_one(runs: dict[str, dict[str, Tensor]]) -> None:
    assert runs["0"].keys() == runs["alone"].keys()
    differ = [key for key in runs["0"] if not torch.equal(runs["0"][key], runs["alone"][key])]
    assert [key for key in differ if not key.startswith("gradient: ")] == []


def test_codes_that_learn_by_gradient_do_so_alike_in_one_process_and_in_two(runs: dict[str, dict[str, Tensor]]) -> None:
    for m in range(2):
        key = f"gradient: code{m}"
        torch.testing.assert_close(runs["0"][key], runs["alone"][key], rtol=1e-5, atol=1e-6)


def test_a_quantizer_built_before_the_process_group_behaves_the_same(runs: dict[str, dict[str, Tensor]]) -> None:
    late = {key.removeprefix("late: "): value for key, value in runs["0"].items() if key.startswith("late: ")}
    assert late
    assert all(torch.equal(value, runs["0"][f"rule once: {key}"]) for key, value in late.items())


def test_the_forced_reset_did_fire(runs: dict[str, dict[str, Tensor]]) -> None:
    assert all(int(runs["0"][f"{name}: redrawn"]) >= 2 for name in scenarios())


def test_nan_on_one_rank_is_refused_by_all_and_changes_nothing(runs: dict[str, dict[str, Tensor]]) -> None:
    for name in ("alone", "0", "1"):
        assert runs[name]["refused"] == 3
        assert runs[name]["kept"]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
