"""DeviceLedger: the bytes of a device by owner, against one budget. Every pool asks it before it takes memory."""

from __future__ import annotations

from mosaic.errors import DoesNotFit
from mosaic.units import format_bytes


class DeviceLedger:
    """The bytes of one device by owner, and a budget that their sum never exceeds.

    Parameters
    ----------
    budget_bytes
        The most that all owners together may hold; None: unlimited.
    device
        A name for messages.

    Examples
    --------
    >>> ledger = DeviceLedger(budget_bytes=100)
    >>> ledger.charge("workspace", 60)
    >>> ledger.free_bytes
    40
    """

    def __init__(self, budget_bytes: int | None = None, device: str = "cpu") -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"a budget is at least 0 bytes, got {budget_bytes}")
        self.budget_bytes, self.device = budget_bytes, device
        self._held: dict[str, int] = {}

    @property
    def committed_bytes(self) -> int:
        """Bytes held by all owners together."""
        return sum(self._held.values())

    @property
    def free_bytes(self) -> int | None:
        """Bytes left in the budget; None without one."""
        return None if self.budget_bytes is None else self.budget_bytes - self.committed_bytes

    def charge(self, owner: str, num_bytes: int) -> None:
        """Add bytes to an owner.

        Raises
        ------
        DoesNotFit
            If that would exceed the budget; nothing changes then.
        """
        if num_bytes < 0:
            raise ValueError(f"a charge is at least 0 bytes, got {num_bytes}; use release")
        self.require(owner, num_bytes)
        self._held[owner] = self._held.get(owner, 0) + num_bytes

    def require(self, owner: str, num_bytes: int) -> None:
        """Raise DoesNotFit if a charge would; nothing changes."""
        free = self.free_bytes
        if free is not None and num_bytes > free:
            raise DoesNotFit(self._refusal(owner, num_bytes, free), needed_bytes=num_bytes, available_bytes=free)

    def _refusal(self, owner: str, num_bytes: int, free: int) -> str:
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.held().items()) or "nothing"
        budget = format_bytes(self.budget_bytes or 0)
        need = format_bytes(self.committed_bytes + num_bytes)
        return (
            f"{owner} asks for {format_bytes(num_bytes)} on {self.device}, {format_bytes(free)} of the budget of "
            f"{budget} are free (held: {held}). Raise the budget to {need}, or plan for fewer tokens."
        )

    def release(self, owner: str, num_bytes: int) -> None:
        """Take bytes from an owner, who must hold them."""
        held = self._held.get(owner, 0)
        assert 0 <= num_bytes <= held, f"{owner} releases {num_bytes} bytes and holds {held}"
        if held == num_bytes:
            self._held.pop(owner, None)
        else:
            self._held[owner] = held - num_bytes

    def held(self) -> dict[str, int]:
        """Give the bytes by owner, in order of the first charge."""
        return dict(self._held)
