"""The draft's forward against a naive loop, its shift, and incremental serving against one full forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sgl_graft.specblock.model import SpecBlockDraft, rank_features
from sgl_graft.specblock.pool_attention import CommitRows, ContinueBlocks, DraftPool
from sgl_graft.specblock.refresh import pairs_after_verify

from .conftest import tiny_config
from .reference import NaiveDraft

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


class Served:
    """One request's draft in a pool with scattered slots, as the server keeps it."""

    def __init__(self, draft: SpecBlockDraft, seed: int = 0) -> None:
        self.draft = draft
        config = draft.config
        dim = config.hidden_size // config.num_attention_heads
        shape = (64, draft.block, config.num_key_value_heads, dim)
        self.pool = DraftPool(
            [torch.full(shape, torch.nan) for _ in draft.layers],
            [torch.full(shape, torch.nan) for _ in draft.layers],
        )
        self.slots = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        self.length = 0

    def commit(self, features: Tensor, embeds: Tensor, start: int | None = None) -> Tensor:
        """Append rows; returns the last one's hidden states `[K, hidden]`."""
        start = self.length if start is None else start
        end = start + len(features)
        attend = CommitRows(
            self.pool,
            written=self.slots[start:end],
            contexts=[self.slots[:end]],
            everything=torch.arange(start, end),
            all_counts=[end - start],
            queried=torch.tensor([end - 1]),
            counts=[1],
        )
        inputs = self.draft.first_inputs(features, embeds)
        rows = torch.tensor([len(features) - 1])
        hidden = self.draft.run(inputs, torch.arange(start, end), attend, rows)
        self.length = end
        return hidden[0]


@torch.no_grad()
def test_commit_equals_the_naive_loop(draft: SpecBlockDraft) -> None:
    torch.manual_seed(1)
    features, embeds = torch.randn(5, 96), torch.randn(5, 32)
    naive = NaiveDraft(draft, features, embeds)
    for rows in range(1, 6):
        torch.testing.assert_close(
            Served(draft).commit(features[:rows], embeds[:rows]), naive.first[rows - 1], **CLOSE
        )


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(1, 1), (2, 4), (4, 3)])
def test_chained_blocks_equal_the_naive_loop(draft: SpecBlockDraft, cuts: tuple[int, int]) -> None:
    """Two leaves side by side continue block 1, and the second of them once more."""
    torch.manual_seed(2)
    features, embeds, tokens = torch.randn(4, 96), torch.randn(4, 32), torch.randn(3, 32)
    naive = NaiveDraft(draft, features, embeds)
    served = Served(draft)
    first = served.commit(features, embeds)
    attend = ContinueBlocks(served.pool, [served.slots[:4]], draft.block)
    position = torch.tensor([3])

    leaf_cuts = torch.tensor([3, cuts[0]])
    attend.start(None, leaf_cuts)
    second = draft.run(draft.next_inputs(first[leaf_cuts - 1], tokens[:2]), position.repeat(2), attend)
    path = [(naive.base_of(3), cuts[0])]
    want, kept = naive.next(naive.first[3][cuts[0] - 1], tokens[1], 3, path)
    torch.testing.assert_close(second[1], want, **CLOSE)

    attend.start(torch.tensor([1]), torch.tensor([cuts[1]]))
    third = draft.run(draft.next_inputs(second[1:, cuts[1] - 1], tokens[2:]), position, attend)
    want, _ = naive.next(want[cuts[1] - 1], tokens[2], 3, [*path, (kept, cuts[1])])
    torch.testing.assert_close(third[0], want, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[12], [5, 7], [1, 1, 10], [3, 3, 3, 3]])
