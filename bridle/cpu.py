"""Keeps bf16 from killing the process on CPUs whose AMX units are announced but unusable.

There oneDNN picks AMX kernels and the first bf16 matrix product dies with an illegal instruction. Capping oneDNN's
instruction set avoids it, but only if the cap is in place before the process first uses oneDNN. So: try in a child
process, then cap or refuse. Nothing here imports torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from bridle.errors import ConfigError

CAP_NAME, CAP = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
_capped_in_time = False  # did `make_bf16_safe` set the cap before torch was loaded?
_TRIAL = "import torch; a = torch.ones(256, 256).bfloat16(); assert (a @ a)[0, 0].item() == 256"


def make_bf16_safe() -> str:
    """Make sure that bf16 products on the CPU cannot kill this process, or raise ConfigError. Says what was done."""
    if _survives(os.environ.get(CAP_NAME)) and not _set_too_late():
        return "bf16 works on this CPU as it is"
    if not _survives(CAP):
        raise ConfigError(
            "runtime.precision: bf16 does not work on this CPU (a trial in a child process died); "
            "use runtime.precision=fp32."
        )
    if "torch" in sys.modules:
        raise ConfigError(
            "runtime.precision: bf16 would kill this process on this CPU (illegal instruction), and torch is already "
            f"loaded; start Python with {CAP_NAME}={CAP} set, or use runtime.precision=fp32."
        )
    global _capped_in_time
    os.environ[CAP_NAME], _capped_in_time = CAP, True
    return f"bf16 on this CPU needs {CAP_NAME}={CAP}; set for this run"


@cache
def _survives(cap: str | None) -> bool:
    """Does a bf16 product work in a child process under this cap?"""
    environment = {key: value for key, value in os.environ.items() if key != CAP_NAME}
    if cap is not None:
        environment[CAP_NAME] = cap
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL], env=environment, capture_output=True, timeout=120, check=False
    )
    return done.returncode == 0


def _set_too_late() -> bool:
    """Was the cap put into os.environ after torch, and so perhaps oneDNN, had started?"""
    if _capped_in_time or "torch" not in sys.modules or CAP_NAME not in os.environ:
        return False
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux: there is no way to tell, so take the careful answer
        return True
    return f"{CAP_NAME}={os.environ[CAP_NAME]}".encode() not in started_with
