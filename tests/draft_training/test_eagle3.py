"""The batched training-time test against a chain computed one token at a time, as serving does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from sgl_graft.draft_training.eagle3 import Eagle3Draft, chain_attention, draft_config
from sgl_graft.draft_training.features import FeatureShard, Sample


@pytest.fixture
def draft(target: Path) -> Eagle3Draft:
    torch.manual_seed(0)
    module = Eagle3Draft(draft_config(AutoConfig.from_pretrained(target), 64))
    with torch.no_grad():
        for param in module.parameters():
            param.normal_(0.0, 0.3 if param.ndim == 1 else 0.08)
    return module


@pytest.fixture
def samples(feature_folder: Path) -> list[Sample]:
    shard = FeatureShard(sorted(feature_folder.glob("*"))[0])
    chosen = [shard.sample(i) for i in (0, 3, 4)]
    for sample in chosen:
        sample.features = sample.features.float()
    return chosen


class ServingChain:
    """One request as SGLang serves it: transformers' own Llama pieces, a growing KV cache, no batching."""

    def __init__(self, draft: Eagle3Draft, embedding: Tensor) -> None:
        config, layer = draft.config, draft.midlayer
        self.draft, self.embedding = draft, embedding
        self.attention = LlamaAttention(config, 0)
        self.mlp = LlamaMLP(config)
        self.mlp.load_state_dict(layer.mlp.state_dict())
        self.norms = {}
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.norms[name] = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.norms[name].load_state_dict(getattr(layer, name).state_dict())
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm.load_state_dict(draft.norm.state_dict())
        self.cache: list[tuple[Tensor, Tensor]] = []  # per fed token: key, value [kv_heads, head_dim]

    def feed(self, token: int, hidden: Tensor, position: int) -> Tensor:
        """The layer's pre-norm output for one token."""
        layer = self.draft.midlayer.self_attn
        wide = torch.cat(
            [self.norms["input_layernorm"](self.embedding[token]), self.norms["hidden_norm"](hidden)]
        )
        cos, sin = (part[0, 0] for part in self.draft.rotary(wide, torch.tensor([[position]])))

        def rotate(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

        query = rotate(layer.q_proj(wide).view(layer.heads, layer.head_dim))
        key = rotate(layer.k_proj(wide).view(layer.kv_heads, layer.head_dim))
        self.cache.append((key, layer.v_proj(wide).view(layer.kv_heads, layer.head_dim)))
        group = layer.heads // layer.kv_heads
        keys = torch.stack([k for k, _ in self.cache], dim=1).repeat_interleave(group, 0)
        values = torch.stack([v for _, v in self.cache], dim=1).repeat_interleave(group, 0)
        probs = (torch.einsum("hd,htd->ht", query, keys) * self.attention.scaling).softmax(-1)
        attended = torch.einsum("ht,htd->hd", probs, values).flatten()
        residual = hidden + layer.o_proj(attended)
        return residual + self.mlp(self.norms["post_attention_layernorm"](residual))


@torch.no_grad()
def test_unrolled_chain_equals_serving(draft: Eagle3Draft, samples: list[Sample]) -> None:
    steps = 4
    embedding = torch.randn(draft.config.vocab_size, draft.config.hidden_size)
    out = draft.unroll(samples, embedding, steps)
    sample, before = samples[1], len(samples[0].rows)
    fused = draft.fc(sample.features)
    for index in (0, 2, 5, 9, len(sample.rows) - 1):
        row = int(sample.rows[index])
        chain = ServingChain(draft, embedding)
        for position in range(row + 1):
            hidden = chain.feed(int(sample.ids[position + 1]), fused[position], position)
        for step in range(steps):
            # Fed token p + 1 + step, it must predict the token after that one, as the target does at its row.
            target = before + index + 1 + step
            found = (out.target[step] == target).nonzero()[:, 0]
            ahead = index + 1 + step
            inside = ahead < len(sample.rows) and int(sample.rows[ahead]) == row + 1 + step
            assert len(found) == int(inside), "a chain ends where its answer ends"
            if not inside:
                break
            torch.testing.assert_close(out.normed[step][found[0]], chain.norm(hidden), atol=2e-5, rtol=1e-4)
            if row + step + 2 < len(sample.ids):  # what the answer really says next
                hidden = chain.feed(int(sample.ids[row + step + 2]), hidden, row + step + 1)


def test_kept_chains_are_a_subset(draft: Eagle3Draft, samples: list[Sample]) -> None:
    embedding = torch.randn(draft.config.vocab_size, draft.config.hidden_size)
    whole = draft.unroll(samples, embedding, 3)
    part = draft.unroll(samples, embedding, 3, keep=0.4, random=torch.Generator().manual_seed(1))
    assert torch.equal(part.target[0], whole.target[0])
    assert 0 < len(part.target[1]) < len(whole.target[1])
    for step in (1, 2):
        places = torch.searchsorted(whole.target[step], part.target[step])
        torch.testing.assert_close(part.normed[step], whole.normed[step][places])


def test_chain_attention_masks_the_future() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    rows = torch.tensor([2, 4])
    own = [(torch.randn(2, 2, 8), torch.randn(2, 2, 8))]
    plain = chain_attention(queries, keys, values, rows, own)
    keys[5], values[5] = 9.0, 9.0
    torch.testing.assert_close(chain_attention(queries, keys, values, rows, own), plain)
    keys[3] += 1.0
    changed = chain_attention(queries, keys, values, rows, own)
    torch.testing.assert_close(changed[0], plain[0])
    assert not torch.allclose(changed[1], plain[1])
