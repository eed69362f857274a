"""Put a part of examples/custom_model.py into README.md, between its two markers. Run it after editing either.

`python tools/sync_readme.py` rewrites the section; with `--check` it only says whether there is something to do (exit code 1).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BEGIN: Final = "<!-- custom-model:begin -->"
END: Final = "<!-- custom-model:end -->"
SHOWN: Final = ("feed_forward", "plan")
"""The function and the value of the example that the README shows."""


def shown(code: str) -> str:
    """Return the statements of the example that define `SHOWN`, in its order."""
    found = []
    for statement in ast.parse(code).body:
        names = (
            [ast.unparse(target) for target in statement.targets]
            if isinstance(statement, ast.Assign)
            else [getattr(statement, "name", "")]
        )
        if {*names} & {*SHOWN}:
            found.append(str(ast.get_source_segment(code, statement)))
    return "\n\n\n".join(found)


def synced(readme: str, code: str) -> str:
    """Return the README with the section between the markers replaced by the code in a fence.

    Raises
    ------
    ValueError
        If the markers are not there, each once and in order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(END) < readme.index(BEGIN):
        raise ValueError(f"README.md must hold {BEGIN} and {END}, each once and in this order")
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n```python\n{code.strip()}\n```\n\n{END}{after}"


def main() -> int:
    """Rewrite README.md, or check it."""
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    wanted = synced(readme, shown((ROOT / "examples" / "custom_model.py").read_text(encoding="utf-8")))
    if "--check" in sys.argv[1:]:
        return int(readme != wanted)
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
