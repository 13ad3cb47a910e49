"""What SPECBLOCK refuses at start, the arguments it settles, and its place in SGLang's registry."""

from __future__ import annotations

import json
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_graft.config import CONFIG_VARIABLE, parse_config
from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock import checkpoint
from sgl_graft.specblock.model import SpecBlockDraft
from sgl_graft.specblock.startup import CANNOT_COMBINE, check_specblock, rule_of, settle


@pytest.fixture
def folder(draft: SpecBlockDraft, vocab: DraftVocab, tmp_path: Path) -> Path:
    checkpoint.export(draft, vocab, tmp_path)
    return tmp_path


def arguments(draft: Path | None, **changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = dict.fromkeys(CANNOT_COMBINE)
    fields |= {
        "model_path": "on/a-hub",
        "speculative_draft_model_path": None if draft is None else str(draft),
        "speculative_num_draft_tokens": None,
        "max_running_requests": None,
        "trust_remote_code": False,
        "kv_cache_dtype": "auto",
        "pp_size": 1,
        "disaggregation_mode": "null",
        "grammar_backend": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def configure(monkeypatch: pytest.MonkeyPatch, **section: Any) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"specblock": section}))


@pytest.mark.parametrize("field", sorted(CANNOT_COMBINE))
def test_flags_the_engine_would_drop_are_refused(folder: Path, field: str) -> None:
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')}: .*Leave the flag out"):
        check_specblock(arguments(folder, **{field: 4}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp_size": 2}, "--pp-size 2: use 1"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"speculative_draft_model_path": None}, "sgl-graft train specblock"),
    ],
)
def test_other_refusals(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_specblock(arguments(folder, **changes))


def test_a_draft_of_another_kind_or_depth_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_specblock(arguments(folder))
    configure(monkeypatch, blocks=8)
    check_specblock(arguments(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "diffspec_draft_token_num": 5}))
    with pytest.raises(ValueError, match="trees of 40 levels, more than 32"):
        check_specblock(arguments(folder))
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="not a SpecBlock draft"):
        check_specblock(arguments(folder))


def test_a_state_folder_must_be_writable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    state = {"state_dir": str(folder / "file" / "state")}
    configure(monkeypatch, adaptation=state)
    check_specblock(arguments(folder))  # off: nothing is written
    configure(monkeypatch, adaptation=state | {"enabled": True})
    with pytest.raises(ValueError, match=r"state_dir .*/file/state cannot be written"):
        check_specblock(arguments(folder))
    configure(monkeypatch, adaptation={"enabled": True, "state_dir": str(folder / "new" / "state")})
    check_specblock(arguments(folder))
    assert list((folder / "new" / "state").iterdir()) == []


def test_a_draft_without_fitted_branching_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, branching="fitted")
    with pytest.raises(ValueError, match="fitted needs fitted_children"):
        check_specblock(arguments(folder))
    (folder / "training_card.json").write_text('{"fitted_children": [2, 4, 4, 2]}')
    check_specblock(arguments(folder))


@pytest.mark.parametrize(("blocks", "slots", "steps"), [(2, 16, 8), (4, 16, 15), (1, 16, 4), (2, 4, 3)])
def test_engine_arguments(
    folder: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, slots: int, steps: int
) -> None:
    """Paths are as long as the blocks allow, and never longer than the tree has slots."""
    configure(monkeypatch, blocks=blocks)
    args = arguments(folder, speculative_num_draft_tokens=slots)
    settle(args)
    assert args.speculative_num_steps == steps and args.speculative_eagle_topk == 2
    assert args.speculative_num_draft_tokens == slots and args.max_running_requests == 48


