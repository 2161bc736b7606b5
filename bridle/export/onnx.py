"""Encoder and tokenizer as graphs without Python: ONNX and `torch.export` programs (.pt2).

    encoder     x (B, C, *input), valid (B, T)  ->  features (B, T, D)
    tokenizer   x (B, C, *input), valid (B, T)  ->  codes (B, T, M) int64

A graph computes what `model.encode` or `model.tokenize` computes, for any batch. x is in the units of the data;
(x − mean) / std is part of the graph. `valid` (False on padding) is an input where files may be shorter than the
model's input and the graph uses it. Every file is read back and compared with torch before it counts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bridle.console import ProgressLine
from bridle.data.modality import modality_of
from bridle.errors import BridleError, UsageError, quoted
from bridle.export.folder import CARD, LOADED, GraphNote, WriteGraphs, as_stored, require_free, write_folder
from bridle.export.load import Trained
from bridle.models.encoder import Encoder
from bridle.models.tokenizer import Tokenizer
from bridle.seeding import generator

FEATURES_WITHIN, CODES_EQUAL = 1e-4, 0.999
INSTALL = 'pip install "bridle[export]"'
TRACED = 2  # rows while tracing; torch takes a batch of 1 for a constant
BATCHES = (1, 3)  # what a graph is compared on
OPSET = 20  # the first with GELU as one operation

Run = Callable[[tuple[Tensor, ...]], Tensor]  # inputs of a graph -> its output


def export_model(
    trained: Trained,
    out: Path,
    *,
    onnx: bool = False,
    program: bool = False,
    half: bool = False,
    overwrite: bool = False,
    progress: ProgressLine | None = None,
) -> list[str]:
    """Write a model as a folder with the graphs that were asked for; returns the names of its files."""
    require_free(out, overwrite=overwrite)  # before minutes are spent on graphs
    if onnx:
        _require_onnx()
    saving = {".onnx": save_onnx} if onnx else {}
    saving |= {".pt2": save_program} if program else {}
    stored = as_stored(trained, half=half)
    writers = [graph_writer(stored, suffix, save, progress or ProgressLine()) for suffix, save in saving.items()]
    written = write_folder(out, stored, half=half, overwrite=overwrite, graph_writers=writers)
    return [*LOADED, CARD, *written.facts.graphs]


class Normalised(nn.Module):
    """(x − mean) / std per channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], *, rank: int) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(-1, *(1,) * rank))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class EncoderGraph(nn.Module):
    """Normalisation and encoder."""

    def __init__(self, normalised: Normalised, encoder: Encoder) -> None:
        super().__init__()
        self.normalised, self.encoder = normalised, encoder

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        z: Tensor = self.encoder(self.normalised(x), valid=valid).z
        return z


