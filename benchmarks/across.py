"""From the first graph of a step to the second: a read of its size, one graph with a conditional node, and neither.

    python -m benchmarks.across --device h200

writes `across-<device>.json`. A step that evicts tokens learns on the device how many are kept, and its second graph has a size.
The ways are timed by a program of their own (`across.cu`, compiled by nvcc) with kernels that do nothing for some microseconds: as
many as a model of 36 layers has, and as many sizes as a step of 64 or 256 requests. *The gap* lies between the last kernel of the
first graph and the first of the second, *launch* is what the host is busy for. Graphs of sizes are made once for all ways that
launch them; the conditional graph of each first graph has all of them in it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.cases import options, tag_of
from benchmarks.record import environment, table, write
from mosaic.errors import UsageError

__all__ = ["HEADER", "compiled", "main", "measured", "rows_of"]

HEADER = ("kernels", "sizes", "way", "a step, us", "the gap, us", "launch, us", "made in, ms", "device MiB")
KERNELS: Final = (34 * 12,)
SIZES: Final = (8, 20)
NANOSECONDS: Final = 3000
"""The arguments of each kernel."""
_SOURCE: Final = Path(__file__).with_suffix(".cu")


def compiled(folder: Path, capability: tuple[int, int]) -> Path:
    """Compile the program; `cudaGraphSetConditional` is of the device's runtime library.

    Raises
    ------
    UsageError
        If there is no nvcc, or it refuses.
    """
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    program, arch = folder / "across", "sm_{}{}".format(*capability)
    command = [nvcc, "-O2", "-std=c++17", "-rdc=true", f"-arch={arch}", str(_SOURCE), "-lcudadevrt", "-o", str(program)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("no nvcc: install the CUDA toolkit, or put it on the path.") from None
    except subprocess.CalledProcessError as error:
        raise UsageError(f"nvcc refused {_SOURCE.name}: {error.stderr.strip().splitlines()[0]}") from None
    return program


def measured(program: Path, kernels: int, sizes: int) -> list[dict[str, Any]]:
    """Return the program's output for each variant; for those before a failing one, if one fails."""
    ran = subprocess.run([program, str(kernels), str(NANOSECONDS), str(sizes)], capture_output=True, text=True)
    if ran.returncode:
        print(ran.stderr.strip(), file=sys.stderr)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a way."""
    for point in result["points"]:
        yield [
            f"{point['kernels']}", f"{point['sizes']}", point["way"], f"{point['step_us']:,.0f}", f"{point['gap_us']:.1f}",
            f"{point['launch_us']:.1f}", f"{point['instantiate_ms']:.1f}", f"{point['mib']:.0f}",
        ]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Measure all cases, and record the figures."""
    asked = options(__doc__, models="*").parse_args(arguments)
    described = environment("medians over the steps of a run", data=[_SOURCE])
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder), torch.cuda.get_device_capability())
        points = [point for case in product(KERNELS, SIZES) for point in measured(program, *case)]
    result = {"environment": described, "card": torch.cuda.get_device_name(), "points": points}
    write(f"across-{asked.device}{tag_of(asked)}", result)
    print(table(HEADER, list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
