"""Top k with ties, and both table updates against tables kept as plain lists."""

from __future__ import annotations

import random

import pytest
import torch
from cg_trees import TreeBatch, property_test, tree_batches
from hypothesis import given
from hypothesis import strategies as st
from sgl_graft.cuda_graph.prompt_update import observe_prompt
from sgl_graft.cuda_graph.successor_table import SuccessorTable, context_places, contexts_within
from sgl_graft.cuda_graph.table_update import accepted_slots, update_from_logits
from sgl_graft.cuda_graph.top_successors import top_successors
from sgl_graft.cuda_graph.tree_links import tree_links
from test_cg_retrieve import pack, random_context
from torch import Tensor

VOCAB, K = 7, 3


@property_test
@given(
    st.integers(0, 2**31),
    st.integers(1, 300),
    st.integers(1, 8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1, 3, 1000]),
)
def test_top_successors_order_ties_by_id(
    seed: int, vocab: int, k: int, dtype: torch.dtype, levels: int
) -> None:
    """Few distinct logits make ties the rule; columns beyond the vocabulary never count."""
    k = min(k, vocab)
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randint(-levels, levels, (3, vocab + 5), generator=gen) / 7).to(dtype)
    logits[:, vocab:] = 100
    best = top_successors(logits, k, vocab)
    for row in range(3):
        values = logits[row, :vocab].tolist()
        expected = sorted(range(vocab), key=lambda token: (-values[token], token))[:k]
        assert best.ids[row].tolist() == expected
        probs = torch.softmax(logits[row, :vocab].float(), 0)[expected]
        torch.testing.assert_close(best.probs[row].float(), probs, rtol=2e-3, atol=1e-6)
    assert best.ids.dtype == torch.int32 and best.probs.dtype == torch.float16


def test_top_successors_survives_bad_rows() -> None:
    """NaN and infinite logits, and the two zeros, which are equal."""
    logits = torch.zeros(3, 70)
    logits[0, 3] = float("nan")
    logits[1] = -float("inf")
    logits[2, ::2] = -0.0
    best = top_successors(logits, 4, 70)
    assert int(best.ids.min()) >= 0 and int(best.ids.max()) < 70
    assert best.probs[:2].tolist() == [[0.0] * 4] * 2
    assert best.ids[2].tolist() == [0, 1, 2, 3]


def test_top_successors_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="k 9, vocab_size 8 and 8"):
        top_successors(torch.zeros(1, 8), 9, 8)
    with pytest.raises(ValueError, match="k 2, vocab_size 9 and 8"):
        top_successors(torch.zeros(1, 8), 2, 9)


def row_of(table: SuccessorTable, index: int, tag: int | None, token: int) -> int:
    """Row of a token, or of a context when its tag is given."""
    if tag is None:
        return index * table.vocab_size + token
    return table.first_context_row + int(context_places(table, torch.tensor(index), torch.tensor(tag)))


def tag_of(table: SuccessorTable, *text: int | None) -> int:
    """Tag of the context row that ends a text; unknown ids and what stands before the text are None."""
    named = [token if token is not None and 0 <= token < VOCAB else None for token in text]
    return pack(*[None, None, *named][-table.context_len :])


@property_test
@given(tree_batches(vocab=VOCAB + 2), st.integers(0, 2**31), st.sampled_from([0, 4, 64]))
def test_update_from_logits(batch: TreeBatch, seed: int, context_rows: int) -> None:
    """Accepted before rejected, then shallow, then low slots; pads and unknown ids write nothing."""
    gen = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    table = SuccessorTable.create(VOCAB, K, 2, context_rows, rng.choice([2, 3]))
    before = table.tokens.clone()
    index = torch.randint(-1, 3, (batch.batch,), generator=gen)
    contexts = [random_context(rng, table) for _ in range(batch.batch)]
    accepted = torch.rand(batch.tokens.shape, generator=gen) < 0.3
    links = tree_links(batch.parents, torch.zeros_like(batch.seq_lens))
    depths = links.positions.view_as(batch.tokens)
    logits = torch.randn(batch.tokens.numel(), VOCAB + 1, generator=gen)
    before_roots = torch.tensor(contexts)
    best = update_from_logits(
        table, index, batch.tokens, batch.parents, depths, before_roots, accepted, logits
    )

    claims: dict[int, tuple] = {}
    for row in range(batch.batch):
        for slot in range(batch.slots):
            token, parent = int(batch.tokens[row, slot]), int(batch.parents[row, slot])
            if int(index[row]) not in (0, 1) or token >= VOCAB or (slot > 0 and parent < 0):
                continue
            flat = row * batch.slots + slot
            rank = (not bool(accepted[row, slot]), int(depths[row, slot]), flat)
            text, at = [token], slot  # from the node up to the root, then what led to it
            while at > 0:
                at = int(batch.parents[row, at])
                text.append(int(batch.tokens[row, at]))
            if contexts[row] >= 0:
                text += [contexts[row] % 2**21, contexts[row] >> 21]
            has_context = context_rows and (slot > 0 or contexts[row] >= 0)
            for tag in [None] + ([tag_of(table, *text[::-1])] if has_context else []):
                target = row_of(table, int(index[row]), tag, token)
                claim = (rank, tag, token)
                claims[target] = min(claims.get(target, claim), claim, key=lambda each: each[0])
    expected = before.clone()
    for target, ((_, _, flat), tag, _) in claims.items():
        expected[target] = best.ids[flat]
        assert table.probs[target].tolist() == best.probs[flat].tolist()
        if tag is not None:
            assert int(table.tags[target - table.first_context_row]) == tag
    assert torch.equal(table.tokens[: table.discard_row], expected[: table.discard_row])
    tagged = int((table.tags[:-1] >= 0).sum())
    assert tagged == sum(target >= table.first_context_row for target in claims)


