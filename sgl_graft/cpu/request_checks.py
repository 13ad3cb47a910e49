"""Requests that the CPU platform cannot answer, refused one by one before they are scheduled."""

from __future__ import annotations

from typing import Any


def check_request(manager: Any, request: Any, input_ids: list[int] | None, *_: Any, **__: Any) -> None:
    """Runs before ``TokenizerManager._validate_one_request``, whose ValueError becomes status 400.

    Raises:
        ValueError: what is wrong, and what to leave out.
    """
    _check_ids(request, input_ids, manager.model_config.vocab_size)
    if getattr(request, "return_sampling_mask", False):
        raise ValueError(
            "return_sampling_mask is not available on sgl_graft's CPU platform: its sampler draws through a "
            "threshold and keeps no list of candidates. Leave it out; top_logprobs_num gives the likeliest "
            "tokens."
        )


def _check_ids(request: Any, input_ids: list[int] | None, vocab_size: int) -> None:
    """SGLang lets both mistakes through; a CPU's index operations raise on them, which ends the scheduler."""
    if getattr(request, "input_embeds", None) is not None:
        return
    if not input_ids:
        raise ValueError("the prompt has no tokens: send at least one")
    if getattr(request, "contains_mm_input", bool)():
        return  # placeholders of images lie outside of the vocabulary until they are replaced
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token id {wrong} is not in the vocabulary: ids go from 0 to {vocab_size - 1}")
