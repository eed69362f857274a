"""`python -m mosaic`, the same as the `mosaic` command."""

from __future__ import annotations

from mosaic.cli import main

if __name__ == "__main__":
    main()
