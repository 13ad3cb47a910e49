"""The EAGLE-3 draft's forward over its layer stack, for the rows that somebody reads.

After a verify the engine runs the draft over every slot of the tree, then looks at the last accepted one of
each request alone. The keys of the rejected slots behind it are overwritten before anything sees them, so
here only accepted slots are computed, and the head of the model only for the row that is read.
"""

from __future__ import annotations

from typing import Any

import torch

from . import kernels

READ_ROWS = "graft_read_rows"  # attribute of hidden states: the rows [n] whose logits somebody reads


def attention_backend() -> Any:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend()


def forward(
    self: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """Stands for ``llama_eagle3.LlamaModel.forward``."""
    stack, backend = self.graft_stack, attention_backend()
    embeds = forward_batch.mm_input_embeds if input_embeds is None else input_embeds
    if embeds is not None or not stack.accepts(backend, positions, forward_batch):
        return type(self).forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    plan, slots, hidden = backend.plan, forward_batch.out_cache_loc, forward_batch.spec_info.hidden_states
    lengths = _accepted_lengths(forward_batch)
    if lengths is not None:
        every, width = input_ids.shape[0], input_ids.shape[0] // lengths.shape[0]
        plan = plan.of_first_queries(lengths)
        starts = plan.query_start[:-1]
        owner = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
        live = torch.arange(owner.shape[0]) + (owner * width - starts[owner])  # [accepted] rows of the batch
        input_ids, positions, slots, hidden = (t[live] for t in (input_ids, positions, slots, hidden))
    hidden = _reduced(self, hidden)
    total = torch.empty_like(hidden)
    out, _ = stack.run(
        backend,
        plan,
        hidden,
        positions,
        slots,
        first_input=_first_input(self, input_ids, hidden),
        total=total,
    )
    if lengths is None:
        return out, [out if self.norm_output else total]
    spread = out.new_zeros((2, every, out.shape[1]))
    spread[0, live], spread[1, live] = out, total
    out, total = spread[0], spread[1]
    setattr(out, READ_ROWS, torch.arange(lengths.shape[0]) * width + lengths - 1)
    return out, [out if self.norm_output else total]


def linear_layers(model: Any) -> list[torch.nn.Module]:
    """Every layer of an EAGLE-3 draft that multiplies by its weight."""
    layers = [model.model.fc, model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        layers += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return [layer for layer in layers if isinstance(getattr(layer, "weight", None), torch.Tensor)]


def _accepted_lengths(forward_batch: Any) -> torch.Tensor | None:  # [batch] int64
    """How many slots each request accepted, in the draft's pass behind a verify; None in other passes."""
    info = forward_batch.spec_info
    if not forward_batch.forward_mode.is_draft_extend_v2() or info.num_front_tokens:
        return None
    lengths: torch.Tensor | None = info.num_accept_tokens
    return None if lengths is None else lengths.long()


def _reduced(model: Any, hidden: torch.Tensor) -> torch.Tensor:  # [tokens, hidden]
    """The draft's own hidden states as they are, or the target's captured ones through the ``fc`` layer."""
    if hidden.shape[-1] == model.embed_tokens.embedding_dim:
        return hidden
    if model.input_norm is not None:
        hidden = model.input_norm(hidden)
    if model.fc_norm is not None:
        chunks = hidden.chunk(model.num_aux_hidden_states, dim=-1)
        hidden = torch.cat([norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    reduced: torch.Tensor = model.fc(hidden)
    return reduced


def _first_input(
    model: Any,
    input_ids: torch.Tensor,  # [tokens]
    hidden: torch.Tensor,  # [tokens, hidden]
) -> torch.Tensor:  # [tokens, 2 * hidden]
    """What enters the first layer's attention: the normed embedding beside the normed hidden state."""
    first, embeds = model.layers[0], model.embed_tokens(input_ids)
    width = embeds.shape[1]
    both = torch.empty((embeds.shape[0], width + hidden.shape[1]), dtype=hidden.dtype)
    for norm, x, out in (
        (first.input_layernorm, embeds, both[:, :width]),
        (first.hidden_norm, hidden, both[:, width:]),
    ):
        kernels.rms_norm_into(x, norm.weight, norm.variance_epsilon, out)
    return both
