"""Makes a recording: target and draft run once along every known answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_graft.bench.answers import KnownAnswer
from sgl_graft.bench.recording import ROW_WIDTH, Answer, Recording, Shape
from sgl_graft.cuda_graph.eagle_tree import DraftPool, draft_pool, stock_tree
from sgl_graft.cuda_graph.top_successors import TopSuccessors, top_successors

if TYPE_CHECKING:
    from sgl_graft.draft_training.eagle3 import Eagle3Draft
    from sgl_graft.draft_training.vocab import DraftVocab

POSITIONS_PER_PASS = 64
GREEDY_AGREEMENT = 0.99
SHORTEST_CUT = 16  # tokens of a cut answer worth keeping
SAVE_EVERY = 4


class Recorder:
    """A target (a transformers model, fp32 as served) and its draft."""

    def __init__(self, model: Any, draft: Eagle3Draft, vocab: DraftVocab, shape: Shape) -> None:
        from sgl_graft.draft_training.features import FeatureCapture, default_layers

        self.shape = shape
        self.model = model.eval()
        layers = default_layers(len(self.model.model.layers))
        self.capture = FeatureCapture(self.model, layers)
        self.draft, self.vocab = draft, vocab
        self.embedding: Tensor = self.model.get_input_embeddings().weight.detach()
        self.vocab_size: int = self.embedding.shape[0]

    @torch.inference_mode()
    def record(self, prompt: Sequence[int], tokens: Sequence[int], *, cut: bool = False) -> Answer:
        """`cut` ends the answer where this target would have said something else.

        Raises ValueError without it when the tokens are not the target's own greedy answer.
        """
        from transformers import DynamicCache

        ids = torch.tensor([*prompt, *tokens])
        cache = DynamicCache()
        hidden = self.model.model(input_ids=ids[None], past_key_values=cache).last_hidden_state[0]
        features = self.capture.take()[0]  # [all, layers * hidden]
        answer_rows = torch.arange(len(prompt), len(ids))
        best = top_successors(self.model.lm_head(hidden[answer_rows]), self._width, self.vocab_size)
        if cut:
            own = int((best.ids[:-1, 0] == ids[answer_rows[1:]]).cumprod(0).sum()) + 1
            answer_rows, best = answer_rows[:own], TopSuccessors(best.ids[:own], best.probs[:own])
        else:
            self._check_greedy(best.ids, ids[answer_rows])
        # The draft proposes what follows ids[row + 1], the root, from the features up to `row`.
        pool = draft_pools(self.draft, self.vocab, self.embedding, ids, features, answer_rows - 1, self.shape)
        tree_tokens, tree_parents = stock_tree(pool, ids[answer_rows], self.shape.slots)
        passes = [
            self._after_nodes(cache, answer_rows[at], tree_tokens[at], tree_parents[at])
            for start in range(0, len(answer_rows), POSITIONS_PER_PASS)
            for at in [slice(start, start + POSITIONS_PER_PASS)]
        ]
        return Answer(
            prompt=torch.tensor(list(prompt)),
            tokens=ids[answer_rows],
            next_ids=best.ids,
            next_probs=best.probs,
            pool_tokens=pool.tokens,
            pool_parents=pool.parents,
            pool_scores=pool.scores,
            tree_tokens=tree_tokens,
            tree_parents=tree_parents,
            tree_ids=torch.cat([ids for ids, _ in passes]),
            tree_probs=torch.cat([probs for _, probs in passes]),
        )

    @property
    def _width(self) -> int:
        return min(ROW_WIDTH, self.vocab_size)

    def _check_greedy(self, best: Tensor, tokens: Tensor) -> None:
        agreement = float((best[:-1, 0] == tokens[1:]).float().mean()) if len(tokens) > 1 else 1.0
        if agreement < GREEDY_AGREEMENT:
            raise ValueError(
                f"only {agreement:.0%} of the answer is what this target would say greedily: "
                "give the journal of a T = 0 run on the same target"
            )

    def _after_nodes(
        self, cache: Any, rows: Tensor, tokens: Tensor, parents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The target's successors after every node of many trees, in one pass: [positions, slots, width]."""
        positions, slots = tokens.shape
        num_cached = cache.get_seq_length()
        visible = _ancestors(parents)  # [positions, slots, slots]
        depths = visible.sum(-1) - 1
        seen = torch.zeros(positions, slots, num_cached + positions * slots, dtype=torch.bool)
        # Everything before the root is cached; the root itself is in the tree as slot 0.
        seen[..., :num_cached] = torch.arange(num_cached) < rows[:, None, None]
        for i in range(positions):
            start = num_cached + i * slots
            seen[i, :, start : start + slots] = visible[i]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        hidden = self.model.model(
            input_ids=tokens.reshape(1, -1),
            position_ids=(rows[:, None] + depths).reshape(1, -1),
            attention_mask=mask.flatten(0, 1)[None, None],
            past_key_values=cache,
        ).last_hidden_state[0]
        cache.crop(num_cached)
        best = top_successors(self.model.lm_head(hidden), self._width, self.vocab_size)
        return best.ids.view(positions, slots, -1), best.probs.view(positions, slots, -1)


