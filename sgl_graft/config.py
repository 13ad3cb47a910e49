"""One frozen, typed configuration for everything; unknown keys are rejected with the allowed ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIG_VARIABLE = "SGLGRAFT_CONFIG"


class Section(BaseModel):
    """Base of every section: immutable, strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TableConfig(Section):
    """The successor table.

    Attributes:
        row_width: successors kept per row (k).
        context_rows: rows keyed by the last few tokens; 0 switches them off.
        context_len: how many tokens key such a row.
        scope: who shares a table: all requests (``shared``), those with the same label in
            ``custom_params.graft.group`` or the samples of one prompt (``group``), or nobody (``request``).
            None: nobody when API keys are set, else all.
        groups: tables of scope ``group``; the group that waited longest gives its table up to a new one.
        seed_prompts: learn the prompt's own next tokens at prefill.
        path: file to load at start; refused when it belongs to another tokenizer or target.
        save_path: file the server saves its table to, and loads at start when it is there. It holds traces
            of users' text: mode 0600, deleted by ``sgl-graft forget``.
        save_every_s: seconds between two saves.
        folder: where ``POST /graft/table/save`` and ``/load`` keep tables by name. None: the folder of
            ``save_path``; neither: these routes refuse.
        retain_days: age at which the table is emptied, and the file at ``save_path`` deleted, so that no
            trace of what users wrote grows older; a file named by ``path`` stays as it is. None: never.
    """

    row_width: int = Field(default=8, ge=1, le=16)
    context_rows: int = Field(default=65536, ge=0, le=2**24)
    context_len: Literal[2, 3] = 3
    scope: Literal["shared", "group", "request"] | None = None
    groups: int = Field(default=32, ge=1, le=4096)
    seed_prompts: bool = True
    path: Path | None = None
    save_path: Path | None = None
    save_every_s: float = Field(default=300.0, gt=0)
    folder: Path | None = None
    retain_days: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _files_need_a_shared_table(self) -> TableConfig:
        if self.scope in ("group", "request") and (self.path or self.save_path or self.folder):
            raise ValueError(
                f"a private table (scope {self.scope}) is never stored; leave path, save_path and folder "
                "out, or set scope to shared"
            )
        return self


class LoadCapConfig(Section):
    """The load cap: in large batches, where speculation loses, rounds are plain.

    Without any of these keys the cap follows ``load_costs.json`` beside the draft, where there is one that
    fits the tree and the kind of device.

    Attributes:
        off: no cap, whatever lies beside the draft.
        above: batches larger than this are never speculated; 0 switches speculation off.
        costs: file of `sgl-graft calibrate-load`. None: the one beside the draft.
        margin: share of speed below which a difference between whole trees and plain rounds counts as none.
        hold: rounds that either of them runs at least.
        retry: plain rounds after which the accept length seen before them is doubted.
        measure: file to write costs to; rounds are whole and plain in turn, for `sgl-graft calibrate-load`.
    """

    off: bool = False
    above: int | None = Field(default=None, ge=0)
    costs: Path | None = None
    margin: float = Field(default=0.05, ge=0, lt=1)
    hold: int = Field(default=8, ge=1)
    retry: int = Field(default=1024, ge=16)
    measure: Path | None = None

    @model_validator(mode="after")
    def _one_wish(self) -> LoadCapConfig:
        if self.off and (self.above is not None or self.costs or self.measure):
            raise ValueError("off leaves nothing to above, costs and measure; leave them out")
        if self.measure is not None and (self.above is not None or self.costs):
            raise ValueError("measure runs both kinds of rounds in turn; leave above and costs out")
        return self


class GraftConfig(Section):
    """GRAFT: pruning, retrieval and grafting inside the EAGLE worker.

    Attributes:
        rule: how slots are chosen, ``value`` (ours) or ``staged`` (the paper's).
        base: the engine algorithm that GRAFT patches.
        depth: levels below the root a tree may have; at least the draft's steps. None: the
            paper's 9, or what fits into the slots.
        calibration: file written by ``sgl-graft calibrate``; None takes the packaged one for the draft.
        thresholds: one gate threshold per checkpoint of the ``staged`` rule, over the calibrated ones.
        collect: file to write calibration counters to while serving; slower, for ``sgl-graft calibrate``.
        verify: how a GPU verifies at T > 0: ``coupled`` draws every node's token by (seed, position), so that
            output does not depend on the tree; ``target_only`` is SGLang's own rule. A CPU is always coupled.
        check_ranks: debug: every so many rounds, compare the trees and tables of a tensor-parallel server's
            ranks, and stop the server when they differ; 0 is off.
        load_cap: in which batches to speculate.
    """

    rule: Literal["value", "staged"] = "value"
    base: Literal["EAGLE3", "EAGLE"] = "EAGLE3"
    depth: int | None = Field(default=None, ge=1, le=32)
    calibration: Path | None = None
    collect: Path | None = None
    thresholds: tuple[float, ...] | None = None
    verify: Literal["coupled", "target_only"] = "coupled"
    check_ranks: int = Field(default=0, ge=0)
    load_cap: LoadCapConfig = LoadCapConfig()
    table: TableConfig = TableConfig()

    @model_validator(mode="after")
    def _thresholds_are_probabilities(self) -> GraftConfig:
        for value in self.thresholds or ():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"thresholds must be probabilities in [0, 1], got {value}")
        return self


