"""What DFLASH's stock worker lacks on a CPU: acceptance at T > 0, and two kernels.

The worker proposes a block and verifies it with one forward of the target. Acceptance is by equality with the
target's *coupled* sample, as for trees (:mod:`.verify`): the token at every position is what plain decoding
would draw there (same logits, filters, seed and position), and the block counts as far as it names these
tokens. The proposal is one token per position whatever the temperature, so this is exact: what is committed
never depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .agreement import follow_rank_0
from .fused_layers import apply_linear
from .verify import _apply_request_biases, _tensor_parallel_group, path_dependent, target_tokens


def count_penalties(_draft_input: Any, batch: Any) -> None:
    """Before ``DFlashDraftInputV2.prepare_for_decode``: the newest token counts towards its request's
    penalties, as in every other preparation of a decode; upstream forgot it in this one."""
    if batch.reqs and batch.sampling_info.penalizer_orchestrator.is_required:
        batch.cumulate_penalty_output_tokens()


def begin_round(self: Any, batch: Any) -> None:
    """Stands for ``DFlashWorkerV2._validate_phase1_sampling_support``, which sees every batch first.

    Remembers which requests' logits depend on the path itself: their block is not looked at.
    """
    self.graft_held = [row for row, req in enumerate(batch.reqs) if path_dependent(req)]
    if type(batch.seq_lens) is torch.Tensor:
        batch.seq_lens = batch.seq_lens.as_subclass(_WithoutStreams)


class _WithoutStreams(torch.Tensor):
    """A tensor for which a stream of the CPU, which torch has but refuses here, means nothing."""

    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        """Nothing is asynchronous on a CPU."""


def adjust_logits(*, next_token_logits: torch.Tensor, sampling_info: Any, draft_token_num: int) -> None:
    """Stands for ``apply_dflash_verify_logits_adjustments``: every request's biases on all of its rows.

    Upstream adds penalties to zeros first, which loses the multiplicative ones. A custom processor comes
    last, as in plain decoding: in :func:`accept_block`, behind the grammar.
    """
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    if sampling_info is None:
        return
    sanitize_nan_logits(next_token_logits, "verify: target model logits")
    _apply_request_biases(next_token_logits, sampling_info, draft_token_num)
    if sampling_info.logit_bias is not None:
        next_token_logits.add_(sampling_info.logit_bias.repeat_interleave(draft_token_num, dim=0))


def keep_dtype(result: dict[str, Any], self: Any, forward_batch: Any, *_: Any) -> dict[str, Any]:
    """After ``ModelRunner._extend_forward_kwargs``, which turns every embedding into bfloat16."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        result["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
    return result


def accept_block(
    original: Callable[..., Any],
    self: Any,
    *,
    candidates: torch.Tensor,  # [batch, slots] the anchor and the proposed tokens; -1 is never accepted
    next_token_logits: torch.Tensor,  # [batch * slots, vocab]
    sampling_info: Any,
    prefix_lens: torch.Tensor,  # [batch] position of every block's anchor
    **others: Any,
) -> Any:
    """Around ``DFlashWorkerV2._accept_block``: draws the target's tokens, which upstream then compares.

    The committed tokens behind the accepted ones are 0, never -1: log-probabilities are looked up by them.
    """
    from sglang.srt.layers.sampler import apply_custom_logit_processor

    slots = candidates.shape[1]
    predict = others.pop("target_predict", None)
    if predict is None:
        if sampling_info.has_custom_logit_processor:
            apply_custom_logit_processor(next_token_logits, sampling_info, num_tokens_in_batch=slots)
        positions = prefix_lens.long()[:, None] + torch.arange(slots)
        predict = target_tokens(next_token_logits, sampling_info, positions.flatten(), slots)
    held = self.graft_held
    if held and slots > 1:
        candidates = candidates.clone()
        candidates[held, 1:] = -1
    group = _tensor_parallel_group()
    if group.world_size > 1:
        follow_rank_0(
            group,
            {"the block's tokens": candidates, "the committed lengths": prefix_lens},
            {"the target's tokens": predict},
        )
    accept_len, commit_lens, bonus, out_tokens, new_seq_lens = original(
        self,
        candidates=candidates,
        next_token_logits=next_token_logits,
        sampling_info=sampling_info,
        prefix_lens=prefix_lens,
        target_predict=predict,
        **others,
    )
    return accept_len, commit_lens, bonus, out_tokens.clamp_min_(0), new_seq_lens


def likeliest_tokens(
    original: Callable[..., torch.Tensor],
    self: Any,
    *,
    hidden_states: torch.Tensor,  # [rows, hidden]
    lm_head: Any,
    **others: Any,
) -> torch.Tensor:  # [rows] int64
    """Around ``DFlashWorkerV2._greedy_sample_from_vocab_parallel_head``: the product with the target's LM
    head by our kernel (a fifth of torch's time for a block's few rows), where one rank has all of it."""
    weight, shard = getattr(lm_head, "weight", None), getattr(lm_head, "shard_indices", None)
    if (
        weight is None
        or hidden_states.numel() == 0
        or _tensor_parallel_group().world_size > 1
        or (shard is not None and shard.num_added_elements)
        or not weight.dtype.is_floating_point
    ):
        return original(self, hidden_states=hidden_states, lm_head=lm_head, **others)
    rows = weight if shard is None else weight[: shard.num_org_elements]
    return apply_linear(hidden_states.to(weight.dtype), rows, None).argmax(-1)


def norm_and_rotate_(
    qkv: torch.Tensor,  # [tokens, (q heads + 2 * k heads) * head_dim], written
    positions: torch.Tensor,  # [tokens]
    q_weight: torch.Tensor,  # [head_dim]
    k_weight: torch.Tensor,  # [head_dim]
    cos_sin_cache: torch.Tensor,  # [positions, head_dim]: cosines, then sines
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """Stands for ``table_qk_norm_rope_``: every query and key head normed, then rotated, in place."""
    heads = qkv[:, : (num_q_heads + num_k_heads) * head_dim].unflatten(1, (-1, head_dim))
    weight = torch.cat([q_weight.expand(num_q_heads, -1), k_weight.expand(num_k_heads, -1)]).float()
    x = heads.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    low, high = x.to(qkv.dtype).float().chunk(2, dim=-1)
    cos, sin = cos_sin_cache[positions.long()].float().unsqueeze(1).chunk(2, dim=-1)
    heads.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))
