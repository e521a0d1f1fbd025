"""How the data tools end: 0 done; 2 bad flags, files or sizes; 1 anything else. One message on stderr."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable

from megatron_edit.data.errors import DataError
from megatron_edit.log.streams import outlive_readers


def run_tool(main: Callable[[], None]) -> None:
    """Runs `main` and exits; errors that need no traceback are printed as one message."""
    outlive_readers()
    faulthandler.enable()  # a mapped file that is cut meanwhile ends the process: then at least with a word
    try:
        main()
    except DataError as error:
        _end(2, str(error))
    except (OSError, RuntimeError) as error:  # disk full, a worker killed
        _end(1, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        _end(130, "interrupted")


def _end(code: int, message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
