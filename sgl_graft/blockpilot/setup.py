"""Builds what a BLOCKPILOT worker needs from its configuration, files and target."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

from ..config import BlockPilotConfig, current_config
from ..graft.calibration import read_calibration
from . import costs as cost_files
from .costs import CostTable, read_costs
from .ewma import AcceptHistory, EwmaPolicy
from .mlp import MlpPolicy
from .policy import BlockSizePolicy, FixedPolicy, read_replay
from .policy_file import FILE_NAME, PolicyDocument, head_fingerprint, misfit, read_policy, usable
from .predictor import Head
from .shape import BlockShape, block_shape
from .state import BlockPilotState
from .tail import TailGraft

logger = logging.getLogger(__name__)

NO_COSTS = (
    "it needs a cost table of this kind of device: measure one with `sgl-graft train blockpilot` and name it "
    "in blockpilot.costs"
)

TAIL_FILE_NAME = "blockpilot_tail.json"


@dataclass
class Pilot:
    """Everything BLOCKPILOT adds to one worker."""

    config: BlockPilotConfig
    state: BlockPilotState
    policy_path: Path | None
    tail: TailGraft | None
    fingerprint: str

    def refresh(self, worker: Any) -> None:
        """After a weight update: fold a released predictor anew, disable one trained for the old head."""
        head = target_head(worker.model_runner.model, worker.model_runner.model_config.vocab_size)
        if head is None:
            return
        fingerprint = fingerprint_of(head)
        if fingerprint == self.fingerprint:
            return
        self.fingerprint = fingerprint
        policy = self.state.policy
        if not isinstance(policy, MlpPolicy) or policy.predictor is None:
            return
        assert self.policy_path is not None
        _, predictor, reads_logits = read_policy(self.policy_path)
        if predictor is not None and reads_logits:
            policy.predictor = usable(predictor, True, head, _all_reduce())
            logger.info("BLOCKPILOT: the policy was folded onto the updated LM head.")
        else:
            policy.disable("the target's LM head was updated, and the policy was trained for the former one")


def beside(given: Path | None, draft: str, name: str) -> Path | None:
    """The file the configuration names, else the packaged one beside the draft, else none."""
    if given is not None:
        return given
    packaged = Path(draft) / name
    return packaged if packaged.is_file() else None


def create_pilot(worker: Any) -> Pilot:
    """Size and fill the state; the table's memory is taken before graphs are captured.

    Raises:
        ValueError: a file that was named cannot be used, or sizes do not fit together.
    """
    config = current_config().blockpilot
    draft = str(worker.draft_model_runner.model_config.model_path)
    hf_config = worker.draft_model_runner.model_config.hf_config
    trained = parse_dflash_draft_config(draft_hf_config=hf_config).resolve_block_size(default=None)
    shape = block_shape(config, trained, worker.block_size)
    model_config = worker.model_runner.model_config
    num_rows = worker.model_runner.req_to_token_pool.req_to_token.shape[0]
    device = worker.device
    history = AcceptHistory(num_rows, shape.b_max, config.memory, device)
    costs_path = beside(config.costs, draft, cost_files.FILE_NAME)
    costs = usable_costs(config, costs_path, device)
    head = target_head(worker.model_runner.model, model_config.vocab_size)
    fingerprint = fingerprint_of(head) if head else ""
    path = policy_path(config, draft)
    policy = make_policy(config, shape, path, history, costs, head, fingerprint, device)
    if isinstance(policy, EwmaPolicy):
        shape = dataclasses.replace(shape, candidates=policy.widths)
    state = BlockPilotState(shape, policy, num_rows, history, costs, config.verify_len, device)
    tail = None
    if config.tail_graft:
        maps = tail_maps(config, draft, model_config.vocab_size, device)
        tail = TailGraft(
            _scoped(config, worker.server_args), maps, shape.b_max, num_rows, model_config.vocab_size, device
        )
    logger.info(
        "BLOCKPILOT: policy=%s default=%d candidates=%s b_max=%d widths=%s costs=%s tail=%s",
        policy.name,
        policy.default,
        list(shape.candidates),
        shape.b_max,
        list(shape.widths),
        costs_path,
        tail is not None,
    )
    return Pilot(config, state, path, tail, fingerprint)


def usable_costs(config: BlockPilotConfig, path: Path | None, device: torch.device | str) -> CostTable | None:
    """The cost table, where there is one of this kind of device.

    Raises:
        ValueError: the file is missing or damaged, or one that was named is of another kind of device.
    """
    costs = read_costs(path) if path else None
    kind = torch.device(device).type
    if costs is None or costs.device in ("", kind):
        return costs
    misfit = f"cost table {path} is of {costs.device}, this server runs on {kind}"
    if config.costs is not None:
        raise ValueError(
            f"{misfit}: measure one here with `sgl-graft train blockpilot`, or leave blockpilot.costs out"
        )
    logger.warning("BLOCKPILOT: %s; it is not used", misfit)
    return None


def policy_path(config: BlockPilotConfig, draft: str) -> Path | None:
    """The policy's file, where the policy has one."""
    if config.policy in ("fixed", "ewma"):
        return None
    return config.policy_file if config.policy == "replay" else beside(config.policy_file, draft, FILE_NAME)