def test_a_grafted_tree_is_deep_enough_for_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, blocks=1, graft=True)
    args = arguments(folder)
    settle(args)
    assert args.speculative_num_steps == 9
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"specblock": {"graft": True}, "graft": {"depth": 12}}))
    settle(args)
    assert args.speculative_num_steps == 12


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"depth": 5}, "graft.depth is 5; it must be between the draft's 8 steps"),
        ({"depth": 20}, "graft.depth is 20; .* the 15 nodes"),
        ({"table": {"row_width": 1}}, "graft.table.row_width 1"),
    ],
)
def test_a_table_that_does_not_fit_the_tree_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"specblock": {"graft": True}, "graft": section}))
    with pytest.raises(ValueError, match=message):
        settle(arguments(folder))
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"graft": section}))
    settle(arguments(folder))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"collect": "counters.json"}, "graft.collect counters.json: .* Leave it out"),
        ({"rule": "staged"}, "graft.rule staged"),
        ({"base": "EAGLE"}, "graft.base EAGLE"),
        ({"calibration": "maps.json"}, "graft.calibration maps.json"),
        ({"thresholds": [0.5]}, r"graft.thresholds \(0.5,\)"),
        ({"verify": "target_only"}, "graft.verify target_only"),
        ({"check_ranks": 3}, "graft.check_ranks 3"),
        ({"load_cap": {"above": 4}}, "graft.load_cap .*has no load cap"),
        ({"table": {"path": "table"}}, "graft.table.path table"),
        ({"table": {"save_path": "table"}}, "graft.table.save_path table"),
        ({"table": {"save_every_s": 3}}, "graft.table.save_every_s 3"),
        ({"table": {"retain_days": 2}}, "graft.table.retain_days 2"),
    ],
)
def test_settings_that_grafting_would_ignore_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"specblock": {"graft": True}, "graft": section}))
    with pytest.raises(ValueError, match=message):
        check_specblock(arguments(folder))
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps({"graft": section}))
    check_specblock(arguments(folder))


def test_settings_that_grafting_honours_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "row_width": 6,
        "context_rows": 1024,
        "context_len": 2,
        "scope": "request",
        "seed_prompts": False,
    }
    section = {"specblock": {"graft": True}, "graft": {"depth": 10, "table": table}}
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps(section))
    check_specblock(arguments(folder))


def test_defaults_and_bounds(folder: Path) -> None:
    args = arguments(folder, max_running_requests=3)
    settle(args)
    assert args.speculative_num_draft_tokens == 16 and args.max_running_requests == 3
    with pytest.raises(ValueError, match="leaves no room"):
        settle(arguments(folder, speculative_num_draft_tokens=1))


def test_branching_comes_from_the_configuration(tmp_path: Path) -> None:
    named = parse_config({"specblock": {"branching": "paper", "beam": 3}}, "here").specblock
    assert rule_of(named, tmp_path).children == (1, 4, 10, 10) and rule_of(named, tmp_path).beam == 3
    fitted = parse_config({"specblock": {"children": [2, 3, 5, 0]}}, "here").specblock
    assert rule_of(fitted, tmp_path).children == (2, 3, 5, 0)
    own = parse_config({"specblock": {"branching": "fitted"}}, "here").specblock
    with pytest.raises(ValueError, match=r"fitted needs fitted_children in .*training_card.json"):
        rule_of(own, tmp_path)
    (tmp_path / "training_card.json").write_text('{"fitted_children": [1, 3, 7, 2]}')
    assert rule_of(own, tmp_path).children == (1, 3, 7, 2)
    grouped = parse_config(
        {"specblock": {"blocks": 2, "blocks_by_group": {"a": 1, "b": 4}}}, "here"
    ).specblock
    assert [grouped.blocks_of(group) for group in (None, "a", "b", "c")] == [2, 1, 2, 2]
    for wrong in (
        {"branching": "wide"},
        {"children": [1, 2, 3]},
        {"children": [1, 2, 3, 65]},
        {"blocks": 0},
        {"blocks_by_group": {"a": 0}},
        {"adaptation": {"every": 49}},  # a broken update must go within 50 rounds
        {"adaptation": {"arms": []}},
        {"adaptation": {"enabled": True}, "reference_refresh": True},
    ):
        with pytest.raises(ValueError, match="specblock"):
            parse_config({"specblock": wrong}, "here")


def test_the_registry_accepts_the_algorithm() -> None:
    """SGLang's own check of the interface runs when the name is registered."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sgl_graft.specblock.algorithm import register

    register()
    register()
    ours = SpeculativeAlgorithm.from_string("SPECBLOCK")
    theirs = SpeculativeAlgorithm.EAGLE3
    assert ours.is_eagle() and ours.is_eagle3() and not ours.is_dflash() and ours.supports_overlap
    methods = [n for n, value in vars(SpeculativeAlgorithm).items() if isfunction(value) and n[0] != "_"]
    assert len(methods) > 20
    assert [name for name in methods if not hasattr(ours, name)] == ["get_platform_worker_cls"]
    for name in ("is_standalone", "is_ngram", "has_draft_kv", "supports_ragged_verify"):
        assert getattr(ours, name)() == getattr(theirs, name)()