class BlockPilotConfig(Section):
    """BLOCKPILOT: a block size per request inside the DFLASH worker.

    Sizes count a block's rows, the last committed token among them. The largest one is the server's
    ``--speculative-num-draft-tokens``.

    Attributes:
        policy: who chooses. None: what the policy file says, else ``fixed``.
        default: size of a request nobody chose for. None: the size the draft was trained at.
        candidates: sizes a policy chooses from. None: the default and two to either side.
        policy_file: a document that ``sgl-graft train blockpilot`` wrote, or a released ``model.pt``; for
            ``replay`` a recording. None: the document beside the draft, where there is one.
        costs: seconds by batch and width. None: the table beside the draft, where there is one.
        widths: rows per request a round may have, so that short blocks are cheap; the largest size is
            always one. None: every size. On a server with CUDA graphs there is the largest size only.
        verify_len: rows of a block that are verified, drafted at full size. None: all.
        memory: rounds after which ``ewma`` has mostly forgotten an observation.
        probe_every: rounds without speculation after which ``ewma`` tries again.
        tail_graft: replace the low-confidence tail of a block by a chain from the successor table.
        tail_calibration: file of acceptance maps for ``tail_graft``. None: the one beside the draft.
        collect: file to write the counters for ``tail_calibration`` to while serving.
        table: the successor table of ``tail_graft``.
    """

    policy: Literal["fixed", "mlp", "ewma", "replay"] | None = None
    default: int | None = Field(default=None, ge=1, le=256)
    candidates: tuple[int, ...] | None = None
    policy_file: Path | None = None
    costs: Path | None = None
    widths: tuple[int, ...] | None = None
    verify_len: int | None = Field(default=None, ge=1, le=256)
    memory: float = Field(default=12.0, gt=0)
    probe_every: int = Field(default=32, ge=1)
    tail_graft: bool = False
    tail_calibration: Path | None = None
    collect: Path | None = None
    table: TableConfig = TableConfig()

    @model_validator(mode="after")
    def _sizes_are_consistent(self) -> BlockPilotConfig:
        for name in ("candidates", "widths"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes))):
                raise ValueError(f"{name} must be rising sizes of at least 1, got {list(sizes)}")
        if self.candidates and self.default is not None and self.default not in self.candidates:
            raise ValueError(f"candidates {list(self.candidates)} lack the default {self.default}")
        if self.policy == "replay" and self.policy_file is None:
            raise ValueError("policy replay needs a recording: name it in policy_file")
        if self.collect is not None and not self.tail_graft:
            raise ValueError("collect counts candidates of tail_graft; switch tail_graft on")
        stored = self.table.path or self.table.save_path or self.table.folder or self.table.retain_days
        if self.table.scope == "group" or stored:
            raise ValueError("the table of tail_graft has scope shared or request, and is never stored")
        return self


BRANCHINGS: dict[str, tuple[int, int, int, int]] = {
    "code": (2, 4, 6, 4),
    "give_up": (2, 4, 10, 0),
    "paper": (1, 4, 10, 10),
}


class AdaptationConfig(Section):
    """Learning from verifies while serving. It changes the draft, so speed; never what is answered.

    Attributes:
        enabled: switches it on.
        min_tokens: committed tokens of a domain (``custom_params.graft.group``, else all requests) before
            anything is learned for it.
        update_rows: rows of answers that one update learns from.
        buffer_rows: rows kept in memory, of all domains together; the oldest go first.
        share: share of one core's time that the learner's process uses at most.
        nice: by how much its priority is below the server's. Where all cores are busy, a round is delayed by
            at most a tenth (10) or a sixtieth (19) while the learner computes.
        every: rounds between two decisions.
        explore: tokens that may be given up for updates that do not look worth it, as a share of all.
        contention: share of a second of learning that serving loses; 1 where all cores are busy.
        learning_rate: of full updates; head-only ones take the same.
        arms: kinds of update to choose from besides none, ``head`` and ``full``.
        always: for comparison: update whenever an arm's wait is over, whatever it costs.
        state_dir: folder that keeps adapted weights over a restart. None: they are lost.
        domains: labels told apart; requests of further ones share a domain.
    """

    enabled: bool = False
    min_tokens: int = Field(default=8000, ge=0)
    update_rows: int = Field(default=1024, ge=32)
    buffer_rows: int = Field(default=16384, ge=64)
    share: float = Field(default=0.25, gt=0, le=1)
    nice: int = Field(default=10, ge=0, le=19)
    every: int = Field(default=16, ge=1, le=48)
    explore: float = Field(default=0.01, ge=0, le=1)
    contention: float = Field(default=1.0, ge=0, le=1)
    learning_rate: float = Field(default=2e-4, gt=0)
    arms: tuple[Literal["head", "full"], ...] = Field(default=("head", "full"), min_length=1)
    always: bool = False
    state_dir: Path | None = None
    domains: int = Field(default=16, ge=1, le=256)


