"""SPECBLOCK's draft inside SGLang: what EAGLE's draft worker does, in blocks.

The draft's keys and values lie in a pool of SGLang's own class with K times the draft's key-value heads, that
is K entries per committed token, indexed by the target's slots. What block 1 proposed at a request's last row
waits in buffers by request row until the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import eagle_worker_v2 as stock
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput

from ..config import current_config
from ..cpu.block_rounds import native_blocks
from ..cuda_graph.tree_links import TreeMaskMode, tree_links
from ..serving.adaptation_metrics import AdaptationMetrics
from ..serving.request_settings import settings_of
from .adaptation.adaptation import Adaptation
from .adaptation.setup import make_adaptation
from .draft_memory import draft_pool, size_pools
from .drafting import BlockOne, Drafter, DraftShape
from .grafting import Grafting
from .pool_attention import DraftPool
from .ranks import all_ranks, shared_embedding
from .refresh import pairs_after_verify
from .rounds import Blocks, NewRows, TorchBlocks
from .startup import rule_of
from .tree import VerifyTree

logger = logging.getLogger(__name__)


class SpecBlockVerifyInput(EagleVerifyInput):
    """A verify input without fixed branching."""

    @property
    def tree_topk(self) -> int:
        return -1


class SpecBlockDraftWorker(stock.EagleDraftWorker):
    """The stock draft worker's loading and memory; drafting and draft extend are ours."""

    drafter: Drafter
    pool: DraftPool
    blocks: Blocks
    waiting: BlockOne  # [request rows, ..]
    tree: VerifyTree  # of the round in flight
    grafting: Grafting | None
    adaptation: Adaptation | None
    adaptation_metrics: AdaptationMetrics

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.model = self.draft_runner.model
        self.block = self.model.draft.block
        size_pools(self.model.draft, self.draft_runner.model_config, target_worker.model_runner)

    # ---- set-up ----------------------------------------------------------------------------------------

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        draft, model = self.model.draft, self.model
        self.config = config = current_config().specblock
        rule = rule_of(config, Path(self.draft_runner.model_config.model_path))
        self.drafter = Drafter(draft, model.embedding, self.hot_token_id, rule)
        if get_parallel().tp_size > 1:
            self.drafter.look_up = shared_embedding(model.embedding)
        self.shape = DraftShape(config.blocks, config.leaves, self.speculative_num_draft_tokens)
        self.pool = draft_pool(self.draft_runner.token_to_kv_pool, len(draft.layers), self.block)
        self.blocks, weights_changed = self._blocks()
        self.drafter.propose = self.blocks.propose
        rows = self.req_to_token_pool.req_to_token.shape[0]
        shape = (rows, self.block, self.drafter.width)
        self.waiting = BlockOne(
            hidden=torch.zeros(
                rows, self.block, draft.config.hidden_size, dtype=draft.norm.weight.dtype, device=self.device
            ),
            tokens=torch.zeros(shape, dtype=torch.long, device=self.device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=self.device),
            classes=torch.zeros(rows, self.block, dtype=torch.long, device=self.device),
        )
        self.grafting = None
        if config.graft:
            vocab_size = self.target_worker.model_runner.model_config.vocab_size
            steps = self.speculative_num_steps
            self.grafting = Grafting(self.server_args, self.shape.slots, steps, rows, vocab_size, self.device)
        self.adaptation = None
        if config.adaptation.enabled:
            self.adaptation = make_adaptation(
                draft, self.hot_token_id, config.adaptation, all_ranks(), weights_changed
            )
            self.adaptation_metrics = AdaptationMetrics(self.adaptation)
        logger.info(
            "SPECBLOCK: block=%d blocks=%d leaves=%d slots=%d children=%s beam=%d",
            self.block, config.blocks, config.leaves, self.shape.slots, rule.children, rule.beam,
        )  # fmt: skip

    def _blocks(self) -> tuple[Blocks, Callable[[], None]]:
        """What runs blocks here, and what to call when the draft's weights changed."""
        table = self.req_to_token_pool.req_to_token
        reserved = max(self.topk * self.speculative_num_steps, self.shape.slots)
        native = native_blocks(self.model.draft, self.pool, reserved, table.shape[1])
        if native is not None:
            return native, native.refresh
        return TorchBlocks(self.model.draft, self.pool), lambda: None

    def init_attention_backend(self) -> None:
        """The draft attends by itself; only the target's verify needs a backend."""
        self.draft_attn_backend = None
        self.draft_extend_attn_backend = None
        self.tree_mask_mode = stock.default_tree_mask_mode()

    def _capture_cuda_graphs(self) -> None:
        """The draft runs eagerly, for any batch and context."""
        self.cuda_graph_runner = None
        self.cuda_graph_runner_for_draft_extend = None

    # ---- a round ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def draft(self, batch: Any, *, with_topology: bool = False) -> EagleVerifyInput:
        assert not with_topology, "pipeline parallelism is refused at start"
        steps, slots = self.speculative_num_steps, self.shape.slots
        if batch.forward_mode.is_idle():
            return SpecBlockVerifyInput.create_idle_input(self.topk, steps, slots, self.device)
        if self.adaptation is not None:
            self.adaptation.round_begins()
        rows = batch.req_pool_indices
        waiting = self.waiting
        first = BlockOne(
            waiting.hidden[rows], waiting.tokens[rows], waiting.log_probs[rows], waiting.classes[rows]
        )
        lengths = batch.seq_lens
        planned = (self.shape.blocks - 1) * self.shape.leaves
        tree = self.drafter.tree(
            first,
            roots=batch.spec_info.bonus_tokens.long(),
            positions=lengths.long() - 1,
            continuation=self.blocks.continuing(
                self._slots_of(rows, int(lengths.max()) + planned), lengths.tolist(), planned
            ),
            shape=self.shape,
            blocks=[self._blocks_of(req) for req in batch.reqs],
            others=None if self.grafting is None else self.grafting.nodes(rows),
        )
        self.tree = tree
        return self._verify_input(batch, tree, steps)

    def _blocks_of(self, req: Any) -> int:
        if not self.config.blocks_by_group:
            return self.config.blocks
        return self.config.blocks_of(settings_of(req.sampling_params.custom_params).group)

    def _slots_of(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Pool slots of the requests' first positions, `[batch, length]`."""
        return self.req_to_token_pool.req_to_token[rows, :length]

    def _verify_input(self, batch: Any, tree: VerifyTree, steps: int) -> EagleVerifyInput:
        slots, seq_lens = tree.tokens.shape[1], batch.seq_lens.long()
        owned = self.target_worker.model_runner.attn_backend.verify_mask
        if owned is None:
            mode, buffer, fill = self.tree_mask_mode, None, True
        else:
            mode, fill = owned.mode, owned.is_read
            buffer = owned.buffer if owned.fits(len(seq_lens)) else None
        mode = TreeMaskMode(int(mode))
        if mode == TreeMaskMode.FULL_MASK and buffer is None:
            cells = int(seq_lens.sum()) * slots + len(seq_lens) * slots**2
            buffer = torch.empty(cells, dtype=torch.bool, device=self.device)
        links = tree_links(tree.parents, seq_lens, mode, buffer, fill)
        return SpecBlockVerifyInput(
            draft_token=tree.tokens.flatten(),
            custom_mask=links.tree_mask,
            positions=links.positions,
            retrieve_index=links.retrieve_index,
            retrieve_next_token=links.retrieve_next_token,
            retrieve_next_sibling=links.retrieve_next_sibling,
            retrieve_cum_len=None,
            spec_steps=steps,
            topk=self.topk,
            draft_token_num=slots,
            capture_hidden_mode=None,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    # ---- committing rows -------------------------------------------------------------------------------

    @torch.no_grad()
    def _draft_extend_for_prefill(
        self,
        batch: Any,
        target_hidden_states: torch.Tensor,  # [tokens, captured * hidden]
        next_token_ids: torch.Tensor,  # [batch]
        mm_input_embeds: torch.Tensor | None = None,
        kv_loc_plan: Any = None,
    ) -> EagleDraftInput:
        if batch.forward_mode.is_idle():
            return self._next_input(next_token_ids)
        if self.grafting is not None:
            self.grafting.observe_prompts(batch, next_token_ids)
        lengths, prefixes = list(batch.extend_lens), list(batch.prefix_lens)
        tokens = batch.input_ids.roll(-1)  # [tokens] each row's next token ...
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        tokens[last] = stock._eagle_prefill_tail_tokens(batch, next_token_ids)  # ... of its own request
        committed = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
        embeds = self._commit(batch.req_pool_indices, target_hidden_states, tokens, committed, lengths)
        if self.adaptation is not None:
            ends = [
                prefix + length >= len(req.origin_input_ids) + len(req.output_ids)
                for req, prefix, length in zip(batch.reqs, prefixes, lengths, strict=True)
            ]
            self.adaptation.prefilled(batch.reqs, lengths, ends, target_hidden_states, embeds, tokens)
        return self._next_input(next_token_ids)

    @torch.no_grad()
    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, *, kv_loc_plan: Any = None) -> None:
        self._fill(batch_result.next_draft_input, len(batch.seq_lens))
        if batch.forward_mode.is_idle():
            return
        slots = self.shape.slots
        accepted = batch_result.accept_lens.tolist()  # the path was moved to each request's front
        front = torch.arange(slots, device=self.device) < batch_result.accept_lens.unsqueeze(1)
        taken = front.flatten().nonzero()[:, 0]  # [rows]
        last = batch_result.accept_lens.long().cumsum(0) - 1
        committed = batch_result.next_token_ids[taken].long()
        rows, features = batch.req_pool_indices, batch_result.logits_output.hidden_states[taken]
        if self.adaptation is not None:
            self.adaptation.verified(
                batch.reqs, self.waiting.hidden[rows], self.waiting.tokens[rows],
                batch_result.next_token_ids.view(-1, slots), accepted,
            )  # fmt: skip
        tokens = pairs_after_verify(committed, last, self.config.reference_refresh)
        lengths = [n + count for n, count in zip(batch.seq_lens.tolist(), accepted, strict=True)]
        embeds = self._commit(rows, features, tokens, lengths, accepted)
        if self.adaptation is not None:
            self.adaptation.committed(batch.reqs, accepted, features, embeds, committed)
            self.adaptation.swap_when_due()
            self.adaptation_metrics.report_when_due()

    def _commit(
        self,
        request_rows: torch.Tensor,  # [batch]
        features: torch.Tensor,  # [rows, captured * hidden]
        tokens: torch.Tensor,  # [rows] the token after each row
        lengths: list[int],  # positions of each request, the new rows included
        counts: list[int],
    ) -> torch.Tensor:  # [rows, hidden] the tokens' embeddings
        """Block 1 over new rows, request by request; the last row's proposals wait for the next round."""
        embeds = self.drafter.embed(tokens.long())
        rows = NewRows(self._slots_of(request_rows, max(lengths)), lengths, counts)
        found = self.drafter.read(self.blocks.commit(rows, features.to(embeds.dtype), embeds))
        self.waiting.hidden[request_rows] = found.hidden
        self.waiting.tokens[request_rows] = found.tokens
        self.waiting.log_probs[request_rows] = found.log_probs
        self.waiting.classes[request_rows] = found.classes
        return embeds

    def _next_input(self, bonus_tokens: torch.Tensor) -> EagleDraftInput:
        draft_input = EagleDraftInput(
            bonus_tokens=bonus_tokens, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        self._fill(draft_input, len(bonus_tokens))
        return draft_input

    def _fill(self, draft_input: EagleDraftInput, batch: int) -> None:
        """The scheduler cuts and joins these with the batch; the proposals themselves stay here."""
        draft_input.topk_p = torch.zeros(batch, 1, device=self.device)
        draft_input.topk_index = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        draft_input.hidden_states = None
