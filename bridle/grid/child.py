"""`python -m bridle.grid.child PARENT ARGUMENTS…`: `bridle ARGUMENTS…` that is told to save and leave when PARENT dies.

A parent that is killed outright (kill -9, out of memory) can tell its children nothing; without this they would train
on, unseen, and the same command given again would find their run directories locked. The kernel is asked to send
SIGTERM instead; the request outlives the exec. Only Linux can be asked: elsewhere children run to their end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of prctl(2)


def main() -> None:
    """Become the command."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it died before it was watched
            sys.exit(128 + signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", "bridle", *arguments])


if __name__ == "__main__":
    main()
