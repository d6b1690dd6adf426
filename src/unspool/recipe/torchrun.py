"""torchrun for `unspool launch`: it ends when `launch` is killed, and prints no traceback.

`python -m unspool.recipe.torchrun PARENT ARGUMENTS…`, where PARENT is the process id of `launch`.
"""

import os
import signal
import sys
import threading
import time

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from unspool.recipe.launch import GRACE

INTERVAL = 0.5  # seconds between two checks of the parent process


def main() -> None:
    parent, args = int(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if "--shutdown-timeout" in run.get_args_parser().format_help():
        # On SIGTERM, ranks finish their step and save. Older versions of torchrun always wait 30 seconds.
        args = [f"--shutdown-timeout={GRACE}", *args]
    try:
        run.main(args)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        # Ranks print their own errors, except one that was killed.
        rank, first = failed.get_first_failure()
        if first.exitcode < 0:
            print(f"rank {rank} was killed by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
        sys.exit(1)


def _end_with(parent: int) -> None:
    """Send this process SIGTERM when the parent process has ended for any reason."""
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
