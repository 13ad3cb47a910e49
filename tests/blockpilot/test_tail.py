"""What Graft-TAIL keeps between rounds: whose table a row of the request pool reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sgl_graft.cuda_graph.value_rule import ValueMaps

from sgl_graft.blockpilot.tail import TailGraft
from sgl_graft.config import BlockPilotConfig, TableConfig

ROW = 1


def tail(scope: str) -> TailGraft:
    table = TableConfig.model_validate({"scope": scope, "context_rows": 0})
    config = BlockPilotConfig(tail_graft=True, table=table)
    return TailGraft(config, ValueMaps.identity(1), b_max=4, num_rows=3, vocab_size=20)


def request(rid: str, tokens: list[int], **settings: Any) -> SimpleNamespace:
    params = SimpleNamespace(custom_params={"graft": settings})
    kv = SimpleNamespace(req_pool_idx=ROW)
    return SimpleNamespace(rid=rid, kv=kv, origin_input_ids=tokens, output_ids=[], sampling_params=params)


def prefill(state: TailGraft, req: SimpleNamespace, prefix: int, length: int) -> None:
    batch = SimpleNamespace(
        reqs=[req], prefix_lens=[prefix], extend_lens=[length], req_pool_indices=torch.tensor([ROW])
    )
    state.observe_prompts(batch, torch.tensor([0]))


def known(state: TailGraft, token: int) -> int:
    """Likeliest successor of a token in the row's own table, -1 for none."""
    tables = state.table.tokens[: state.table.first_context_row].view(3, -1, state.table.k)
    return int(tables[ROW, token, 0])


def test_a_request_with_the_id_of_the_former_owner_starts_with_an_empty_table() -> None:
    state = tail("request")
    prefill(state, request("same", [3, 4, 5]), 0, 3)
    assert (known(state, 3), known(state, 4)) == (4, 5)
    prefill(state, request("same", [7, 8, 9]), 0, 3)
    assert (known(state, 3), known(state, 4)) == (-1, -1) and known(state, 7) == 8


def test_the_next_chunk_of_a_request_keeps_what_the_first_one_taught() -> None:
    state, req = tail("request"), request("one", [3, 4, 5, 6, 7, 8])
    prefill(state, req, 0, 3)
    prefill(state, req, 3, 3)
    assert [known(state, token) for token in (3, 4, 6, 7)] == [4, 5, 7, 8]


def test_whether_a_row_takes_part_is_asked_anew_for_every_request() -> None:
    state = tail("shared")
    prefill(state, request("same", [3, 4, 5]), 0, 3)
    assert int(state.table_of_row[ROW]) == 0
    prefill(state, request("same", [3, 4, 5], enabled=False), 0, 3)
    assert int(state.table_of_row[ROW]) == -1