class TokenizerGraph(nn.Module):
    """Normalisation and tokenizer."""

    def __init__(self, normalised: Normalised, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.normalised, self.tokenizer = normalised, tokenizer

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.tokenizer.tokenize(self.normalised(x), valid=valid)


class Graph(NamedTuple):
    """A network ready to be traced, with the names of what goes in and comes out."""

    name: str  # encoder or tokenizer
    module: nn.Module
    inputs: tuple[str, ...]
    output: str
    shape: tuple[int, ...]  # of one input: (C, *input)
    tokens: int

    def examples(self, batch: int) -> tuple[Tensor, ...]:
        """Random inputs; the last rows of a batch end early where that is possible."""
        draws = generator("graphs", self.name, batch)
        normalised = self.module.normalised
        assert isinstance(normalised, Normalised)
        x = torch.randn(batch, *self.shape, generator=draws) * normalised.std + normalised.mean
        ends = torch.linspace(1.0, 0.5, batch)[:, None] * self.tokens
        return (x, torch.arange(self.tokens) < ends) if "valid" in self.inputs else (x,)

    def agreement(self, mine: Tensor, other: Tensor, batch: int) -> float:
        """Largest difference of features, or share of equal codes, over the tokens that are not padding."""
        inputs = self.examples(batch)
        real = inputs[1] if len(inputs) == 2 else torch.ones(mine.shape[:2], dtype=torch.bool)
        if self.output == "features":
            return float((mine - other).abs()[real].max())
        return float((mine == other)[real].double().mean())

    def check(self, found: dict[int, float]) -> str:
        """One line that says how far a graph agrees with torch, or an error if it does not; `found` by batch."""
        batches = " and ".join(map(str, found))
        if self.output == "features":
            worst = max(found.values())
            if worst > FEATURES_WITHIN:
                raise UsageError(f"the exported {self.name} differs from torch by {worst:.1e}; nothing was exported.")
            return f"features within {worst:.1e} of torch, batches of {batches}"
        worst = min(found.values())
        if worst < CODES_EQUAL:
            raise UsageError(f"only {100 * worst:.2f} % of the exported {self.name}'s codes are torch's; not exported.")
        return f"{100 * worst:g} % of codes equal to torch's, batches of {batches}"


def graphs_of(trained: Trained) -> list[Graph]:
    """The graphs a model has: the encoder's, and the tokenizer's if it has one."""
    config, geometry = trained.config, trained.config.geometry.build()
    if config.data.mean is None or config.data.std is None:
        raise UsageError(f"model {config.name!r} has no normalisation statistics in its config.")
    normalised = Normalised(config.data.mean, config.data.std, rank=geometry.rank)
    padded = ("x", "valid") if modality_of(config).can_be_padded else ("x",)
    shape, tokens = geometry.shape, geometry.tokens
    encoder = EncoderGraph(normalised, trained.encoder).eval()
    found = [Graph("encoder", encoder, padded, "features", shape, tokens)]
    if trained.own_tokenizer is not None:
        inputs = padded if trained.own_tokenizer.sees_padding else ("x",)
        tokenizer = TokenizerGraph(normalised, trained.own_tokenizer).eval()
        found.append(Graph("tokenizer", tokenizer, inputs, "codes", shape, tokens))
    return found


def graph_writer(
    trained: Trained, suffix: str, save: Callable[[Graph, Path], Run | None], progress: ProgressLine
) -> WriteGraphs:
    """A function that writes the graphs of a model to a folder and says how each was checked."""

    def write(folder: Path) -> Mapping[str, GraphNote]:
        written: dict[str, GraphNote] = {}
        for graph in graphs_of(trained):
            path = folder / f"{graph.name}{suffix}"
            progress.note(f"writing {path.name}")
            with _one_line_errors(path, graph):
                with quiet(), torch.no_grad():
                    run = save(graph, path)
                missing = f"not compared with torch: onnxruntime is not installed ({INSTALL})"
                check = missing if run is None else compare(graph, run)
            written[path.name] = {"inputs": list(graph.inputs), "output": graph.output, "check": check}
            progress.note(f"{path.name}: {check}")
        return written

    return write


def save_onnx(graph: Graph, path: Path) -> Run | None:
    """Write an ONNX file; returns it as run by onnxruntime, if that is installed."""
    program = torch.onnx.export(
        graph.module,
        graph.examples(TRACED),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(graph.inputs),
        output_names=[graph.output],
        dynamic_shapes=_dynamic(graph),
        verbose=False,
    )
    assert program is not None  # with dynamo
    program.save(path, external_data=False)
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        named = {name: value.numpy() for name, value in zip(graph.inputs, inputs, strict=True)}
        return torch.from_numpy(session.run([graph.output], named)[0])

    return run


def save_program(graph: Graph, path: Path) -> Run:
    """Write a torch.export program; returns it as read back."""
    program = torch.export.export(graph.module, graph.examples(TRACED), dynamic_shapes=_dynamic(graph), strict=False)
    torch.export.save(program, path)
    again = torch.export.load(path).module()
    return lambda inputs: again(*inputs)


def compare(graph: Graph, run: Run) -> str:
    """How far `run(inputs)` agrees with the graph's own network, in words; an error where it does not."""
    found = {}
    for batch in BATCHES:
        inputs = graph.examples(batch)
        with torch.no_grad():
            found[batch] = graph.agreement(graph.module(*inputs), run(inputs), batch)
    return graph.check(found)


def _dynamic(graph: Graph) -> tuple[dict[int, Any], ...]:
    return tuple({0: torch.export.Dim("batch")} for _ in graph.inputs)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UsageError(f"--onnx needs the packages onnx and onnxscript; install them with {INSTALL}") from None


@contextmanager
def _one_line_errors(path: Path, graph: Graph) -> Iterator[None]:
    """Errors of the exporters as one line: they are of every type."""
    try:
        yield
    except (BridleError, OSError):
        raise
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UsageError(
            f"{path.name}: torch {torch.__version__} could not export or run the {graph.name} ({type(error).__name__}: "
            f"{quoted(first)}); leave this file out, or report it with `bridle doctor`."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log lines of the exporters."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
