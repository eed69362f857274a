"""The exceptions of Mosaic, one tree.

Every message states the request, the finding and the next step; numbers in a message are attributes too. `UsageError`
maps to exit code 2, `DoesNotFit` to 3, everything else to 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MosaicError(Exception):
    """Base of all exceptions that Mosaic raises deliberately."""

    exit_code = 1


class UsageError(MosaicError, ValueError):
    """A request that cannot be understood: a malformed size, a negative context."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that is not in a list, with the nearest one in it.

    >>> UnknownName("device", "rtx3090", ["rtx-3090", "h200"]).suggestion
    'rtx-3090'
    """

    def __init__(self, what: str, name: object, known: Iterable[str], hint: str = "") -> None:
        self.what, self.name, self.known = what, str(name), tuple(known)
        close = difflib.get_close_matches(self.name.lower(), self.known, n=1, cutoff=0.5)
        self.suggestion = close[0] if close else None
        guess = f" Did you mean '{self.suggestion}'?" if close else ""
        tail = f" {hint}" if hint else ""
        super().__init__(f"unknown {what} '{name}'.{guess} Known: {', '.join(self.known)}.{tail}")


class DoesNotFit(MosaicError):
    """A valid request that needs more bytes than are available. If they will be, `steps` says after how many steps of the session
    at most; if the request would be refused alone in the session too, `never` is true."""

    exit_code = 3

    def __init__(
        self, message: str, *, needed_bytes: int = 0, available_bytes: int = 0, steps: int | None = None,
        never: bool = False,
    ) -> None:  # fmt: skip
        self.needed_bytes, self.available_bytes, self.steps, self.never = needed_bytes, available_bytes, steps, never
        super().__init__(message)


class GraphError(MosaicError):
    """An invalid graph: mismatching shapes, a read before any write, an illegal alias."""


class BucketOverflow(MosaicError):
    """A step computed a `count` that exceeds all `buckets` of the next one."""

    def __init__(self, message: str, *, count: int, buckets: Iterable[int]) -> None:
        self.count, self.buckets = count, tuple(buckets)
        super().__init__(message)


class ConfigWarning(UserWarning):
    """A key of a config.json that Mosaic does not know and does not use."""


class UnsupportedModel(UsageError):
    """A config.json of a family that Mosaic does not ship."""


class PlanFormatError(MosaicError):
    """A plan file that cannot be read, or of a schema this version does not know."""


class InstanceFormatError(MosaicError):
    """An offset-assignment instance (CSV) that cannot be read."""


class CheckFailed(MosaicError):
    """A plan with claims that do not hold; `violations` lists them."""

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations = tuple(violations)
        more = f" (and {len(self.violations) - 1} more)" if len(self.violations) > 1 else ""
        super().__init__(f"the plan is not valid: {self.violations[0]}{more}")


class UnsafePlan(CheckFailed):
    """A plan of Mosaic's own that its checker refused; `solver` placed its buffers."""

    def __init__(self, violations: Iterable[str], *, what: str, solver: str) -> None:
        super().__init__(violations)
        self.solver = solver
        self.args = (
            f"Mosaic planned {what} wrongly and does not hand it out: {self.args[0]}. Solver '{solver}' placed its buffers. "
            "This is a defect of Mosaic: please report it with this message; another solver may do meanwhile.",
        )


class CheckpointError(MosaicError):
    """A checkpoint that is corrupt, truncated, incomplete or of the wrong shapes."""


class CompilationFailed(MosaicError):
    """A kernel could not be compiled ahead of its first launch."""


class RuntimeMemoryError(MosaicError):
    """The operating system or the driver refused memory that the plan needs."""


class WeightsChanged(MosaicError):
    """A step that wrote to weights; `tensors` lists which."""

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        self.tensors = tuple(tensors)
        super().__init__(message)


class WeightsMisplaced(MosaicError):
    """A plan that has weights elsewhere than they were loaded; `tensors` lists which."""

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        self.tensors = tuple(tensors)
        super().__init__(message)


class DeviceLost(MosaicError):
    """The device stopped in a step: its context and all its memory are lost for this process."""


class MissingExtra(MosaicError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"{purpose} needs {package}: pip install 'mosaic-dllm[{extra}]', or in a clone pip install '.[{extra}]'"
        )
