"""The torch versions of the engine's device ops against loops that follow their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_graft.cuda_graph.coupled import parents_from_links
from sgl_graft.cuda_graph.eagle_tree import draft_pool, stock_tree

from sgl_graft.cpu import spec_ops

REQUESTS, POSITIONS = 6, 40


def random_pool_map() -> torch.Tensor:  # [requests, positions] int32, distinct slots
    order = torch.randperm(REQUESTS * POSITIONS, generator=torch.Generator().manual_seed(1))
    return order.view(REQUESTS, POSITIONS).to(torch.int32)


@pytest.fixture
def pool_map() -> torch.Tensor:
    return random_pool_map()


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.tensor([4, 0, 5], dtype=torch.int32)


def test_draft_slots_follow_the_committed_length(pool_map: torch.Tensor, rows: torch.Tensor) -> None:
    seq_lens = torch.tensor([3, 20, 0], dtype=torch.int32)
    out = torch.full((3 * 6,), -1)
    spec_ops.assign_draft_cache_locs(rows, pool_map, seq_lens, out, topk=2, num_cols=3)
    expected = [pool_map[row, start : start + 6] for row, start in ((4, 3), (0, 20), (5, 0))]
    assert out.tolist() == torch.cat(expected).tolist()


def test_verify_slots_are_one_window_per_request(pool_map: torch.Tensor, rows: torch.Tensor) -> None:
    start = torch.tensor([1, 30, 7])
    slots = spec_ops.assign_extend_cache_locs_uniform(rows, pool_map, start, 3, 5, "cpu", page_size=1)
    expected = [pool_map[row, begin : begin + 5] for row, begin in ((4, 1), (0, 30), (5, 7))]
    assert slots.tolist() == torch.cat(expected).tolist()


def test_ragged_windows_are_concatenated_and_padded(pool_map: torch.Tensor, rows: torch.Tensor) -> None:
    start, end = torch.tensor([2, 9, 0]), torch.tensor([5, 9, 4])
    slots = spec_ops.speculative_cache_locs(
        req_pool_indices=rows,
        req_to_token=pool_map,
        start_offset=start,
        end_offset=end,
        batch_size=3,
        draft_token_num=4,
        device="cpu",
    )
    filled = [*pool_map[4, 2:5].tolist(), *pool_map[5, 0:4].tolist()]
    assert slots.tolist() == filled + [0] * (12 - len(filled))


def test_new_slots_are_written_where_each_request_grows(pool_map: torch.Tensor, rows: torch.Tensor) -> None:
    before = pool_map.clone()
    start, end = torch.tensor([2, 9, 0]), torch.tensor([5, 9, 4])
    new = torch.arange(900, 907)
    spec_ops.assign_req_to_token_pool(rows, pool_map, start, end, new, 3)
    expected = before.clone()
    expected[4, 2:5] = torch.tensor([900, 901, 902], dtype=torch.int32)
    expected[5, 0:4] = torch.tensor([903, 904, 905, 906], dtype=torch.int32)
    assert torch.equal(pool_map, expected)


def test_accepted_slots_are_packed_in_path_order() -> None:
    verify_slots = torch.arange(100, 112)  # three requests of four slots
    accept_index = torch.tensor([[0, 2, -1], [4, -1, -1], [8, 9, 11]], dtype=torch.int32)
    sources = torch.zeros(9, dtype=torch.int64)
    spec_ops.fill_accept_out_cache_loc(accept_index, verify_slots, sources, 4)
    assert sources[:6].tolist() == [100, 102, 104, 108, 109, 111]
    targets = torch.zeros(9, dtype=torch.int64)
    accept_lens = torch.tensor([2, 1, 3], dtype=torch.int32)
    spec_ops.fill_front_out_cache_loc(accept_lens, verify_slots, targets)
    assert targets[:6].tolist() == [100, 101, 104, 108, 109, 110]


def test_bonus_is_the_last_token_of_each_run() -> None:
    tokens = torch.tensor([[7, 8, 9], [4, 0, 0]], dtype=torch.int32)
    bonus = torch.zeros(2, dtype=torch.int32)
    spec_ops.fill_bonus_tokens(tokens.flatten(), torch.tensor([3, 1], dtype=torch.int32), bonus, 3, 2)
    assert bonus.tolist() == [9, 4]


@settings(max_examples=60, deadline=None)
@given(
    topk=st.integers(1, 5),
    steps=st.integers(1, 5),
    batch=st.integers(1, 3),
    slots=st.integers(2, 24),
    seed=st.integers(0, 10**6),
)
def test_parents_of_selected_nodes_are_those_of_the_draft_pool(
    topk: int, steps: int, batch: int, slots: int, seed: int
) -> None:
    """EAGLE's pool indices, turned into slots, against the reference that builds the tree from scores."""
    scores, tokens, parent_lists = _eagle_draft(topk, steps, batch, seed)
    pool = draft_pool(scores, tokens, parent_lists)
    slots = min(slots, pool.tokens.shape[1] + 1)
    flat = torch.cat([step.flatten(1) for step in scores], dim=1)
    chosen = flat.topk(slots - 1, dim=1).indices.sort(dim=1).values
    earlier = parent_lists[:-1] if len(parent_lists) > 1 else []
    parent_list = torch.cat(earlier, dim=1) if earlier else torch.empty(batch, 0, dtype=torch.int64)
    parents = spec_ops.selected_parents(parent_list, chosen, topk)
    _, expected = stock_tree(pool, torch.zeros(batch, dtype=torch.int64), slots)
    assert torch.equal(parents[:, 1:], expected[:, 1:])


