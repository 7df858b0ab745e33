"""RunUpdates: what a step reads of gradients and does to parameters, run by run; all of it, or nothing, or never again.

When, under which scale and whether at all is optimizer.py's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.flat_ranges import range_views
from megatron.core.dist_checkpointing.logical import LogicalPiece
from megatron.core.distributed.layout import RunParam
from megatron.core.optimizer.adam import GradScale, UpdateRule
from megatron.core.optimizer.clip_grads import NormsHere, OwnedElements, ZerosHere
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_runs import ParamRun


class RunUpdates:
    """Reads and updates all runs when the optimizer's step does.

    rules, runs: those of the optimizer. owned: which elements count. logical_pieces: by parameter name, those whose
    padding is not to be counted.
    """

    def __init__(
        self,
        rules: Sequence[UpdateRule],
        config: OptimizerConfig,
        *,
        runs: Sequence[ParamRun],
        owned: OwnedElements,
        logical_pieces: Mapping[str, list[LogicalPiece]],
    ) -> None:
        self._rules, self._config, self._runs = list(rules), config, list(runs)
        self._owned, self._logical_pieces = owned, logical_pieces
        self._parts = {run: owned.parts_of([run]) for run in runs}
        # fp64 makes the norm independent of how gradients are cut, which other layouts do differently.
        self._norm_dtype = torch.float64 if config.deterministic_mode else torch.float32
        # From the beginning of an update to its end, and for good if an error comes between.
        self._is_half_done = False

    def prepare(self) -> None:
        """Prepares a step before it changes anything: raises where it must not run, and copies the learning rates."""
        self.check_whole()
        # Else the kernel would update memory that the model no longer reads, silently.
        for run in self._runs:
            run.check_attached()
        for rule in self._rules:
            rule.refresh_rates()

    def norm(self) -> Tensor:
        """2-norm of all gradients as they were reduced, over all ranks, left on the device: [], fp64. Collective."""
        return self._owned.norm_of_all([self.norms_of(self._runs)])

    def count_zeros(self) -> Tensor:
        """Exact zeros in all gradients, over all ranks, left on the device: [], int64. Collective."""
        return self._owned.zeros_of_all([self.zeros_of(self._runs)])

    def update(self, scale: GradScale, runs: Iterable[ParamRun], *, rules: Sequence[UpdateRule]) -> None:
        """Steps runs by their scaled gradients; call it inside `whole`."""
        chosen = frozenset(runs)
        for rule in rules:
            rule.update(scale, chosen)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Surrounds an update; after an error inside, parameters and states count as half updated."""
        self._is_half_done = True
        yield
        self._is_half_done = False

    def end_step(self, grad_norm: float) -> None:
        """Called after the update; grad_norm: of the unscaled gradients before clipping."""

    def skip_step(self, grad_norm: float) -> None:
        """Called in place of the update, where a gradient was not finite."""

    def state_dict(self) -> dict[str, Any]:
        """Returns state for the next step in addition to parameters and moments, as JSON values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state from an optimizer's state_dict, whichever optimizer saved it."""

    def make_whole(self) -> None:
        """Records that parameters and states were rewritten, so that an aborted update no longer matters."""
        self._is_half_done = False

    def check_whole(self) -> None:
        """Raises RuntimeError where parameters and states are of two steps."""
        if self._is_half_done:
            raise RuntimeError(
                "an error broke an earlier step off in the middle of its update, so parameters and optimizer states "
                "are no longer of one step: load a checkpoint"
            )

    def norms_of(self, runs: Sequence[ParamRun]) -> NormsHere:
        """Returns this rank's part of `norm` for some runs."""
        grads = (part.of_grad() for run in runs for part in self._parts[run])
        return self._owned.norms_here(grads, accumulate_in=self._norm_dtype)

    def zeros_of(self, runs: Sequence[ParamRun]) -> ZerosHere:
        """Returns this rank's part of `count_zeros` for some runs."""
        # By logical piece: zeros of padding, between parameters and of the vocabulary, are nobody's.
        members = ((member, member.view_of(run.grad)) for run in runs for member in run.params)
        return self._owned.zeros_here((member.param, self._without_padding(member, grad)) for member, grad in members)

    def _without_padding(self, member: RunParam, flat: Tensor) -> list[Tensor]:
        pieces = self._logical_pieces.get(member.name)
        return [flat] if pieces is None else range_views(pieces, flat, start=member.start)
