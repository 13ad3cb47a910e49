"""SpecBlock's kernels against the torch model that training uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from sgl_graft.cpu import block_draft
from sgl_graft.cpu.block_rounds import NativeBlocks, native_blocks
from sgl_graft.draft_training.specblock_loss import CLASSES
from sgl_graft.specblock.drafting import Drafter, DraftShape
from sgl_graft.specblock.model import SpecBlockDraft
from sgl_graft.specblock.pool_attention import DraftPool
from sgl_graft.specblock.rounds import NewRows, TorchBlocks, parts_of
from sgl_graft.specblock.tree import ABSENT, BranchRule, best_tree_torch

from .compiler import needs_compiler

SLOTS, POSITIONS, VOCAB, DRAFT_VOCAB, WIDTH = 200, 64, 300, 70, 64


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=[(1, 1.0), (3, 0.37)], ids=["bf16 weights", "fp32 weights"])
def draft(request: pytest.FixtureRequest) -> SpecBlockDraft:
    """Two or three layers; weights that bf16 holds exactly, and others."""
    torch.manual_seed(request.param[0])
    config = LlamaConfig(
        vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, diffspec_draft_token_num=3, rank_classes=CLASSES,
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1 + request.param[0],
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=512,
    )  # fmt: skip
    made = SpecBlockDraft(config)
    for parameter in made.parameters():
        values = (
            torch.rand(parameter.shape) + 0.5 if parameter.ndim == 1 else torch.randn(parameter.shape) * 0.2
        )
        parameter.copy_(values.bfloat16().float() * request.param[1])
    return made


def pools(draft: SpecBlockDraft) -> DraftPool:
    shape = (SLOTS, draft.block, 2, WIDTH // 4)
    return DraftPool([torch.zeros(shape) for _ in draft.layers], [torch.zeros(shape) for _ in draft.layers])


def both(draft: SpecBlockDraft) -> tuple[TorchBlocks, NativeBlocks]:
    native = native_blocks(draft, pools(draft), reserved=12, positions=POSITIONS)
    assert native is not None
    return TorchBlocks(draft, pools(draft)), native


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) < 2e-5 * max(1.0, float(b.abs().max()))


def requests(lengths: list[int], spare: int = 14) -> torch.Tensor:
    """Slots of several requests in no particular order, with room behind each."""
    random = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(len(lengths)))
    width = max(lengths) + spare
    return random[: width * len(lengths)].view(len(lengths), width).int()


@needs_compiler
@pytest.mark.parametrize("most", [256, 5, 1])
def test_commits_are_the_models(draft: SpecBlockDraft, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, in whatever parts, then chains of several lengths behind it."""
    monkeypatch.setattr("sgl_graft.specblock.rounds.in_parts.__defaults__", (most,))
    plain, native = both(draft)
    lengths = [9, 4, 13]
    slots = requests(lengths)
    for counts in ([9, 4, 13], [2, 1, 3], [1, 1, 1]):
        if counts != lengths:
            lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        rows = NewRows(slots, lengths, counts)
        features, embeds = torch.randn(sum(counts), 3 * WIDTH), torch.randn(sum(counts), WIDTH)
        want, got = plain.commit(rows, features, embeds), native.commit(rows, features, embeds)
        assert close(got, want)
    for layer in range(len(draft.layers)):
        assert close(native._plain.pool.keys[layer], plain.pool.keys[layer])
        assert close(native._plain.pool.values[layer], plain.pool.values[layer])


