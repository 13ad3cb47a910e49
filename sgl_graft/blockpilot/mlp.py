"""`mlp`: BlockPilot's predictor as a policy, once per request at the end of its prefill."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .policy import Prefilled, Round
from .policy_file import PolicyDocument
from .predictor import Predictor

logger = logging.getLogger(__name__)


class MlpPolicy:
    """The folded predictor; the default where it has nothing to say.

    Args:
        document: candidates, default and temperatures.
        predictor: reads hidden states; None when the policy does not fit this server.
        why_not: the reason when ``predictor`` is None.
        default: the server's default size, where it differs from the document's.
    """

    name = "mlp"
    tries = None

    def __init__(
        self,
        document: PolicyDocument,
        predictor: Predictor | None,
        why_not: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        self.document = document
        self.predictor = predictor
        self.default = document.default
        self.sizes = torch.tensor(document.candidates, dtype=torch.int32, device=device)
        self.device = device
        self.defaulted = {"policy": 0, "temperature": 0}  # requests left at the default, by reason
        self._warned_temperature = False
        if predictor is None:
            logger.warning("BLOCKPILOT: every request gets block size %d: %s", self.default, why_not)

    @property
    def reads_hidden(self) -> bool:
        return self.predictor is not None

    def disable(self, why: str) -> None:
        """Leave every request at the default from now on."""
        self.predictor = None
        logger.warning("BLOCKPILOT: every request gets block size %d from now on: %s", self.default, why)

    @torch.no_grad()
    def first(self, prefilled: Prefilled) -> Tensor:
        count = len(prefilled.names)
        default = torch.full((count,), self.default, dtype=torch.int32, device=self.device)
        if self.predictor is None:
            self.defaulted["policy"] += count
            return default
        low, high = self.document.temperatures
        inside = (prefilled.temperature >= low - 1e-6) & (prefilled.temperature <= high + 1e-6)  # host
        outside = count - int(inside.sum())
        if outside:
            self.defaulted["temperature"] += outside
            if not self._warned_temperature:
                self._warned_temperature = True
                logger.warning(
                    "BLOCKPILOT: the policy was trained for temperatures %g to %g; requests outside them get "
                    "block size %d (said once).",
                    low,
                    high,
                    self.default,
                )
            if outside == count:
                return default
        assert prefilled.hidden is not None
        scores = self.predictor(prefilled.hidden.float())
        chosen = self.sizes[scores.argmax(dim=1)]
        return torch.where(inside.to(chosen.device, non_blocking=True), chosen, default)

    def again(self, finished: Round) -> Tensor | None:
        return None
