"""A SpecBlock draft of the serving tests' target, built from its bigrams without training.

The token's embedding runs through the stream; in every layer the MLP of the slots behind that layer's
replaces it by the embedding of its likeliest successor, so slot k proposes what follows k likeliest steps.
Attention adds a little noise of the context: proposals change when a key or value is wrong.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig

from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock import checkpoint
from sgl_graft.specblock.model import SpecBlockDraft
from tests.serving import markov

BLOCK = 3
GATE = 40.0  # opens or shuts a layer's MLP by slot
NOISE = 0.02


@torch.no_grad()
def build_draft(folder: Path, script: int = 0) -> Path:
    """Write the draft, which fits every target of `tests.serving.markov` with a script that long."""
    embedding, head = markov._embedding_and_head(script)
    counts = markov._bigram_counts(script)
    hot = markov.hot_tokens(script)
    hidden, written = markov.HIDDEN, markov.WRITTEN + script
    config = LlamaConfig(
        architectures=[checkpoint.ARCHITECTURES[1]],
        vocab_size=markov.VOCAB,
        draft_vocab_size=len(hot),
        diffspec_draft_token_num=BLOCK,
        rank_classes=4,
        hidden_size=hidden,
        intermediate_size=written,
        num_hidden_layers=2,
        num_attention_heads=10,
        num_key_value_heads=2,
        rms_norm_eps=markov.NORM_EPS,
        max_position_embeddings=markov.POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
    )
    draft = SpecBlockDraft(config)
    random = torch.Generator().manual_seed(31)
    for parameter in draft.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.zero_()
    # The space no embedding uses holds one direction per slot.
    free = torch.linalg.svd(embedding[:written], full_matrices=True).Vh[written:]
    entry = draft.input_layer
    entry.position_queries.weight.copy_(free[:BLOCK] * hidden**0.5)
    entry.fuse.weight[:, hidden:].copy_(torch.cat([torch.eye(hidden), torch.eye(hidden) * 0.1], dim=1))
    follows = torch.from_numpy(counts.argmax(1))  # [written]
    for number, layer in enumerate(draft.layers):
        shut, opened = free[: number + 1].sum(0), free[number + 1 : BLOCK].sum(0)
        layer.mlp.gate_proj.weight.copy_((opened - shut).expand(written, hidden) * GATE)
        layer.mlp.up_proj.weight.copy_(embedding[:written])
        moves = embedding[follows] - embedding[:written]
        layer.mlp.down_proj.weight.copy_(moves.T * step_gain(draft, free, number))
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.weight.normal_(0.0, hidden**-0.5, generator=random)
        attention.o_proj.weight.mul_(NOISE * hidden**0.5)
    for shift in draft.shift_proj:
        shift.weight[:, :hidden].copy_(torch.eye(hidden))
    draft.norm.weight.fill_(1.0)
    draft.lm_head.weight.copy_(head[hot])
    for layer in (draft.rank_head[0], draft.rank_head[2]):
        layer.weight.normal_(0.0, 0.1, generator=random)
    checkpoint.export(draft, DraftVocab.of(hot, markov.VOCAB), folder)
    return folder


@torch.no_grad()
def build_random(folder: Path, target: Path, vocab_size: int = 512, width: int = 64) -> Path:
    """Write a random draft for the target in `target`: almost nothing it proposes is accepted."""
    from sgl_graft.draft_training.specblock_recipe import specblock_config

    whole = AutoConfig.from_pretrained(target)
    draft = SpecBlockDraft(specblock_config(whole, vocab_size, intermediate_size=width))
    random = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.05, generator=random)
    tokens = torch.randperm(whole.vocab_size, generator=random)[:vocab_size]
    checkpoint.export(draft, DraftVocab.of(tokens, whole.vocab_size), folder)
    return folder


def step_gain(draft: SpecBlockDraft, free: torch.Tensor, number: int) -> float:
    """What the MLP's product is divided by, so that an open slot swaps one embedding for another exactly."""
    hidden = markov.HIDDEN

    stream = torch.stack([torch.tensor(hidden**0.5), torch.tensor(0.1 * hidden**0.5)])  # their lengths
    scale = (hidden / (stream**2).sum()) ** 0.5  # of the norm before the MLP
    gate = torch.nn.functional.silu(GATE * stream[1] * scale)
    return float(stream[0] / (gate * stream[0] * scale))
