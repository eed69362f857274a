"""A process that finds or compiles kernels: `ahead.Compilers` writes what is asked for to its standard input, and reads answers.

It has a card in name only, so it needs none, and takes no memory of one that is there.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from mosaic.kernels.cuda.shared.kept import KernelFolder, NotKept
from mosaic.kernels.cuda.shared.launching import triton

LIBRARY: Final = "libcuda.so.1"


class Named:
    """A driver of a card that is not there, as far as Triton asks it before a launch.

    Parameters
    ----------
    capability
        Of the card.
    """

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        """The card."""
        return self._target

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """A stream that nothing is launched on."""
        return 0


def main() -> None:
    """Answer until standard input ends."""
    path, most_bytes, capability = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks ends it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints is no answer
    folder = KernelFolder(Path(path), most_bytes=int(most_bytes))
    triton.runtime.driver.set_active(Named(int(capability)))
    with tempfile.TemporaryDirectory() as own:
        _stand_in_for_the_driver(Path(own))
        while True:
            try:
                asked, compiling = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            print(json.dumps(_answer(folder, asked, compiling)), file=answers, flush=True)


def _answer(folder: KernelFolder, asked: bytes, compiling: bool) -> dict[str, Any]:
    """Whether the folder has a kernel, and why it could not be compiled."""
    module, name, arguments, options = pickle.loads(asked)
    try:
        kernel = getattr(importlib.import_module(module), name)
        with folder.in_force(compiling=compiling):
            _compile(kernel, arguments, options)
    except NotKept:
        return {"found": False, "why": ""}
    except Exception as error:
        first = str(error).strip().splitlines() or [""]
        return {"found": False, "why": f"{type(error).__name__}: {first[0]}"}
    return {"found": True, "why": ""}


def _compile(kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Have Triton find or compile a kernel, and what hands its arguments to the driver."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    kernel.device_caches.clear()  # or it is found in this process
    compiled = kernel.run(grid=(1,), warmup=True, **arguments, **options)
    CudaUtils()
    CudaLauncher(compiled.src, compiled.metadata)


def _stand_in_for_the_driver(folder: Path) -> None:
    """Where there is no driver, load a library with its functions, none of which is called: Triton links launchers with it."""
    try:
        ctypes.CDLL(LIBRARY)
        return
    except OSError:
        pass
    header = Path(triton.backends.__file__).parent / "nvidia" / "include" / "cuda.h"
    compiler = os.environ.get("CC", "gcc")
    declared = subprocess.run([compiler, "-E", "-P", str(header)], capture_output=True, text=True, check=True).stdout
    source = folder / "driver.c"
    source.write_text(
        "".join(f"int {name}(void) {{ return 1; }}\n" for name in {*re.findall(r"\b(cu[A-Z]\w+)\(", declared)})
    )
    library = folder / LIBRARY
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", str(source), "-o", str(library)],
        check=True,
        capture_output=True,
    )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = str(folder)


if __name__ == "__main__":
    main()