def test_incremental_equals_full(draft: SpecBlockDraft, chunks: list[int]) -> None:
    torch.manual_seed(3)
    features, embeds = torch.randn(12, 96), torch.randn(12, 32)
    full = Served(draft).commit(features, embeds)
    served, start = Served(draft), 0
    for count in chunks:
        last = served.commit(features[start : start + count], embeds[start : start + count])
        start += count
    torch.testing.assert_close(draft.lm_head(draft.norm(last)), draft.lm_head(draft.norm(full)), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("reference", [False, True])
def test_refresh_after_accepted_chains(draft: SpecBlockDraft, reference: bool) -> None:
    """Rows committed round by round equal one full forward; the reference's pairing of them does not."""
    torch.manual_seed(4)
    features, table = torch.randn(16, 96), torch.randn(96, 32)
    ids = torch.randint(0, 96, (17,))
    full = Served(draft).commit(features, table[ids[1:]])
    served = Served(draft)
    served.commit(features[:6], table[ids[1:7]])
    start = 6
    for accepted in (3, 1, 4, 2):  # tokens committed by each verify, bonus included
        committed = ids[start + 1 : start + 1 + accepted]
        tokens = pairs_after_verify(committed, torch.tensor([accepted - 1]), reference)
        last = served.commit(features[start : start + accepted], table[tokens])
        start += accepted
    got, want = draft.lm_head(draft.norm(last)), draft.lm_head(draft.norm(full))
    if reference:
        assert (got - want).abs().max() > 1e-2
    else:
        torch.testing.assert_close(got, want, **CLOSE)


@torch.no_grad()
def test_shift_is_the_only_way_from_slot_to_slot(draft: SpecBlockDraft) -> None:
    """With attention silent: no right half, no influence; with one, slot k reads slot k - 1 and no other."""
    for layer in draft.layers:
        layer.self_attn.o_proj.weight.zero_()
    inputs = torch.randn(1, 4, 32)
    changed = inputs.clone()
    changed[0, 1] += 1.0

    def moved() -> list[bool]:
        outputs = [draft.run(x, torch.zeros(1, dtype=torch.long), _Silent()) for x in (inputs, changed)]
        return [not torch.equal(a, b) for a, b in zip(outputs[0][0], outputs[1][0], strict=True)]

    assert moved() == [False, True, True, False]
    draft.shift_proj[0].weight[:, 32:] = 0
    assert moved() == [False, True, False, False]
    draft.shift_proj[0].weight.normal_()
    draft.shift_proj[0].weight[:, :32] = 0
    assert moved() == [False, False, True, False]


class _Silent:
    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(*queries.shape[:2], queries.shape[2] * queries.shape[3])


@torch.no_grad()
def test_slots_differ_only_by_their_query(draft: SpecBlockDraft) -> None:
    """Prefix broadcast: condition and token reach all slots alike."""
    inputs = draft.first_inputs(torch.randn(1, 96), torch.randn(1, 32))
    apart = draft.first_inputs(torch.randn(1, 96), torch.randn(1, 32))
    torch.testing.assert_close(inputs[0] - inputs[0, :1], apart[0] - apart[0, :1], atol=1e-5, rtol=1e-4)


def test_rank_features_follow_the_design_note() -> None:
    logits = torch.randn(20).sort(descending=True).values
    found = rank_features(logits)
    probs = logits.double().exp() / logits.double().exp().sum()
    want = [*probs[:10].log(), logits[0] - logits[1], logits[0] - logits[2], logits[0] - logits[4], probs[0]]
    want.append(-(probs * probs.log()).sum())
    torch.testing.assert_close(found, torch.stack([w.float() for w in want]), atol=1e-5, rtol=1e-4)


def test_no_gradient_of_ranks_reaches_the_trunk(draft: SpecBlockDraft) -> None:
    hidden = torch.randn(3, 32, requires_grad=True)
    normed = draft.norm(hidden)
    top = draft.lm_head(normed).topk(20).values
    draft.rank_logits(normed, top).sum().backward()
    assert hidden.grad is None and draft.lm_head.weight.grad is None
    assert draft.rank_head[0].weight.grad is not None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"diffspec_draft_token_num": None}, "diffspec_draft_token_num"),
        ({"rank_classes": 3}, "rank_classes"),
        ({"draft_vocab_size": 8}, "draft_vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpecBlockDraft(tiny_config(**changes))
