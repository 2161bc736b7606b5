"""Python files of the user that register modalities, tokenizers or scorers.

`bridle --plugin FILE COMMAND …` names them on the command line; the environment variable BRIDLE_PLUGINS (paths joined
by `os.pathsep`) passes them on to every process that a command starts. From Python, importing the file is enough. No
config or checkpoint can name a plugin, so loading a model runs no code but bridle's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from bridle.errors import UsageError, quoted

VARIABLE = "BRIDLE_PLUGINS"


def name_plugins(paths: Iterable[Path]) -> None:
    """Add files to BRIDLE_PLUGINS as absolute paths; UsageError if one is not there."""
    found = [entry for entry in os.environ.get(VARIABLE, "").split(os.pathsep) if entry]
    for path in paths:
        if not path.is_file():
            raise UsageError(f"--plugin: {quoted(path)} is not a file; give a Python file that registers something.")
        found.append(str(path.resolve()))
    if found:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(found))


def load_plugins() -> None:
    """Import every file that BRIDLE_PLUGINS names, once per process; UsageError says which failed and why."""
    for entry in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        module_name = f"bridle_plugin_{Path(entry).stem}"
        known = sys.modules.get(module_name)
        if known is not None:
            if known.__file__ != entry:
                raise UsageError(
                    f"two plugins have the name {Path(entry).name}: {known.__file__} and {entry}; rename one."
                )
            continue
        spec = importlib.util.spec_from_file_location(module_name, entry)
        if spec is None or spec.loader is None:
            raise UsageError(f"--plugin: {quoted(entry)} is not a Python file; its name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise UsageError(f"--plugin: {quoted(entry)} failed with {type(error).__name__}: {error}") from error