def _ancestors(parents: Tensor) -> Tensor:
    """[positions, slots] -> [positions, slots, slots]: who each node sees, itself included."""
    positions, slots = parents.shape
    visible = torch.eye(slots, dtype=torch.bool).repeat(positions, 1, 1)
    every = torch.arange(positions)
    for slot in range(1, slots):  # parents stand before their children
        parent = parents[:, slot]
        inherited = visible[every, parent.clamp(min=0)] & (parent >= 0)[:, None]
        visible[:, slot] |= inherited
    return visible


def draft_pools(
    draft: Eagle3Draft,
    vocab: DraftVocab,
    embedding: Tensor,
    ids: Tensor,  # [tokens]
    features: Tensor,  # [tokens, layers * hidden]
    rows: Tensor,  # [positions] last position whose features the draft has
    shape: Shape,
) -> DraftPool:
    """The pool that SGLang's EAGLE-3 worker would score at each position, all positions at once."""
    attention = draft.midlayer.self_attn
    fused = draft.fc(features.to(embedding.dtype))  # [tokens, hidden]
    wide = draft.layer_input(embedding[ids.roll(-1)], fused)
    cos, sin = draft.angles(torch.arange(len(ids)))
    keys, values = attention.keys_values(wide, cos, sin)
    queries = attention.queries(wide, cos, sin)
    pools = [
        _pools_at(draft, vocab, embedding, (keys, values), queries[part], fused[part], part, shape)
        for part in rows.split(POSITIONS_PER_PASS)
    ]
    return DraftPool(*(torch.cat(column) for column in zip(*pools, strict=True)))


def _pools_at(
    draft: Eagle3Draft,
    vocab: DraftVocab,
    embedding: Tensor,
    context: tuple[Tensor, Tensor],
    queries: Tensor,  # [positions, heads, dim]
    residual: Tensor,  # [positions, hidden]
    rows: Tensor,  # [positions]
    shape: Shape,
) -> DraftPool:
    from sgl_graft.draft_training.eagle3 import chain_attention

    attention, topk, count = draft.midlayer.self_attn, shape.topk, len(rows)
    keys, values = context
    attended = chain_attention(queries, keys, values, rows, [])
    hidden = draft.after_attention(attended, residual)  # [positions * beams, hidden]
    beam_scores = torch.ones(count, 1)
    chain: list[tuple[Tensor, Tensor]] = []
    score_list, token_list = [], []
    parents_list = [torch.arange(-1, topk).expand(count, -1)]
    for step in range(shape.steps):
        beams = beam_scores.shape[1]
        top = draft.lm_head(draft.norm(hidden)).float().softmax(-1).topk(topk, dim=-1)
        scores = beam_scores[:, :, None] * top.values.view(count, beams, topk)  # [positions, beams, topk]
        tokens = vocab.draft_to_target[top.indices].view(count, beams * topk)
        score_list.append(scores)
        token_list.append(tokens)
        if step + 1 == shape.steps:
            break
        beam_scores, best = scores.flatten(1).topk(topk, dim=1)  # [positions, topk]
        if step:
            parents_list.append(best + topk + topk * topk * (step - 1))
        behind = (best // topk + torch.arange(count)[:, None] * beams).flatten()  # rows of `hidden`
        hidden = hidden[behind]
        wide = draft.layer_input(embedding[tokens.gather(1, best).flatten()], hidden)
        beam_rows = rows.repeat_interleave(topk)
        cos, sin = draft.angles(beam_rows + step + 1)
        chain = [(k[behind], v[behind]) for k, v in chain]
        chain.append(attention.keys_values(wide, cos, sin))
        attended = chain_attention(attention.queries(wide, cos, sin), keys, values, beam_rows, chain)
        hidden = draft.after_attention(attended, hidden)
    if shape.steps > 1:
        # `draft_pool` drops the last entry, SGLang's beam of the last step, which is never expanded.
        parents_list.append(parents_list[-1])
    return draft_pool(score_list, token_list, parents_list)


def record_all(
    recorder: Recorder, answers: Iterable[KnownAnswer], output: Path | None = None, *, cut: bool = False
) -> Recording:
    """Record every answer; with `output`, save now and then, and skip what is there already."""
    names: list[tuple[str, int]] = []
    recorded: list[Answer] = []

    def made() -> Recording:
        return Recording(recorder.shape, recorder.vocab_size, tuple(names), tuple(recorded))

    if output is not None and output.is_file():
        before = Recording.load(output)
        if (before.shape, before.vocab_size) != (recorder.shape, recorder.vocab_size):
            raise ValueError(f"--output {output} holds a recording of {before.shape}: name another file")
        names, recorded = list(before.names), list(before.answers)
    for number, answer in enumerate(answers, 1):
        name = (answer.dataset, answer.index)
        if name in names:
            continue
        one = recorder.record(answer.prompt, answer.tokens, cut=cut)
        if cut and len(one.tokens) < SHORTEST_CUT:
            continue
        recorded.append(one)
        names.append(name)
        if output is not None and number % SAVE_EVERY == 0:
            made().save(output)
    if not recorded:
        raise ValueError("nothing to record: this target would have answered none of the prompts that way")
    if output is not None:
        made().save(output)
    return made()
