"""Initial weights of a DFlash draft: the target's late layers, and a first attention that already gathers.

A block knows the past through attention only. A mask that attends at random has to discover first that the
newest features and the anchor matter; measured in steps, that is a large part of a short training. So the
first layer starts with heads built to fetch exactly these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_graft.draft_training.dflash import DFlashDraft
from sgl_graft.draft_training.features import Sample

GATHER_GAIN = 3.0  # of query and key norms: the newest position gets most of the attention
ANCHOR_SCALE = 0.5  # of the anchor's embedding against the features in the first layer's output
_RIDGE = 1e-3


@torch.no_grad()
def init_from_target(draft: DFlashDraft, target: Any) -> None:
    """Start from the target's late layers: the first draft layer reads the last captured feature as the
    target's own next layer does, the last draft layer is the target's last. `target` is a transformers model
    of the Llama or Qwen3 family and as wide as the draft.
    """
    config = draft.config
    width, layers = config.hidden_size, target.model.layers
    first = min(config.dflash_config["target_layer_ids"][-1] + 1, len(layers) - 1)
    draft.norm.weight.copy_(target.model.norm.weight)
    draft.fc.weight.normal_(0.0, 0.01)
    draft.fc.weight[:, -width:] += torch.eye(width)
    draft.hidden_norm.weight.copy_(layers[first].input_layernorm.weight)
    count = len(draft.decoder)
    for i, ours in enumerate(draft.decoder):
        theirs = layers[first + round(i * (len(layers) - 1 - first) / max(1, count - 1))]
        ours.input_layernorm.weight.copy_(theirs.input_layernorm.weight)
        ours.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
        _init_attention(ours.self_attn, theirs)
        mine, other = ours.mlp, theirs.mlp
        strength = (
            other.gate_proj.weight.norm(dim=1)
            * other.up_proj.weight.norm(dim=1)
            * other.down_proj.weight.norm(dim=0)
        )
        kept = strength.topk(min(config.intermediate_size, len(strength))).indices.sort().values
        mine.gate_proj.weight[: len(kept)].copy_(other.gate_proj.weight[kept])
        mine.up_proj.weight[: len(kept)].copy_(other.up_proj.weight[kept])
        mine.down_proj.weight[:, : len(kept)].copy_(other.down_proj.weight[:, kept])


def _init_attention(ours: Any, theirs: Any) -> None:
    """The target layer's projections; KV heads are repeated where the draft has more of them."""
    own, dim = theirs.self_attn, ours.head_dim
    ours.q_proj.weight.copy_(own.q_proj.weight)
    ours.o_proj.weight.copy_(own.o_proj.weight)
    times = ours.k_proj.weight.shape[0] // own.k_proj.weight.shape[0]
    for name in ("k_proj", "v_proj"):
        heads = getattr(own, name).weight.view(-1, dim, own.k_proj.weight.shape[1])
        getattr(ours, name).weight.copy_(heads.repeat_interleave(times, dim=0).flatten(0, 1))
    for norm, projection in ((ours.q_norm, ours.q_proj), (ours.k_norm, ours.k_proj)):
        # The draft norms its heads, a Llama target does not: scale them back to their usual size.
        scaled = projection.weight * theirs.input_layernorm.weight
        norm.weight.fill_(float(scaled.square().sum().sqrt() / scaled.shape[0] ** 0.5))


@torch.no_grad()
def init_gather(draft: DFlashDraft, samples: Sequence[Sample], embedding: Tensor) -> None:
    """Build the first layer's attention: five of nine heads copy the newest position's last features, the
    others the anchor's embedding, into every mask.

    Keys are signs of linear probes (the head norm leaves only their sign), fitted on `samples` to tell
    context, anchors and masks apart. All rotary pairs start in phase: the score is the sum over frequencies
    of cos(frequency * distance), which falls with the logarithm of the distance. Values are the principal
    components that fit into the heads. embedding `[vocab, hidden]` is the target's.
    """
    width = draft.config.hidden_size
    layer = draft.decoder[0]
    attention = layer.self_attn
    dim = attention.head_dim
    heads = attention.q_proj.out_features // dim
    if attention.k_proj.out_features != attention.q_proj.out_features:
        return  # shared keys cannot be told apart by head
    near = (5 * heads + 8) // 9  # heads that read the context

    # The first position of a dialogue is an outlier in every language model.
    last = torch.cat([s.features[1:, -width:] for s in samples]).float()  # [rows, hidden]
    features = torch.cat([s.features[1:] for s in samples]).to(draft.fc.weight.dtype)
    ctx = _norm(draft.fc(features), draft.hidden_norm)
    anchors = _norm(embedding[torch.cat([s.ids[1:] for s in samples])].float(), layer.input_layernorm)
    mask = _norm(embedding[draft.mask_token_id, None].float(), layer.input_layernorm)  # [1, hidden]

    in_phase = torch.zeros(dim)
    in_phase[: dim // 2] = 1.0
    query = in_phase[:, None] * mask / mask.square().sum()  # [dim, hidden]: 1 in phase for a mask
    probes = [_probe(ctx, anchors, mask)] * near + [_probe(anchors, ctx, mask)] * (heads - near)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(GATHER_GAIN)
    for projection, by_head in (
        (attention.q_proj, [query] * heads),
        (attention.k_proj, [in_phase[:, None] * probe for probe in probes]),
    ):
        weight = torch.cat(by_head)
        projection.weight.copy_(weight + torch.randn_like(weight) * weight.square().mean().sqrt() * 0.05)

    size = last.square().mean().sqrt()
    for rows, scale, norm, columns in (
        (last, size, draft.hidden_norm, slice(0, near * dim)),
        (
            anchors / layer.input_layernorm.weight,
            size * ANCHOR_SCALE,
            layer.input_layernorm,
            slice(near * dim, None),
        ),
    ):
        count = len(range(heads * dim)[columns])
        basis = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -count:]  # [hidden, count]
        attention.v_proj.weight[columns].copy_((basis / norm.weight[:, None]).T)
        attention.o_proj.weight[:, columns].copy_(basis * scale)


def _norm(x: Tensor, norm: Any) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), norm.weight, norm.eps)


def _probe(yes: Tensor, no: Tensor, mask: Tensor) -> Tensor:
    """`[hidden]`: positive on rows like `yes`, negative on rows like `no` and on the mask."""
    rows = torch.cat([yes, no, mask * len(no) ** 0.5])
    wanted = torch.cat([torch.ones(len(yes)), -torch.ones(len(no)), -torch.full((1,), len(no) ** 0.5)])
    gram = rows.T @ rows
    gram += torch.eye(len(gram)) * gram.diagonal().mean() * _RIDGE
    return torch.linalg.solve(gram, rows.T @ wanted)