class SpecBlockConfig(Section):
    """SPECBLOCK: drafting in blocks, branching by rank.

    Attributes:
        blocks: chained blocks of a round (the paper's M).
        leaves: best nodes of a block that the next one continues.
        branching: proposals of a slot that become nodes, by the rank class its head guesses (1, 2-4, 5-10,
            above 10): ``code``, the published server's; ``give_up``, the published library's, which stops
            branching above 10; ``paper``, more the less sure the head is, as the paper is reported;
            ``fitted``, what the draft's own ``training_card.json`` found on held-out answers.
        children: the same as four numbers (for instance fitted ones), in place of ``branching``.
        beam: proposals of the first slot of block 1, whatever its class.
        spare_sure: fewer proposals where the likeliest is nearly certain.
        blocks_by_group: at most this many blocks for requests of a group (``custom_params.graft.group``),
            such as a domain whose text is hard to draft; never more than ``blocks``.
        graft: let nodes of GRAFT's successor table (section ``graft.table``) compete for the slots.
        reference_refresh: pair newly committed rows with tokens as the published code does, one too far. It
            drafts worse; released checkpoints were measured with it.
        adaptation: learning while serving.
    """

    blocks: int = Field(default=2, ge=1, le=8)
    leaves: int = Field(default=8, ge=1, le=64)
    branching: Literal["code", "give_up", "paper", "fitted"] = "code"
    children: tuple[int, int, int, int] | None = None
    beam: int = Field(default=10, ge=1, le=64)
    spare_sure: bool = False
    blocks_by_group: dict[str, Annotated[int, Field(ge=1, le=8)]] = Field(default_factory=dict)
    graft: bool = False
    reference_refresh: bool = False
    adaptation: AdaptationConfig = AdaptationConfig()

    def blocks_of(self, group: str | None) -> int:
        """Blocks of a request of ``group``."""
        return min(self.blocks, self.blocks_by_group.get(group or "", self.blocks))

    @property
    def children_by_class(self) -> tuple[int, int, int, int]:
        """Raises KeyError for ``fitted``, which only the draft knows; see ``specblock.startup.rule_of``."""
        return self.children or BRANCHINGS[self.branching]

    @model_validator(mode="after")
    def _children_are_counts(self) -> SpecBlockConfig:
        for count in self.children or ():
            if not 0 <= count <= 64:
                raise ValueError(f"children must be counts from 0 to 64, got {count}")
        return self

    @model_validator(mode="after")
    def _learns_what_it_drafts_from(self) -> SpecBlockConfig:
        if self.adaptation.enabled and self.reference_refresh:
            raise ValueError("adaptation learns from rows paired as in training; leave reference_refresh out")
        return self


class Config(Section):
    """The whole configuration file."""

    graft: GraftConfig = GraftConfig()
    blockpilot: BlockPilotConfig = BlockPilotConfig()
    specblock: SpecBlockConfig = SpecBlockConfig()


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            section: Any = model
            for part in item["loc"][:-1]:
                section = section.model_fields[str(part)].annotation
            allowed = ", ".join(sorted(section.model_fields))
            lines.append(f"unknown key {where!r}; allowed here: {allowed}")
        else:
            lines.append(f"{where}: {item['msg']} (got {item['input']!r})")
    return "; ".join(lines)


def parse_config(data: Any, origin: str) -> Config:
    """Validate a mapping.

    Raises:
        ValueError: the value and the allowed keys, with where it came from.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ValueError(f"{origin}: expected a mapping of sections, got {type(data).__name__}")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{origin}: {_explain(error, Config)}") from error


def load_config_text(text: str) -> Config:
    """Read inline JSON, or a YAML or JSON file.

    Raises:
        ValueError: the file is missing or unreadable, or its content is not a valid configuration.
    """
    if text.lstrip().startswith("{"):
        origin, body = "--graft-config", text
    else:
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"--graft-config {text}: no such file; give a YAML or JSON file, or inline JSON")
        origin, body = f"--graft-config {text}", path.read_text()
    try:
        data = yaml.safe_load(body)
    except yaml.YAMLError as error:
        raise ValueError(f"{origin}: not valid YAML or JSON: {error}") from error
    return parse_config(data, origin)


def current_config() -> Config:
    """The configuration this server was started with (children inherit it through the environment)."""
    text = os.environ.get(CONFIG_VARIABLE)
    return parse_config(json.loads(text), CONFIG_VARIABLE) if text else Config()