def make_policy(
    config: BlockPilotConfig,
    shape: BlockShape,
    path: Path | None,
    history: AcceptHistory,
    costs: CostTable | None,
    head: Head | None,
    fingerprint: str,
    device: torch.device | str,
) -> BlockSizePolicy:
    """The policy that the configuration asks for.

    Raises:
        ValueError: it needs a file that is missing or damaged, or cannot run on this target.
    """
    if config.policy == "ewma":
        return _ewma(config, shape, history, costs, device)
    if config.policy == "replay":
        assert path is not None
        return read_replay(path, shape.default, device)
    if config.policy == "mlp" and path is None:
        raise ValueError(
            "blockpilot.policy mlp needs a predictor: name it in blockpilot.policy_file, or train one with "
            "`sgl-graft train blockpilot`"
        )
    if path is None or config.policy == "fixed":
        return FixedPolicy(shape.default, device)
    document, predictor, reads_logits = read_policy(path)
    if document.policy != "mlp":
        if config.policy == "mlp":
            raise ValueError(
                f"policy file {path} recommends {document.policy} and holds no predictor; use "
                f"blockpilot.policy {document.policy}"
            )
        if document.policy == "ewma":
            if costs is None:
                logger.warning("BLOCKPILOT: block size %d for all: %s", shape.default, NO_COSTS)
                return FixedPolicy(shape.default, device)
            if not misfit(document, head.vocab_size if head else -1, fingerprint, shape.b_max):
                shape = dataclasses.replace(shape, candidates=document.candidates)
            return _ewma(config, shape, history, costs, device)
        return _fixed(config, document, shape, fingerprint, head, device)
    assert predictor is not None
    if head is None:
        return MlpPolicy(document, None, "the target's LM head is not a plain matrix", device)
    why_not = misfit(document, head.vocab_size, fingerprint, shape.b_max)
    folded = None if why_not else usable(predictor, reads_logits, head, _all_reduce())
    policy = MlpPolicy(document, folded, why_not or "", device)
    if why_not or config.default is not None:
        policy.default = shape.default
    return policy


def _ewma(
    config: BlockPilotConfig,
    shape: BlockShape,
    history: AcceptHistory,
    costs: CostTable | None,
    device: torch.device | str,
) -> EwmaPolicy:
    if costs is None:
        raise ValueError(f"blockpilot.policy ewma: {NO_COSTS}")
    return EwmaPolicy(history, shape.candidates, shape.default, costs, config.probe_every, device)


def _fixed(
    config: BlockPilotConfig,
    document: PolicyDocument,
    shape: BlockShape,
    fingerprint: str,
    head: Head | None,
    device: torch.device | str,
) -> FixedPolicy:
    why_not = misfit(document, head.vocab_size if head else -1, fingerprint, shape.b_max)
    if why_not:
        logger.warning("BLOCKPILOT: block size %d, not the policy file's: %s", shape.default, why_not)
        return FixedPolicy(shape.default, device)
    return FixedPolicy(document.default if config.default is None else shape.default, device)


def tail_maps(config: BlockPilotConfig, draft: str, vocab_size: int, device: torch.device | str) -> Any:
    """Acceptance maps of ``tail_graft``; as they are where nothing was fitted."""
    from ..cuda_graph.value_rule import ValueMaps

    path = beside(config.tail_calibration, draft, TAIL_FILE_NAME)
    if path is None:
        logger.warning(
            "BLOCKPILOT: tail_graft runs uncalibrated: no %s beside the draft; "
            "`sgl-graft train blockpilot-tail` makes one",
            TAIL_FILE_NAME,
        )
        return ValueMaps.identity(1, device)
    return read_calibration(path, vocab_size).value_maps(device)


def _scoped(config: BlockPilotConfig, args: Any) -> BlockPilotConfig:
    """Nobody shares a table where API keys tell users apart, unless the configuration says so."""
    if config.table.scope is not None:
        return config
    scope = "request" if args.api_key or args.admin_api_key else "shared"
    return config.model_copy(update={"table": config.table.model_copy(update={"scope": scope})})


# ---- the target's head -----------------------------------------------------------------------------------


def target_head(model: torch.nn.Module, vocab_size: int) -> Head | None:
    """This rank's shard of the target's LM head; None when it is no plain matrix (quantized, or absent)."""
    lm_head = getattr(model, "lm_head", None)
    weight = getattr(lm_head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.dim() != 2:
        return None
    processor = next((m for m in model.modules() if isinstance(m, LogitsProcessor)), None)
    shard = getattr(lm_head, "shard_indices", None)
    rows = weight.shape[0] if shard is None else shard.num_org_elements
    scale = getattr(processor, "logit_scale", None)
    bias = getattr(lm_head, "bias", None)
    return Head(
        weight=weight[:rows],
        vocab_size=vocab_size,
        bias=None if bias is None else bias[:rows],
        scale=1.0 if scale is None else float(scale),
        soft_cap=getattr(processor, "final_logit_softcapping", None),
        first_row=0 if shard is None else shard.org_vocab_start_index,
    )


def _all_reduce() -> Callable[[torch.Tensor], torch.Tensor]:
    group = get_parallel().tp_group
    return group.all_reduce if group.world_size > 1 else (lambda x: x)


@torch.no_grad()
def fingerprint_of(head: Head) -> str:
    """The same on every rank: rows that another rank holds are summed in."""
    rows = torch.linspace(0, head.vocab_size - 1, min(64, head.vocab_size)).long() - head.first_row
    mine = (rows >= 0) & (rows < head.weight.shape[0])
    sample = torch.zeros((rows.numel(), head.weight.shape[1]), device=head.weight.device)
    sample[mine] = head.weight[rows[mine].to(head.weight.device)].float()
    return head_fingerprint(_all_reduce()(sample), sample.shape[0])
