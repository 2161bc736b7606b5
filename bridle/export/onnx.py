"""Graphs as files: `torch.export` programs (.pt2) and ONNX, each read back and compared before it counts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bridle.console import ProgressLine
from bridle.errors import BridleError, UsageError, quoted
from bridle.export.folder import Extra
from bridle.export.graphs import Graph, graphs_of
from bridle.export.load import Trained

INSTALL = 'pip install "bridle[export]"'
TRACED = 2  # rows while tracing; torch takes a batch of 1 for a constant
BATCHES = (1, 3)  # what a graph is compared on
OPSET = 20  # the first with GELU as one operation


def onnx_files(trained: Trained, progress: ProgressLine) -> Extra:
    """Writes encoder.onnx and tokenizer.onnx; compares them with torch where onnxruntime is installed."""
    _require_onnx()

    def write(folder: Path) -> Mapping[str, Any]:
        described = {}
        for graph in graphs_of(trained):
            path = folder / f"{graph.name}.onnx"
            progress.note(f"writing {path.name}")
            with _explained(path, graph), quiet(), torch.no_grad():
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
            with _explained(path, graph):
                described[path.name] = _describe(graph, compare_onnx(graph, path))
            progress.note(f"{path.name}: {described[path.name]['check']}")
        return described

    return write


def program_files(trained: Trained, progress: ProgressLine) -> Extra:
    """Writes encoder.pt2 and tokenizer.pt2, reads them back and compares."""

    def write(folder: Path) -> Mapping[str, Any]:
        described = {}
        for graph in graphs_of(trained):
            path = folder / f"{graph.name}.pt2"
            progress.note(f"writing {path.name}")
            with _explained(path, graph), quiet(), torch.no_grad():
                program = torch.export.export(
                    graph.module, graph.examples(TRACED), dynamic_shapes=_dynamic(graph), strict=False
                )
                torch.export.save(program, path)
                again = torch.export.load(path).module()
            with _explained(path, graph):
                described[path.name] = _describe(graph, compare(graph, lambda inputs, run=again: run(*inputs)))
            progress.note(f"{path.name}: {described[path.name]['check']}")
        return described

    return write


def compare_onnx(graph: Graph, path: Path) -> str:
    """How far a file agrees with torch in onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return f"not compared with torch: onnxruntime is not installed ({INSTALL})"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        named = {name: value.numpy() for name, value in zip(graph.inputs, inputs, strict=True)}
        return torch.from_numpy(session.run([graph.output], named)[0])

    return compare(graph, run)


def compare(graph: Graph, run: Any) -> str:
    """How far `run(inputs)` agrees with the graph's own network, in words; an error where it does not."""
    found = {}
    for batch in BATCHES:
        inputs = graph.examples(batch)
        with torch.no_grad():
            found[batch] = graph.agreement(graph.module(*inputs), run(inputs), batch)
    return graph.check(found)


def _dynamic(graph: Graph) -> tuple[dict[int, Any], ...]:
    return tuple({0: torch.export.Dim("batch")} for _ in graph.inputs)


def _describe(graph: Graph, check: str) -> dict[str, Any]:
    return {"inputs": list(graph.inputs), "output": graph.output, "check": check}


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UsageError(f"--onnx needs the packages onnx and onnxscript; install them with {INSTALL}") from None


@contextmanager
def _explained(path: Path, graph: Graph) -> Iterator[None]:
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
    """Keep the exporters' talk about their own insides away from the screen."""
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
