"""The SpecBlock draft as SGLang's loader builds it; its worker drives it, no engine forward does."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from ..checkpoint import load_state
from ..model import SpecBlockDraft


class LlamaForCausalLMSpecBlock(nn.Module):
    """Every rank holds the whole draft, as it is small beside a target that needs several."""

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    hot_token_id: Tensor | None = None  # [draft_vocab] target id of every draft token

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        """Raises ValueError for a quantized checkpoint."""
        super().__init__()
        if quant_config is not None:
            raise ValueError("a quantized SpecBlock draft is not supported: export it in bfloat16")
        self.config = as_trained(config)
        self.draft = SpecBlockDraft(self.config)
        self.embedding: Tensor | None = None  # [vocab / ranks, hidden] this rank's part of the target's

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.hot_token_id = load_state(self.draft, weights).draft_to_target

    def set_embed(self, embedding: Tensor) -> None:
        """Share the target's embedding. Raises ValueError when it is another vocabulary's or width's."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        whole = (embedding.shape[0] * get_parallel().tp_size, embedding.shape[1])
        if whole[0] < expected[0] or whole[1] != expected[1]:
            raise ValueError(f"the draft needs an embedding of {expected}, the target has {whole}")
        self.embedding = embedding

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        # The engine wants every model to have one; a draft runs block by block, by the worker.
        raise AssertionError("the worker drives `draft` itself; no engine path may call its forward")


def as_trained(config: Any) -> Any:
    """The checkpoint's own sizes: on a CPU, SGLang rounds some up in the config that it hands to models."""
    own = copy.deepcopy(config)
    originals = {
        "intermediate_size": "original_intermediate_size",
        "num_attention_heads": "original_num_attention_heads",
        "num_key_value_heads": "original_total_num_kv_heads",
    }
    for name, original in originals.items():
        value = getattr(config, original, None)
        if value is not None:
            setattr(own, name, value)
    return own


class LlamaForCausalLMSpecBlockShift(LlamaForCausalLMSpecBlock):
    """The same under the reference's serving name."""


EntryClass = [LlamaForCausalLMSpecBlock, LlamaForCausalLMSpecBlockShift]
