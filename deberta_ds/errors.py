"""Errors that a user can cause, and how command-line scripts report them.

Every such error carries one message that names the file, the place in it, the rule and the remedy.
"""

import os
import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2


class UserError(ValueError):
    """Bad input: a config, corpus, shard, checkpoint or task file breaks a rule."""

    on_every_rank = False  # True: all ranks raise the same error, and only rank 0 prints it


def exit_cleanly(main: Callable[[], int | None]) -> None:
    """Run `main` and exit: with its return value, or with one line and code 2 on a UserError."""
    try:
        code = main()
    except UserError as error:
        if not (error.on_every_rank and os.environ.get("RANK", "0") != "0"):
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    sys.exit(code or 0)
