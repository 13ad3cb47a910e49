"""SPECBLOCK as an algorithm of SGLang's registry.

To the engine it is of the EAGLE-3 family: its draft reads the target's hidden states, pairs them with the
next token (so the prefix cache must know that token, too) and has a KV pool of its own behind the target's
slots.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from .startup import settle

NAME = "SPECBLOCK"


class SpecBlockAlgorithm(CustomSpecAlgo):
    """Answers of the registry's interface that differ from "no"."""

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return False  # what block 1 proposed stays with the worker, by request row

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, *args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        settle(server_args)


def register() -> None:
    """Make the name known to the engine in this process; a second call does nothing."""
    if get_spec(NAME) is None:
        SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=SpecBlockAlgorithm)(_worker)


def _worker(_server_args: Any) -> Any:
    """The worker's class, once the platform has prepared the modules it builds on."""
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.platforms import current_platform

    from ..patches import apply
    from ..plugin import patches_of

    if current_platform.is_out_of_tree():
        current_platform.get_speculative_worker_cls(algorithm=SpeculativeAlgorithm.EAGLE3.name)
    apply(patches_of("serving", stage="worker"))
    ModelRegistry.register("sgl_graft.specblock.models", overwrite=True, strict=True)
    from .worker import SpecBlockWorker

    return SpecBlockWorker
