"""`python -m mosaic`, the same as the `mosaic` command."""

from __future__ import annotations

from mosaic_dllm import main

if __name__ == "__main__":
    main()
