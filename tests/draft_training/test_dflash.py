"""The training forward of DFlash against a block-by-block computation of what SGLang serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sgl_graft.draft_training import dflash_ops
from sgl_graft.draft_training.dflash import Blocks, DFlashDraft, draft_config
from sgl_graft.draft_training.dflash_init import init_from_target, init_gather
from sgl_graft.draft_training.features import Sample

VOCAB, HIDDEN, MASK = 96, 48, 5


def target_config(layers: int = 6) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def make_draft(kv_heads: int | None = None, layers: int = 2) -> DFlashDraft:
    torch.manual_seed(0)
    config = draft_config(
        target_config(),
        target_layer_ids=(1, 2, 3),
        mask_token_id=MASK,
        block_size=5,
        layers=layers,
        intermediate_size=64,
        kv_heads=kv_heads,
    )
    draft = DFlashDraft(config)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if "norm" in name else 0.0))
    return draft


def dialogue(tokens: int, rows: list[int], seed: int) -> Sample:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCAB, (tokens,), generator=g)
    top_ids = torch.stack([torch.randperm(VOCAB, generator=g)[:8] for _ in rows])
    return Sample(
        ids=ids,
        features=torch.randn(tokens, 3 * HIDDEN, generator=g),
        rows=torch.tensor(rows),
        top_ids=top_ids,
        top_probs=torch.rand(len(rows), 8, generator=g).softmax(-1),
        source="test",
    )


def serve_block(draft: DFlashDraft, embedding: Tensor, sample: Sample, anchor: int, size: int) -> Tensor:
    """One block as a server drafts it: KV of the committed positions, then the block, nothing masked."""
    eps = draft.config.rms_norm_eps

    def norm(x: Tensor, module: object) -> Tensor:
        return F.rms_norm(x, module.weight.shape, module.weight, eps)  # type: ignore[attr-defined]

    ctx = norm(draft.fc(sample.features[:anchor]), draft.hidden_norm)
    tokens = torch.tensor([int(sample.ids[anchor])] + [MASK] * (size - 1))
    hidden = embedding[tokens]
    cos, sin = draft.rotary(ctx, torch.arange(anchor + size)[None])
    heads, kv_heads = draft.config.num_attention_heads, draft.config.num_key_value_heads
    for layer in draft.decoder:
        attention = layer.self_attn
        x = norm(hidden, layer.input_layernorm)
        both = torch.cat([ctx, x])
        q = norm(attention.q_proj(x).view(size, heads, -1), attention.q_norm).transpose(0, 1)[None]
        k = norm(attention.k_proj(both).view(len(both), kv_heads, -1), attention.k_norm).transpose(0, 1)[None]
        v = attention.v_proj(both).view(len(both), kv_heads, -1).transpose(0, 1)[None]
        q, _ = apply_rotary_pos_emb(q, q, cos[:, anchor:], sin[:, anchor:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        hidden = hidden + attention.o_proj(out[0].transpose(0, 1).reshape(size, -1))
        x = norm(hidden, layer.post_attention_layernorm)
        mlp = layer.mlp
        hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    return norm(hidden, draft.norm)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_many_blocks_at_once_equal_single_blocks_and_their_gradients(
    kv_heads: int | None, layers: int
) -> None:
    draft = make_draft(kv_heads, layers)
    embedding = torch.randn(VOCAB, HIDDEN)
    samples = [dialogue(40, list(range(10, 39)), 1), dialogue(23, list(range(3, 22)), 2)]
    size = 5
    anchors = [torch.tensor([1, 4, 5, 9, 10, 11, 17, 20, 28, 33, 36]), torch.tensor([0, 7, 22])]
    g = torch.Generator().manual_seed(3)
    # The second dialogue's middle block is scored nowhere.
    masks = [torch.rand(len(a), size, generator=g) < 0.5 for a in anchors]
    masks[1][1] = False
    blocks = [Blocks(a, m.flatten().nonzero()[:, 0]) for a, m in zip(anchors, masks, strict=True)]
    out = draft([s.ids for s in samples], [s.features for s in samples], blocks, size, embedding)
    expected = torch.cat(
        [
            torch.cat([serve_block(draft, embedding, s, int(a), size) for a in own])[m.flatten()]
            for s, own, m in zip(samples, anchors, masks, strict=True)
        ]
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn(out.shape, generator=g)
    params = [p for p in draft.parameters() if p.requires_grad]
    ours = torch.autograd.grad((out * weight).sum(), params)
    theirs = torch.autograd.grad((expected * weight).sum(), params)
    for (name, _), a, b in zip(draft.named_parameters(), ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=2e-3), name


def test_start_from_the_target_keeps_its_attention(tmp_path: Path) -> None:
    """The first layer's keys of the context are the target's own next layer's, up to the head norm."""
    target = LlamaForCausalLM(target_config())
    draft = make_draft()
    init_from_target(draft, target)
    with torch.no_grad():
        draft.fc.weight[:, :-HIDDEN] = 0.0
        draft.fc.weight[:, -HIDDEN:] = torch.eye(HIDDEN)
    features = torch.randn(7, 3 * HIDDEN)
    layer = target.model.layers[4]  # reads the output of layer 3, the last captured
    theirs = layer.self_attn.k_proj(layer.input_layernorm(features[:, -HIDDEN:])).view(7, 2, 8)
    eps = draft.config.rms_norm_eps
    ctx = F.rms_norm(draft.fc(features), (HIDDEN,), draft.hidden_norm.weight, eps)
    ours = draft.decoder[0].self_attn.k_proj(ctx).view(7, 6, 8)
    torch.testing.assert_close(ours, theirs.repeat_interleave(3, dim=1), rtol=1e-3, atol=1e-4)
    assert torch.equal(draft.norm.weight, target.model.norm.weight)


