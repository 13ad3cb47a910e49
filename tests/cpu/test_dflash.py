"""What stands in for DFLASH's missing parts on a CPU: acceptance at any temperature, and one kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.dflash import compute_dflash_correct_drafts_and_bonus

from sgl_graft.cpu import dflash

from .test_verify_distribution import FILTERS, LEVEL, NUM_SEEDS, p_value
from .two_tokens import Filters, Round, plain, sampling_info, speculated

NO_BIASES = {
    "acc_additive_penalties": None,
    "acc_scaling_penalties": None,
    "penalizer_orchestrator": None,
    "logit_bias": None,
    "has_custom_logit_processor": False,
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash, "_tensor_parallel_group", lambda: SimpleNamespace(world_size=1))


def upstream(
    self: Any, *, candidates: torch.Tensor, target_predict: torch.Tensor, **_: Any
) -> tuple[Any, ...]:
    """The rest of the worker's own `_accept_block`: its comparison and the committed tokens."""
    accept_len, bonus = compute_dflash_correct_drafts_and_bonus(
        candidates=candidates, target_predict=target_predict
    )
    out = torch.cat([candidates[:, 1:], torch.zeros_like(candidates[:, :1])], dim=1)
    out.scatter_(1, accept_len.long()[:, None], bonus[:, None])
    return accept_len, accept_len + 1, bonus, out, None


def accept(
    logits: torch.Tensor,  # [batch * slots, vocab]
    candidates: torch.Tensor,  # [batch, slots]
    info: Any,
    prefix_lens: torch.Tensor,
    held: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # committed tokens [batch, slots], lengths [batch]
    for name, value in NO_BIASES.items():
        if not hasattr(info, name):
            setattr(info, name, value)
    _, lengths, _, out, _ = dflash.accept_block(
        upstream,
        SimpleNamespace(graft_held=held or []),
        candidates=candidates,
        next_token_logits=logits,
        sampling_info=info,
        prefix_lens=prefix_lens,
    )
    return out, lengths.long()


def by_equality(verify_round: Round) -> tuple[torch.Tensor, torch.Tensor]:
    batch = verify_round.tokens.shape[0]
    first = verify_round.positions.view(batch, -1)[:, 0]
    return accept(verify_round.logits, verify_round.tokens, verify_round.info, first)


def one_position_late(verify_round: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong on purpose: noise of the next position, so a token's noise depends on the round it falls in."""
    batch = verify_round.tokens.shape[0]
    late = torch.arange(batch) % 2
    first = verify_round.positions.view(batch, -1)[:, 0]
    out, lengths = accept(verify_round.logits, verify_round.tokens, verify_round.info, first + late)
    return out, lengths


BLOCK = ([0, 3, 1], [-1, 0, 1])


@pytest.mark.parametrize("name", ["plain", "all"])
def test_two_tokens_have_the_targets_distribution(name: str) -> None:
    filters = FILTERS[name]
    seeds = torch.arange(NUM_SEEDS)
    pairs = speculated(seeds, filters, by_equality, *BLOCK)
    assert p_value(pairs, filters) > LEVEL
    assert torch.equal(pairs, plain(seeds, filters)), "seed by seed what plain decoding draws"


def test_seed_identity_would_notice_noise_of_another_position() -> None:
    seeds = torch.arange(2000)
    pairs = speculated(seeds, Filters(), one_position_late, *BLOCK)
    assert not torch.equal(pairs, plain(seeds, Filters()))


def greedy_info(batch: int) -> Any:
    info = sampling_info(torch.arange(batch), Filters(top_k=1))
    info.is_all_greedy = True
    return info


def certain(tokens: torch.Tensor, vocab: int = 30) -> torch.Tensor:
    """Logits `[batch * slots, vocab]` whose argmax are the tokens `[batch, slots]`."""
    return torch.nn.functional.one_hot(tokens.flatten(), vocab).float()


def test_a_block_counts_as_far_as_it_names_the_targets_tokens() -> None:
    says = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    proposed = torch.tensor([[1, 4, 5, 6], [1, 4, 9, 6], [1, 9, 5, 6]])
    out, lengths = accept(certain(says), proposed, greedy_info(3), torch.tensor([10, 20, 30]))
    assert lengths.tolist() == [4, 2, 1]
    committed = [row[:n] for row, n in zip(out.tolist(), lengths.tolist(), strict=True)]
    assert committed == [[4, 5, 6, 7], [4, 5], [4]]


def test_a_shorter_row_never_accepts_beyond_its_block() -> None:
    """-1 marks slots that a row does not have; the committed row holds no -1 for later look-ups."""
    says = torch.tensor([[4, 5, 6, 7]])
    proposed = torch.tensor([[1, 4, -1, -1]])
    out, lengths = accept(certain(says), proposed, greedy_info(1), torch.tensor([10]))
    assert lengths.tolist() == [2]
    assert out.tolist() == [[4, 5, 0, 0]]


def test_a_request_whose_penalties_depend_on_the_path_commits_one_token() -> None:
    says = torch.tensor([[4, 5, 6], [4, 5, 6]])
    proposed = torch.tensor([[1, 4, 5], [1, 4, 5]])
    out, lengths = accept(certain(says), proposed, greedy_info(2), torch.tensor([10, 10]), held=[1])
    assert lengths.tolist() == [3, 1]
    assert out[1, 0] == 4
    assert proposed.tolist() == [[1, 4, 5], [1, 4, 5]], "the worker's buffer is not touched"


def batch_of(reqs: list[Any], penalties: bool = False) -> Any:
    counted: list[int] = []
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.arange(3),
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=penalties)),
        counted=counted,
        cumulate_penalty_output_tokens=lambda: counted.append(1),
    )


