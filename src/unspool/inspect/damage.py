"""Whether Arrow files can be read without harm.

Why: `store.py` maps files and trusts them, as training must. Looking is what one does when something seems wrong,
and a flipped bit in an offset would end the process without a word.
Price: the offsets of all lists and strings are read; the tokens themselves are not.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from unspool.base.errors import DataError


def check_files(paths: Sequence[Path]) -> None:
    """DataError for a file that is cut short or whose lists point outside of it."""
    for path in paths:
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as file:
                for number in range(file.num_record_batches):
                    file.get_batch(number).validate(full=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(
                f"{path}: not a complete Arrow file ({reason}); delete its folder and run again."
            ) from error
