"""A round of drafting over a batch: alone or together, with fewer blocks for some, from the real draft."""

from __future__ import annotations

import torch

from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock.drafting import BlockOne, Drafter, DraftShape
from sgl_graft.specblock.model import SpecBlockDraft
from sgl_graft.specblock.rounds import TorchContinuation
from sgl_graft.specblock.tree import BranchRule, VerifyTree

from .test_model import Served

SHAPE = DraftShape(blocks=3, leaves=4, slots=64)


def make_drafter(draft: SpecBlockDraft, vocab: DraftVocab) -> Drafter:
    embedding = torch.randn(96, 32, generator=torch.Generator().manual_seed(8))
    return Drafter(draft, embedding, vocab.draft_to_target, BranchRule((2, 2, 2, 2), beam=2))


def commit(drafter: Drafter, served: Served, length: int, seed: int) -> tuple[BlockOne, int]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 96, (length,), generator=random)
    hidden = served.commit(torch.randn(length, 96, generator=random), drafter.embed(tokens))
    return drafter.read(hidden.unsqueeze(0)), int(tokens[-1])


def behind(served: Served, contexts: list[torch.Tensor]) -> TorchContinuation:
    return TorchContinuation(served.draft, served.pool, contexts)


def depths(tree: VerifyTree, row: int) -> list[int]:
    found = [0]
    for parent in tree.parents[row, 1:].tolist():
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


@torch.no_grad()
def test_a_batch_drafts_what_each_request_drafts_alone(draft: SpecBlockDraft, vocab: DraftVocab) -> None:
    drafter = make_drafter(draft, vocab)
    served = Served(draft)
    firsts, roots, contexts = [], [], []
    for length, seed in ((5, 1), (9, 2), (3, 3)):
        served.length = 0
        first, root = commit(drafter, served, length, seed)
        firsts.append(first)
        roots.append(root)
        contexts.append(served.slots[:length].clone())
        served.slots = served.slots.roll(-length)  # the next request gets other pool slots
    positions = torch.tensor([len(c) - 1 for c in contexts])
    alone = [
        drafter.tree(first, torch.tensor([root]), positions[i : i + 1], behind(served, [contexts[i]]), SHAPE)
        for i, (first, root) in enumerate(zip(firsts, roots, strict=True))
    ]
    merged = BlockOne(
        torch.cat([f.hidden for f in firsts]),
        torch.cat([f.tokens for f in firsts]),
        torch.cat([f.log_probs for f in firsts]),
        torch.cat([f.classes for f in firsts]),
    )
    together = drafter.tree(merged, torch.tensor(roots), positions, behind(served, contexts), SHAPE)
    for row, one in enumerate(alone):
        assert torch.equal(together.tokens[row], one.tokens[0])
        assert torch.equal(together.parents[row], one.parents[0])
        assert set(together.tokens[row, 1:][together.parents[row, 1:] >= 0].tolist()) <= set(
            vocab.draft_to_target.tolist()
        )
    assert any(max(depths(together, row)) > draft.block for row in range(3)), "no later block was used"

    fewer = drafter.tree(merged, torch.tensor(roots), positions, behind(served, contexts), SHAPE, [1, 3, 1])
    assert all(max(depths(fewer, row)) <= draft.block for row in (0, 2))
    assert torch.equal(fewer.tokens[1], together.tokens[1])