def test_first_layer_starts_by_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some heads read the newest context row, the others the anchor, from every mask of a block."""
    torch.manual_seed(1)
    hidden = 192
    wide = LlamaConfig(**{**target_config().to_dict(), "hidden_size": hidden, "head_dim": 64})
    wide.num_attention_heads = wide.num_key_value_heads = 3
    shape: dict[str, Any] = {"block_size": 4, "layers": 1, "intermediate_size": 8, "mask_token_id": MASK}
    draft = DFlashDraft(draft_config(wide, target_layer_ids=(1, 2, 3), **shape))
    embedding = torch.randn(VOCAB, hidden) + 0.7  # language models' vectors share a direction
    samples = [dialogue(60, list(range(10, 50)), seed) for seed in range(8)]
    for sample in samples:
        sample.features = torch.randn(60, 3 * hidden) + 1.0
    init_gather(draft, samples, embedding)
    seen: list[tuple[Tensor, ...]] = []
    apply = dflash_ops.BlockAttention.apply

    def record(*args: Any) -> Tensor:
        seen.append(args)
        return apply(*args)

    monkeypatch.setattr(dflash_ops.BlockAttention, "apply", record)
    size, anchor = 4, 20
    blocks = [Blocks(torch.tensor([anchor]), torch.arange(size))]
    draft([samples[0].ids], [samples[0].features], blocks, size, embedding)
    queries, ctx_keys, _, keys, _, _ = seen[0]
    both = torch.cat([ctx_keys[:anchor], keys])  # [anchor + size, heads, dim]
    scores = torch.einsum("qhd,khd->hqk", queries, both) / queries.shape[-1] ** 0.5
    shares = scores.softmax(-1)[:, 1:]  # of the masks
    near = 2  # of three heads
    assert float(shares[:near, :, :anchor].sum(-1).min()) > 0.99
    assert float(shares[:near, :, anchor - 1].min()) > 0.3
    assert bool((shares[:near].argmax(-1) == anchor - 1).all())
    assert float(shares[near:, :, anchor].min()) > 0.99


@pytest.mark.soak
def test_compiled_ops_equal_eager() -> None:
    draft, embedding = make_draft(), torch.randn(VOCAB, HIDDEN)
    sample = dialogue(40, list(range(10, 39)), 1)
    blocks = [Blocks(torch.tensor([12, 20, 30]), torch.tensor([1, 3, 6, 11, 12]))]
    eager = draft([sample.ids], [sample.features], blocks, 5, embedding)
    draft.ops = dflash_ops.compiled()
    torch.testing.assert_close(
        draft([sample.ids], [sample.features], blocks, 5, embedding), eager, rtol=1e-4, atol=1e-4
    )
