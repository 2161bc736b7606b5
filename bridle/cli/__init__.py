"""The `bridle` command. Heavy libraries are imported inside the commands, so that --help answers at once.

Importing a module of commands registers them; their order here is the order of --help.
"""

from bridle.cli import init, train, launch, plan, evaluate, infer, search, export, data, machine  # isort: skip
from bridle.cli.app import app, main

__all__ = ["app", "data", "evaluate", "export", "infer", "init", "launch", "machine", "main", "plan", "search", "train"]
