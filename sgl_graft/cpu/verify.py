"""Verification by coupled sampling: draw the target's token at every node, then walk the tree by equality.

The token at a node is what plain decoding would draw there: same logits, same filters, same noise. So the
accepted path and the bonus token are the tokens plain decoding would have produced, whatever was proposed;
the proposal's probabilities are not needed, and duplicate siblings do no harm.
"""

from __future__ import annotations

from typing import Any

import torch

from ..cuda_graph.coupled import parents_from_links, walk_accepted
from .agreement import follow_rank_0
from .noise import race_speeds
from .row_kernels import argmax
from .sampler import draw


def _apply_request_biases(logits: torch.Tensor, info: Any, slots: int) -> None:
    """Penalties and logit bias of each request, on all of its nodes, in plain decoding's order."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties.repeat_interleave(slots, dim=0))
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(slots, dim=0))
    if info.penalizer_orchestrator is not None and info.penalizer_orchestrator.is_required:
        info.penalizer_orchestrator.apply(logits, repeat=slots)


def path_dependent(req: Any) -> bool:
    """Whether the request's logits depend on the tokens of the path itself.

    Its penalties are exact at the root only, so such a request commits one token per round.
    """
    params = req.sampling_params
    return bool(
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def target_tokens(
    logits: torch.Tensor,  # [batch * slots, vocab]
    info: Any,
    positions: torch.Tensor,  # [batch * slots] absolute position of each node
    slots: int,
) -> torch.Tensor:  # [batch, slots] int64
    """The target's token after every node, by each request's own sampling parameters and seed."""
    greedy = argmax(logits)
    if info.is_all_greedy:
        return greedy.view(-1, slots)
    batch = greedy.numel() // slots
    sampled = (info.top_ks > 1).nonzero().squeeze(1)  # [sampled] request rows
    rows = (sampled.unsqueeze(1) * slots + torch.arange(slots)).flatten()
    owner = sampled.repeat_interleave(slots)
    probs = torch.softmax(logits[rows].float().div_(info.temperatures[owner]), dim=1)
    # Nodes at one depth share their noise.
    keys = torch.stack((info.sampling_seed[owner], positions.long()[rows]), dim=1)
    distinct, noise_row = torch.unique(keys, dim=0, return_inverse=True)
    speeds = race_speeds([(seed, position) for seed, position in distinct.tolist()], logits.shape[1])
    tokens = draw(probs, speeds, noise_row, info.top_ks[owner], info.top_ps[owner], info.min_ps[owner])
    greedy[rows] = tokens
    return greedy.view(batch, slots)


def sample_and_walk(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: int | None = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for ``eagle_sample``.

    Returns:
        ``predict`` [batch * slots] int32, the target's token after every node;
        ``accept_lens`` [batch] int32, bonus included;
        ``accept_index`` [batch, depth + 1] int32, flat node indices of the accepted path, -1 padded.
    """
    from sglang.srt.layers.sampler import apply_custom_logit_processor
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    if batch.forward_mode.is_idle():
        empty = torch.empty(0, dtype=torch.int32)
        return empty, empty.clone(), empty.clone()
    info = batch.sampling_info
    slots = verify_input.draft_token_num
    logits = logits_output.next_token_logits
    sanitize_nan_logits(logits, "verify: target model logits")
    _apply_request_biases(logits, info, slots)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(slots, dim=0))
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, num_tokens_in_batch=slots)

    drawn = target_tokens(logits, info, verify_input.positions, slots)
    parents = parents_from_links(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
    held = [row for row, req in enumerate(batch.reqs) if path_dependent(req)]
    if held:
        parents[held] = -1  # no slot hangs under the root: nothing but the bonus can be accepted
    candidates = verify_input.draft_token.view(-1, slots)
    path = walk_accepted(candidates, parents, drawn, verify_input.max_tree_depth)
    predict = drawn.flatten().to(torch.int32)
    accept_index = path.accept_index
    accept_lens = path.num_correct_drafts + 1
    group = _tensor_parallel_group()
    if group.world_size > 1:
        follow_rank_0(
            group,
            {
                "the tree's tokens": candidates,
                "the tree's positions": verify_input.positions,
                "the tree's first children": verify_input.retrieve_next_token,
                "the tree's siblings": verify_input.retrieve_next_sibling,
            },
            {"the target's tokens": predict, "the accepted path": accept_index},
        )
    return predict, accept_lens, accept_index


def _tensor_parallel_group() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group
