"""The weights of one model or program: loaded to a plan's places, moved to another plan's, or adopted from a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.safetensors import Layout, tensor_rows
from mosaic.planner.check import WeightMap
from mosaic.runtime.checkpoint import PIECE_BYTES, Checkpoint
from mosaic.runtime.weights import (
    adopt_tensors,
    commit_weights,
    fill_randomly,
    load_weights,
    place_weights,
    streamed_bytes,
    weight_views,
)
from mosaic.runtime.workspace import Workspace

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner

NO_WEIGHTS: Final[Mapping[str, Tensor]] = {}


class WeightStore:
    """The weights of a model or program, and their places.

    Parameters
    ----------
    planner
        Of the model, whose weights are those of its directory, or random by `seed` if it has none; or of the program.
    workspace
        The ranges `weights` and `host` of the weights.
    device
        The device of the steps.

    Attributes
    ----------
    views
        Every weight by its tensor name, a program's by its buffer's name; empty before loading.
    places
        Where they were loaded; binding compares plans with it. None for adopted weights.
    adopted
        Tensors that replace the plan's offsets, by tensor name: a module's own, and constants.
    adopted_bytes
        Bytes of adopted tensors in the ledger.
    shown
        Whether a caller got the views since the weights were loaded, and may have written into them.
    """

    def __init__(self, planner: Planner, workspace: Workspace, device: torch.device, *, seed: int) -> None:
        self._planner, self._workspace, self._device, self._seed = planner, workspace, device, seed
        self._streamed, self.adopted_bytes = "", 0
        self.views = NO_WEIGHTS
        self.places: WeightMap | None = None
        self.adopted = NO_WEIGHTS
        self.shown = False

    def show(self) -> Mapping[str, Tensor]:
        """Return the views to a caller, who may write into them."""
        self.shown = True
        return self.views

    def fill(self, plan: Plan, given: Mapping[str, Tensor] | None = None) -> None:
        """Fill the weights where a plan has them, on the device and in host memory.

        Parameters
        ----------
        given
            A module's own parameters, adopted without a copy; or tensors that are copied into a program's weights.
        """
        if self._planner.program is not None:
            commit_weights(plan, self._workspace)
            self.views, self.places = place_weights(plan, self._workspace, given, seed=self._seed), plan.weights
            return
        if given is None:
            self._load(plan)
        else:
            self._adopt(plan, given)
        self._streamed = str(plan.config["stream"])

    @property
    def can_move(self) -> bool:
        """Whether a model's weights can be loaded again as they are: nobody has written into them, and their files are there."""
        path = self._planner.model.path
        return not self.shown and (path is None or Layout.exists(path))

    def _load(self, plan: Plan) -> None:
        workspace, model = self._workspace, self._planner.model
        commit_weights(plan, workspace)
        views = weight_views(plan, workspace)
        if model.path is None:
            staging = self._staging(plan) if self._device.type == "cuda" and streamed_bytes(plan) else None
            fill_randomly(views, seed=self._seed, staging=staging, architecture=model.architecture)
            if staging is not None:
                workspace.trim_all({"workspace": 0})
        else:
            with Checkpoint(model.path) as checkpoint:
                load_weights(views, checkpoint, model.architecture)
        self.views, self.places = views, plan.weights

    def _staging(self, plan: Plan) -> Tensor:
        """Staging for drawing host weights: the range of the device's weights if there is room, else that of the first
        step's workspace; a budget may leave no memory beside them."""
        pool = "weights" if plan.components["weights"] >= PIECE_BYTES else "workspace"
        if pool == "workspace":
            self._workspace.resize(pool, PIECE_BYTES)
        return self._workspace.view(pool, 0, (PIECE_BYTES,), "uint8")

    def _adopt(self, plan: Plan, state: Mapping[str, Tensor]) -> None:
        """Adopt a module's own parameters without a copy, and make the constants."""
        records = plan.records.buffers
        names = {tensor_rows(record.tensor)[0] for record in records if record.tensor is not None}
        bare = {name for name in state if f"model.{name}" in names - state.keys()}
        named = {f"model.{name}" if name in bare else name: tensor for name, tensor in state.items()}
        adopted = adopt_tensors(plan, named, device=self._device, architecture=self._planner.model.architecture)
        constants = {
            record.tensor: torch.empty(record.shape, device=self._device)
            for record in records
            if record.tensor is not None and record.tensor.startswith("=")
        }
        fill_randomly(constants)
        self._workspace.ledger.charge("weights", plan.components["weights"])
        self.views = self.adopted = {**adopted, **constants}
        self.adopted_bytes = plan.components["weights"]

    def serves(self, plan: Plan) -> bool:
        """Return whether the weights are where a plan has them. All plans of a program have them in the same places.

        Raises
        ------
        UsageError
            If they are not, and cannot move: a module's parameters stay where they are.
        """
        if self._planner.program is not None:
            return True
        wanted = str(plan.config["stream"])
        if wanted != self._streamed and self.adopted:
            raise UsageError(
                f"'stream' is '{wanted}', and the module's own parameters stay on the device: leave 'stream' out, or save "
                f"the model and compile the checkpoint directory."
            )
        return wanted == self._streamed

    def forget(self) -> None:
        """Drop all views; the workspace frees the memory."""
        self.views, self.places, self.shown = NO_WEIGHTS, None, False