@needs_compiler
@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_trees_are_the_models(draft: SpecBlockDraft, blocks: int) -> None:
    """Every later block, and the tree; four blocks do not fit behind the rows and run as torch."""
    plain, native = both(draft)
    lengths = [9, 4, 13]
    slots, rows = requests(lengths), NewRows(requests(lengths), lengths, lengths)
    tokens = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    embedding = torch.randn(VOCAB, WIDTH)
    features, embeds = torch.randn(sum(lengths), 3 * WIDTH), torch.randn(sum(lengths), WIDTH)
    shape = DraftShape(blocks=blocks, leaves=4, slots=40)
    trees = []
    for runner in (plain, native):
        drafter = Drafter(draft, embedding, tokens, BranchRule((2, 3, 4, 2), beam=4))
        drafter.propose = runner.propose
        first = drafter.read(runner.commit(rows, features, embeds))
        behind = runner.continuing(slots, lengths, planned=4 * (blocks - 1))
        trees.append(
            drafter.tree(
                first, torch.tensor([1, 2, 3]), torch.tensor(lengths) - 1, behind, shape, [blocks, 1, 2]
            )
        )
    assert torch.equal(trees[0].tokens, trees[1].tokens) and torch.equal(trees[0].parents, trees[1].parents)
    assert type(native.continuing(slots, lengths, 8)) is not type(plain.continuing(slots, lengths, 8))
    assert type(native.continuing(slots, lengths, 13)) is type(plain.continuing(slots, lengths, 13))


@needs_compiler
def test_proposals_are_the_models(draft: SpecBlockDraft) -> None:
    _, native = both(draft)
    hidden = torch.randn(4, 5, WIDTH) * 3
    for width in (1, 10, 25):
        want, got = draft.propose(hidden, width), native.propose(hidden, width)
        assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2]) and close(got[1], want[1])


@needs_compiler
def test_swapped_weights_are_used_after_a_refresh(draft: SpecBlockDraft) -> None:
    plain, native = both(draft)
    rows = NewRows(requests([6]), [6], [6])
    features, embeds = torch.randn(6, 3 * WIDTH), torch.randn(6, WIDTH)
    before = native.commit(rows, features, embeds)
    for parameter in draft.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.05)
    native.refresh()
    after = native.commit(rows, features, embeds)
    assert close(after, plain.commit(rows, features, embeds)) and not close(after, before)


@st.composite
def candidates(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """Trees in which a parent stands before its children and scores at least as much."""
    batch, total = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    tokens = draw(st.lists(st.integers(0, 3), min_size=batch * total, max_size=batch * total))
    steps = draw(
        st.lists(st.sampled_from([0.0, 0.0, 0.3, 1.0, 9e9]), min_size=batch * total, max_size=batch * total)
    )
    parents, scores = [], []
    for b in range(batch):
        own: list[float] = []
        for i in range(total):
            parent = draw(st.integers(-1, i - 1))
            parents.append(parent)
            score = (own[parent] if parent >= 0 else 0.0) - steps[b * total + i]
            own.append(ABSENT if score < -1e9 else score)
        scores += own
    made = (torch.tensor(tokens), torch.tensor(parents), torch.tensor(scores))
    return tuple(t.view(batch, total) for t in made)


@needs_compiler
@given(candidates(), st.integers(2, 12))
@settings(max_examples=150, deadline=None)
def test_the_best_tree_is_the_references(found: tuple[torch.Tensor, ...], slots: int) -> None:
    roots = torch.arange(len(found[0])) + 7
    want = best_tree_torch(*found, roots, slots, levels=40)
    got = block_draft.best_tree(*found, roots, slots, levels=40)
    assert torch.equal(got[0], want.tokens) and torch.equal(got[1], want.parents)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=6), st.integers(1, 25)
)
def test_parts_hold_every_row_once(sizes: list[tuple[int, int]], most: int) -> None:
    lengths, counts = [a + b for a, b in sizes], [b for _, b in sizes]
    rows = NewRows(torch.zeros(len(sizes), 1), lengths, counts)
    seen, ended, at = [], [], 0
    for part, span in parts_of(rows, most):
        assert span.start == at and span.stop - span.start == sum(part.rows.counts) <= most
        at = span.stop
        for i, length, count, end in zip(
            part.owners, part.rows.lengths, part.rows.counts, part.ends, strict=True
        ):
            seen += [(i, position) for position in range(length - count, length)]
            ended += [i] * end
    assert seen == [(i, p) for i, (a, b) in enumerate(sizes) for p in range(a, a + b)]
    assert ended == list(range(len(sizes))) and at == sum(counts)
