"""``python -m funcpipe``: the command line."""

from __future__ import annotations

from funcpipe.cli import main as main

if __name__ == "__main__":
    raise SystemExit(main())