def _eagle_draft(
    topk: int, steps: int, batch: int, seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What EAGLE's draft loop leaves behind, from random step probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def step_probs(count: int) -> torch.Tensor:
        return torch.rand(batch, count, topk, generator=generator) * 0.9 + 0.05

    path = step_probs(1)  # [batch, 1, topk]
    scores, tokens = [path], [torch.randint(0, 99, (batch, topk), generator=generator)]
    parents = [torch.arange(-1, topk).repeat(batch, 1)]
    best = path.squeeze(1)
    for step in range(1, steps):
        expanded = best.unsqueeze(2) * step_probs(topk)  # [batch, topk, topk]
        scores.append(expanded)
        tokens.append(torch.randint(0, 99, (batch, topk * topk), generator=generator))
        best, index = expanded.flatten(1).topk(topk, dim=1)
        parents.append(index + topk**2 * (step - 1) + topk)
    return scores, tokens, parents


def test_built_trees_link_back_to_their_parents() -> None:
    topk, steps, slots, batch = 3, 4, 9, 2
    scores, _, parent_lists = _eagle_draft(topk, steps, batch, seed=3)
    flat = torch.cat([step.flatten(1) for step in scores], dim=1)
    chosen = flat.topk(slots - 1, dim=1).indices.sort(dim=1).values
    parent_list = torch.cat(parent_lists[:-1], dim=1)
    seq_lens = torch.tensor([5, 11], dtype=torch.int32)
    mask = torch.zeros(batch * slots * slots, dtype=torch.bool)
    positions = torch.zeros(batch * slots, dtype=torch.int64)
    links = [torch.zeros(batch, slots, dtype=torch.int64) for _ in range(3)]
    spec_ops.build_tree(
        parent_list, chosen, seq_lens, mask, positions, *links, topk, steps, slots, spec_ops.tree_mask_mode()
    )
    parents = spec_ops.selected_parents(parent_list, chosen, topk)
    assert torch.equal(parents_from_links(links[1], links[2])[:, 1:], parents[:, 1:])
    for request in range(batch):
        for slot in range(slots):
            path, node = {slot}, slot
            while node > 0:
                node = int(parents[request, node])
                path.add(node)
            seen = mask.view(batch, slots, slots)[request, slot].nonzero().flatten().tolist()
            assert set(seen) == path
            assert positions.view(batch, slots)[request, slot] == seq_lens[request] + len(path) - 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_last_locations_are_where_pages_go_on(dtype: torch.dtype) -> None:
    req_to_token = torch.arange(60, dtype=torch.int32).view(3, 20)
    lengths = torch.tensor([5, 0, 20], dtype=dtype)
    found = spec_ops.last_locations(req_to_token, torch.tensor([2, 1, 0]), lengths)
    assert found.dtype == dtype and found.tolist() == [44, -1, 19]