def test_accepted_slots() -> None:
    accept_index = torch.tensor([[0, 2, -1], [4, 5, 7], [8, -1, -1]], dtype=torch.int32)
    expected = [[True, False, True, False], [True, True, False, True], [True, False, False, False]]
    assert accepted_slots(accept_index, 4).tolist() == expected


def insert_one_by_one(
    old: list[tuple[int, float]], successors: list[int], prior: float
) -> list[tuple[int, float]]:
    """The documented rule, in full precision: each distinct successor once, the latest seen last."""
    distinct = [token for i, token in enumerate(successors) if token not in successors[i + 1 :]]
    entries = list(old)
    for token in distinct[-K:]:
        carried = sum(prob for other, prob in entries if other == token)
        scaled = [(other, prob * (1 - prior)) for other, prob in entries if other != token]
        entries = [(token, prior + (1 - prior) * carried), *scaled]
    return entries[:K]


@property_test
@given(st.integers(0, 2**31), st.integers(1, 25), st.sampled_from([0, 4, 64]), st.sampled_from([0.3, 0.5]))
def test_observe_prompt(seed: int, length: int, context_rows: int, prior: float) -> None:
    rng = random.Random(seed)
    table = SuccessorTable.create(VOCAB, K, 2, context_rows, rng.choice([2, 3]))
    fill_rows(table, rng)
    old_tokens, old_probs, old_tags = table.tokens.clone(), table.probs.clone(), table.tags.clone()
    text = [rng.choice([*range(VOCAB), VOCAB, 2**33]) for _ in range(length)]
    index = [rng.choice([0, 1, 1, 1, 2, -1]) for _ in range(length)]
    following = [*text[1:], -1]
    tags = [None, *(tag_of(table, *text[: i + 1]) for i in range(1, length))]  # nothing before the first
    contexts = contexts_within(table, torch.tensor(text))
    observe_prompt(table, torch.tensor(index), contexts, *(torch.tensor(v) for v in (text, following)), prior)

    seen: dict[int, list[int]] = {}
    source: dict[int, int] = {}
    owner: dict[int, int] = {}
    steps = list(zip(index, tags, text, following, strict=True))
    known = [s for s in steps if s[0] in (0, 1) and s[2] < VOCAB and 0 <= s[3] < VOCAB]
    for table_id, tag, token, _ in known:
        if context_rows and tag is not None:
            owner[row_of(table, table_id, tag, token)] = tag
    for table_id, tag, token, after in known:
        row1 = row_of(table, table_id, None, token)
        seen.setdefault(row1, []).append(after)
        source[row1] = row1
        row2 = row_of(table, table_id, tag, token) if context_rows and tag is not None else -1
        if row2 >= 0 and owner[row2] == tag:
            seen.setdefault(row2, []).append(after)
            held = int(old_tags[row2 - table.first_context_row]) == tag
            source[row2] = row2 if held else -row1 - 1  # a new context starts from the updated order-1 row

    def entries(tokens: Tensor, probs: Tensor, row: int) -> list[tuple[int, float]]:
        return [(t, p) for t, p in zip(tokens[row].tolist(), probs[row].tolist(), strict=True) if t >= 0]

    for row in range(table.empty_row):
        if row not in seen:
            assert torch.equal(table.tokens[row], old_tokens[row])
            continue
        fresh = source[row] < 0
        start = (
            entries(table.tokens, table.probs, -source[row] - 1)
            if fresh
            else entries(old_tokens, old_probs, row)
        )
        expected = insert_one_by_one(start, seen[row], prior)
        found = entries(table.tokens, table.probs, row)
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [prob for _, prob in found] == pytest.approx([prob for _, prob in expected], abs=2e-3)
        if row >= table.first_context_row:
            assert int(table.tags[row - table.first_context_row]) == owner[row]
    assert table.tokens[table.empty_row].tolist() == [-1] * K


def fill_rows(table: SuccessorTable, rng: random.Random) -> None:
    """Rows with 0 to K distinct successors, entries first; some context rows in use."""
    for row in range(table.empty_row):
        count = rng.randint(0, K)
        successors = rng.sample(range(VOCAB), count) + [-1] * (K - count)
        table.tokens[row] = torch.tensor(successors, dtype=torch.int32)
        probs = [0.3] * count + [0.0] * (K - count)
        table.probs[row] = torch.tensor(probs, dtype=torch.float16)
    for index in range(2 if table.context_rows else 0):
        for _ in range(5):
            tag = torch.tensor(tag_of(table, *rng.choices(range(VOCAB), k=3)))
            table.tags[context_places(table, torch.tensor(index), tag)] = tag


def test_observed_text_is_retrieved_in_recency_order() -> None:
    """'a b a c a b': after a come b (latest), then c."""
    table = SuccessorTable.create(5, 4)
    text = torch.tensor([0, 1, 0, 2, 0, 1])
    zeros = torch.zeros_like(text)
    observe_prompt(table, zeros, text.roll(1), text, torch.tensor([1, 0, 2, 0, 1, -1]))
    assert table.tokens[0].tolist() == [1, 2, -1, -1]
    assert table.probs[0].tolist() == [0.5, 0.25, 0.0, 0.0]


def test_observe_prompt_refuses_a_prior_of_one() -> None:
    table, one = SuccessorTable.create(5, 4), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="prior 1"):
        observe_prompt(table, one, one, one, one, prior=1.0)
