"""The command line: ``python -m funcpipe demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after ``funcpipe``; None: those of the process.

    Returns:
        The exit status: 0, or 2 where the options do not fit together.
    """
    parser = argparse.ArgumentParser(prog="funcpipe", description="Pipeline-parallel training as pure functions.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    words = "train a small U-Net on scikit-learn's digits through a pipeline, draw its timeline, prove its numbers"
    from funcpipe import FuncpipeError, demo

    demo.arguments(commands.add_parser("demo", help=words, description=words))
    given = parser.parse_args(argv)
    options: dict[str, Any] = {key: value for key, value in vars(given).items() if key != "command"}
    options["remat"] = tuple(options["remat"])
    try:
        demo.main(demo.Options(**options))
    except (FuncpipeError, OSError) as error:  # or: the disk is full, the reader of the pipe has left
        parser.exit(2, f"funcpipe: {error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
