"""Encoder and tokenizer as graphs without Python: ONNX and `torch.export` programs (.pt2).

    encoder     x (B, C, *input), valid (B, T)  ->  features (B, T, D)
    tokenizer   x (B, C, *input), valid (B, T)  ->  codes (B, T, M) int64
    frontend    waveform (B, N) or pixels (B, H, W)  ->  x, for the page of `web`

A graph computes what `model.encode` or `model.tokenize` computes, for any batch. x is in the units of the data;
(x − mean) / std is part of the graph. `valid` (False on padding) is an input where files may be shorter than the
model's input and the graph uses it. With `waveform` graphs of recordings take a waveform (B, N) in ±1, at the model's
rate and just as long as its input, in place of x. Every file is read back and compared with torch before it counts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from bridle.console import ProgressLine
from bridle.data.modality import FrontEnd, PictureFrontEnd, modality_of
from bridle.errors import BridleError, UsageError, first_line, quoted
from bridle.export.auto_files import AUTO_FILES
from bridle.export.folder import CARD, LOADED, GraphNote, WriteGraphs, as_stored, require_free, write_folder
from bridle.export.trained import Trained
from bridle.export.web import PAGE, RUNTIME, find_runtime, page_input, write_page
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
    waveform: bool = False,
    half: bool = False,
    overwrite: bool = False,
    auto: bool = False,
    web: bool = False,
    runtime: Path | None = None,
    progress: ProgressLine | None = None,
) -> list[str]:
    """Write a model as a folder with the graphs that were asked for; returns the names of its files.

    With `waveform` the graphs begin with the log-mel front end. With `auto` transformers can load the folder. With
    `web` it is a web page with onnxruntime-web from `runtime`, see `web`.
    """
    require_free(out, overwrite=overwrite)  # before minutes are spent on graphs
    if web and waveform:
        raise UsageError("--web writes the front end as a graph of its own; leave out --waveform.")
    if runtime is not None and not web:
        raise UsageError("--runtime is for the page: give --web with it.")
    shown = page_input(trained) if web else None
    found = find_runtime(runtime) if web else None
    saving: dict[str, Callable[[Traced, Path], Run | None]] = {}
    if onnx or web:
        require_onnx()
        saving[".onnx"] = save_onnx
    if program:
        saving[".pt2"] = save_program
    if waveform and not saving:
        raise UsageError("--waveform is for graphs: give --onnx or --program with it.")
    if waveform and modality_of(trained.config).open_front_end is None:
        raise UsageError(f"--waveform: this model reads {modality_of(trained.config).items}, which have no waveform.")
    stored = as_stored(trained, half=half)
    line = progress or ProgressLine()
    graphs = graphs_of(stored, waveform=waveform)
    writers = [graph_writer(graphs, suffix, save, line) for suffix, save in saving.items()]
    if shown is not None and found is not None:
        front = front_graph(stored)
        writers += [graph_writer([front], ".onnx", save_onnx, line)] if front is not None else []
        inputs = {graph.name: graph.inputs for graph in [*graphs, *([front] if front is not None else [])]}
        writers.append(partial(write_page, trained=stored, shown=shown, inputs=inputs, runtime=found))
    written = write_folder(out, stored, half=half, overwrite=overwrite, graph_writers=writers, auto=auto)
    page = (PAGE, *RUNTIME) if web else ()
    return [*LOADED, CARD, *written.facts.graphs, *(AUTO_FILES if auto else ()), *page]


def require_onnx() -> None:
    """UsageError unless the packages that write ONNX files are installed."""
    try:
        import onnx as _onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UsageError(f"--onnx needs the packages onnx and onnxscript; install them with {INSTALL}") from None


class Traced(nn.Module):
    """What can be written as a graph: the names of what goes in and out, and examples of what goes in."""

    name: str
    inputs: tuple[str, ...]
    output: str

    def examples(self, batch: int) -> tuple[Tensor, ...]:
        """Inputs of `batch` rows."""
        raise NotImplementedError


class FrontGraph(Traced):
    """A front end alone: (B, *shape) -> x (B, 1, *input)."""

    name, output = "frontend", "x"

    def __init__(self, front: FrontEnd | PictureFrontEnd, given: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.front, self.inputs, self.shape = front, (given,), shape

    def forward(self, given: Tensor) -> Tensor:
        return self.front(given)[:, None]

    def examples(self, batch: int) -> tuple[Tensor, ...]:
        """Noise in 0 … 1, which is loud as a waveform."""
        return (torch.rand(batch, *self.shape, generator=generator("graphs", self.name, batch)),)


class Graph(Traced):
    """Front end, normalisation and encoder or tokenizer, ready to be traced, with the names of what goes in and out."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: Encoder | Tokenizer, trained: Trained, inputs: tuple[str, ...], front: FrontEnd | None
    ) -> None:
        super().__init__()
        self.network, self.front, self.geometry = network, front, trained.config.geometry.build()
        self.inputs = inputs if front is None else ("waveform", *inputs[1:])
        is_encoder = isinstance(network, Encoder)
        self.name, self.output = ("encoder", "features") if is_encoder else ("tokenizer", "codes")
        data = trained.config.data
        if data.mean is None or data.std is None:
            raise UsageError(f"model {trained.config.name!r} has no normalisation statistics in its config.")
        for name, values in (("mean", data.mean), ("std", data.std)):
            shaped = torch.tensor(values, dtype=torch.float32).reshape(-1, *(1,) * self.geometry.rank)
            self.register_buffer(name, shaped)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        features = x if self.front is None else self.front(x)[:, None]
        normalised = (features - self.mean) / self.std
        if isinstance(self.network, Encoder):
            return cast("Tensor", self.network(normalised, valid=valid).z)
        return self.network.tokenize(normalised, valid=valid)

    def examples(self, batch: int) -> tuple[Tensor, ...]:
        """Random inputs; the last rows of a batch end early where that is possible."""
        draws, tokens = generator("graphs", self.name, batch), self.geometry.tokens
        if self.front is None:
            x = torch.randn(batch, *self.geometry.shape, generator=draws) * self.std + self.mean
        else:
            x = 0.1 * torch.randn(batch, self.front.samples(self.geometry.input[0]), generator=draws)
        ends = torch.linspace(1.0, 0.5, batch)[:, None] * tokens
        return (x, torch.arange(tokens) < ends) if "valid" in self.inputs else (x,)


