"""The successor table has the size of an empty one for ever."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_graft.cuda_graph.prompt_update import observe_prompt
from sgl_graft.cuda_graph.successor_table import SuccessorTable, contexts_within


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6))
def test_a_table_never_grows(seed: int, texts: int) -> None:
    table = SuccessorTable.create(50, 4, num_tables=2, context_rows=32)
    size, places = table.num_bytes, [t.data_ptr() for t in (table.tokens, table.probs, table.tags)]
    gen = torch.Generator().manual_seed(seed)
    for _ in range(texts):
        text = torch.randint(0, 50, (400,), generator=gen)
        index = torch.randint(0, 2, (1,), generator=gen).expand(400).contiguous()
        following = torch.cat((text[1:], text.new_full((1,), -1)))
        observe_prompt(table, index, contexts_within(table, text), text, following)
    assert table.num_bytes == size
    assert [t.data_ptr() for t in (table.tokens, table.probs, table.tags)] == places
    assert bool((table.tokens >= 0).any()), "the control: something was learned"