def req(**changes: float) -> Any:
    nothing = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    return SimpleNamespace(sampling_params=SimpleNamespace(**(nothing | {"min_new_tokens": 0} | changes)))


def test_which_requests_are_held() -> None:
    worker = SimpleNamespace()
    dflash.begin_round(worker, batch_of([req(), req(repetition_penalty=1.2), req(min_new_tokens=3)]))
    assert worker.graft_held == [1, 2]


@pytest.mark.parametrize("penalties", [True, False])
def test_a_decode_counts_the_newest_tokens_towards_penalties(penalties: bool) -> None:
    batch = batch_of([req(frequency_penalty=0.5)], penalties)
    dflash.count_penalties(None, batch)
    assert len(batch.counted) == int(penalties)


def test_the_workers_record_of_a_stream_means_nothing_here() -> None:
    batch = batch_of([])
    dflash.begin_round(SimpleNamespace(), batch)
    batch.seq_lens.record_stream(torch.get_device_module("cpu").current_stream())
    assert type(batch.seq_lens + 1) is torch.Tensor
    with pytest.raises(RuntimeError):  # should torch learn it, the subclass can go
        torch.arange(3).record_stream(torch.get_device_module("cpu").current_stream())


def test_embeddings_keep_the_servers_dtype() -> None:
    embeds = torch.randn(3, 4)
    runner = SimpleNamespace(dtype=torch.float32)
    forward_batch = SimpleNamespace(input_embeds=embeds, replace_embeds=None)
    upstreams = {"input_embeds": embeds.bfloat16(), "get_embedding": True}
    kept = dflash.keep_dtype(upstreams, runner, forward_batch, None)
    assert torch.equal(kept["input_embeds"], embeds)
    assert kept["get_embedding"]
    forward_batch.input_embeds = None
    assert dflash.keep_dtype({}, runner, forward_batch, None) == {}


def test_biases_reach_every_row_of_their_request_and_scale() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]]).repeat(4, 1)
    info = greedy_info(2)
    vars(info).update(NO_BIASES)
    info.acc_scaling_penalties = torch.tensor([[2.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    info.logit_bias = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    dflash.adjust_logits(next_token_logits=logits, sampling_info=info, draft_token_num=2)
    assert logits.tolist() == [[1.0, -4.0, 1.0]] * 2 + [[2.0, -2.0, 6.0]] * 2
    dflash.adjust_logits(next_token_logits=logits, sampling_info=None, draft_token_num=2)


def test_ranks_compare_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, torch.Tensor] = {}

    def follow(group: Any, inputs: dict[str, torch.Tensor], decision: dict[str, torch.Tensor]) -> None:
        seen.update(inputs)
        seen.update(decision)

    monkeypatch.setattr(dflash, "_tensor_parallel_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(dflash, "follow_rank_0", follow)
    accept(certain(torch.tensor([[4, 5]])), torch.tensor([[1, 4]]), greedy_info(1), torch.tensor([7]))
    assert seen["the block's tokens"].tolist() == [[1, 4]]
    assert seen["the committed lengths"].tolist() == [7]
    assert seen["the target's tokens"].tolist() == [[4, 5]]


def test_likeliest_tokens_are_the_argmax_over_the_plain_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(96, 32), torch.randn(7, 32)
    weight[80:] *= 100.0  # padding rows
    head = SimpleNamespace(
        weight=weight, shard_indices=SimpleNamespace(num_org_elements=80, num_added_elements=0)
    )

    def original(self: Any, **_: Any) -> torch.Tensor:
        return torch.full((7,), -5)

    def tokens() -> torch.Tensor:
        return dflash.likeliest_tokens(original, None, hidden_states=hidden, lm_head=head)

    assert torch.equal(tokens(), (hidden @ weight[:80].T).argmax(-1))
    head.shard_indices.num_added_elements = 3
    assert tokens()[0] == -5, "added tokens lie elsewhere: upstream's own way"
    head.shard_indices.num_added_elements = 0
    monkeypatch.setattr(dflash, "_tensor_parallel_group", lambda: SimpleNamespace(world_size=2))
    assert tokens()[0] == -5, "the other rank has other tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_are_the_engines(dtype: torch.dtype) -> None:
    """Against transformers' Qwen3 pieces; the values stay as they are."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 9, 4, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    before = qkv.clone()
    q_norm, k_norm = Qwen3RMSNorm(dim), Qwen3RMSNorm(dim)
    with torch.no_grad():
        q_norm.weight.normal_(1.0, 0.2)
        k_norm.weight.normal_(1.0, 0.2)
    angles = torch.arange(64)[:, None] * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)  # [positions, dim]
    positions = torch.randint(0, 64, (tokens,))
    dflash.norm_and_rotate_(
        qkv, positions, q_norm.weight.to(dtype), k_norm.weight.to(dtype), table, heads, kv_heads, dim, 1e-6
    )
    q, k, v = before.float().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    cos, sin = (torch.cat([part[positions]] * 2, dim=-1)[None] for part in (angles.cos(), angles.sin()))
    with torch.no_grad():
        q, k = (norm(x.view(1, tokens, -1, dim)).transpose(1, 2) for norm, x in ((q_norm, q), (k_norm, k)))
    q, k = (x.transpose(1, 2).reshape(tokens, -1) for x in apply_rotary_pos_emb(q, k, cos, sin))
    expected = torch.cat([q, k, v], dim=-1)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        close = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(qkv.float(), expected, **close)
    assert torch.equal(qkv[:, -kv_heads * dim :], before[:, -kv_heads * dim :])