def graphs_of(trained: Trained, *, waveform: bool = False) -> list[Graph]:
    """The graphs a model has: the encoder's, and the tokenizer's if it has one."""
    modality = modality_of(trained.config)
    front = modality.open_front_end(trained.config) if waveform and modality.open_front_end is not None else None
    padded = ("x", "valid") if modality.can_be_padded else ("x",)
    graphs = [Graph(trained.encoder, trained, padded, front)]
    if trained.own_tokenizer is not None:
        inputs = padded if trained.own_tokenizer.sees_padding else ("x",)
        graphs.append(Graph(trained.own_tokenizer, trained, inputs, front))
    return [graph.eval() for graph in graphs]


def front_graph(trained: Trained) -> FrontGraph | None:
    """What makes inputs of waveforms or pictures; None where the model sees what is given."""
    modality, config = modality_of(trained.config), trained.config
    if modality.open_front_end is not None:
        sound = modality.open_front_end(config)
        return FrontGraph(sound, "waveform", (sound.samples(config.geometry.input[0]),))
    if modality.open_picture_front_end is not None:
        picture = modality.open_picture_front_end(config)
        return FrontGraph(picture, "pixels", picture.size)
    return None


def graph_writer(
    graphs: Sequence[Traced], suffix: str, save: Callable[[Traced, Path], Run | None], progress: ProgressLine
) -> WriteGraphs:
    """A function that writes the graphs of a model to a folder and says how each was checked."""

    def write(folder: Path) -> Mapping[str, GraphNote]:
        written: dict[str, GraphNote] = {}
        for graph in graphs:
            path = folder / f"{graph.name}{suffix}"
            progress.note(f"writing {path.name}")
            with _one_line_errors(path, graph), _quiet(), torch.no_grad():
                run = save(graph, path)
                missing = f"not compared with torch: onnxruntime is not installed ({INSTALL})"
                check = missing if run is None else compare(graph, run)
            written[path.name] = {"inputs": list(graph.inputs), "output": graph.output, "check": check}
            progress.note(f"{path.name}: {check}")
        return written

    return write


def save_onnx(graph: Traced, path: Path) -> Run | None:
    """Write an ONNX file; returns it as run by onnxruntime, if that is installed."""
    program = torch.onnx.export(
        graph,
        graph.examples(TRACED),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(graph.inputs),
        output_names=[graph.output],
        dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in graph.inputs),
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


def save_program(graph: Traced, path: Path) -> Run:
    """Write a torch.export program; returns it as read back."""
    dynamic = tuple({0: torch.export.Dim("batch")} for _ in graph.inputs)
    program = torch.export.export(graph, graph.examples(TRACED), dynamic_shapes=dynamic, strict=False)
    torch.export.save(program, path)
    again = torch.export.load(path).module()
    return lambda inputs: again(*inputs)


def compare(graph: Traced, run: Run) -> str:
    """How far `run(inputs)` agrees with torch over the real tokens, in words; UsageError where it does not.

    Features may differ by FEATURES_WITHIN; at least the share CODES_EQUAL of the codes must be equal.
    """
    differences, equal = [], []
    for batch in BATCHES:
        inputs = graph.examples(batch)
        with torch.no_grad():
            mine, other = graph(*inputs), run(inputs)
        real = inputs[1] if len(inputs) == 2 else torch.ones(mine.shape[:2], dtype=torch.bool)
        differences.append(float((mine - other).abs()[real].max()))
        equal.append(float((mine == other)[real].double().mean()))
    batches = " and ".join(map(str, BATCHES))
    if graph.output != "codes":
        if max(differences) > FEATURES_WITHIN:
            raise UsageError(
                f"the exported {graph.name} differs from torch by {max(differences):.1e}; nothing was exported."
            )
        return f"{graph.output} within {max(differences):.1e} of torch, batches of {batches}"
    if min(equal) < CODES_EQUAL:
        raise UsageError(f"only {100 * min(equal):.2f} % of the exported tokenizer's codes are torch's; not exported.")
    return f"{100 * min(equal):g} % of codes equal to torch's, batches of {batches}"


@contextmanager
def _one_line_errors(path: Path, graph: Traced) -> Iterator[None]:
    """Errors of the exporters as one line: they are of every type."""
    try:
        yield
    except (BridleError, OSError):
        raise
    except Exception as error:
        raise UsageError(
            f"{path.name}: torch {torch.__version__} could not export or run the {graph.name} ({type(error).__name__}: "
            f"{quoted(first_line(error))}); leave this file out, or report it with `bridle doctor`."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and log lines of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
