"""What GRAFT refuses before a model is loaded."""

import json
from types import SimpleNamespace

import pytest
from sgl_graft.cuda_graph.successor_table import SuccessorTable

from sgl_graft.config import Config, GraftConfig, load_config_text
from sgl_graft.graft import startup
from sgl_graft.graft.calibration import Calibration, write_calibration
from sgl_graft.graft.startup import check_graft, with_scope
from sgl_graft.graft.store import TableIdentity, save_table


def arguments(**changed):
    values = {
        "speculative_num_draft_tokens": 16,
        "speculative_eagle_topk": 4,
        "speculative_num_steps": 5,
        "enable_multi_layer_eagle": False,
        "speculative_adaptive": False,
        "model_path": "someone/somewhere",
        "trust_remote_code": False,
        "tp_size": 1,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "api_key": None,
        "admin_api_key": None,
        "grammar_backend": None,
        "disaggregation_mode": "null",
        "device": "cpu",
        "enable_dp_attention": False,
        "enable_lora": False,
    }
    return SimpleNamespace(**values | changed)


@pytest.fixture
def configured(monkeypatch):
    def use(text):
        monkeypatch.setattr(startup, "current_config", lambda: load_config_text(text))

    use("{}")
    return use


def test_the_default_passes(configured):
    check_graft(arguments())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}, "topk of at least 2, got 1"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_num_draft_tokens": 0}, "slots"),
        ({"speculative_num_steps": 0}, "at least 1 step"),
        (
            {"speculative_num_steps": 40, "speculative_num_draft_tokens": 60},
            r"--speculative-num-steps \(40\)",
        ),
    ],
)
def test_arguments_that_cannot_work_are_named(configured, changed, named):
    with pytest.raises(ValueError, match=named):
        check_graft(arguments(**changed))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('{"graft": {"depth": 4}}', "graft.depth is 4"),
        ('{"graft": {"depth": 16}}', "graft.depth is 16"),
        ('{"graft": {"rule": "staged", "thresholds": [0.1, 0.2, 0.3, 0.4]}}', "has 4 values; the 3 gates"),
        ('{"graft": {"rule": "staged", "thresholds": [0.1]}}', "has 1 values; the 3 gates"),
        ('{"graft": {"table": {"context_rows": 1000}}}', "power of two"),
    ],
)
def test_configurations_that_cannot_work_are_named(configured, config, named):
    configured(config)
    with pytest.raises(ValueError, match=named):
        check_graft(arguments())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('{"graft": {"table": {"row_width": 17}}}', "row_width"),
        ('{"graft": {"thresholds": [1.5]}}', "probabilities"),
        ('{"graft": {"table": {"scope": "request", "save_path": "x"}}}', "never stored"),
        ('{"graft": {"tables": {}}}', "allowed here: .*table"),
    ],
)
def test_configurations_out_of_range_are_refused_where_they_are_read(config, named):
    with pytest.raises(ValueError, match=named):
        load_config_text(config)


def test_the_papers_template_needs_its_row_width(configured):
    configured('{"graft": {"depth": 9, "table": {"row_width": 4}}}')
    with pytest.raises(ValueError, match="row_width 4"):
        check_graft(arguments(speculative_num_draft_tokens=60, speculative_num_steps=8))


def test_named_files_are_checked_at_start(configured, monkeypatch, tmp_path):
    hub = pytest.importorskip("sglang.srt.utils.hf_transformers_utils")
    monkeypatch.setattr(hub, "get_config", lambda *_, **__: None)
    monkeypatch.setattr(hub, "get_hf_text_config", lambda _: SimpleNamespace(vocab_size=10))
    missing = tmp_path / "none"
    broken = tmp_path / "broken"
    broken.write_text('{"target": 1')
    foreign_table, foreign_calibration = tmp_path / "table", tmp_path / "calibration"
    other = SuccessorTable.create(10, k=8, context_rows=65536, context_len=3)
    save_table(other, foreign_table, TableIdentity("another target", "another tokenizer"))
    write_calibration(foreign_calibration, Calibration(target="another", vocab_size=11))
    for path, setting, named in (
        (missing, "calibration", "sgl-graft calibrate"),
        (broken, "calibration", "sgl-graft calibrate"),
        (foreign_calibration, "calibration", "vocabulary of 11, the target has 10"),
        (missing, "table.path", "leave graft.table.path out"),
        (broken, "table.path", "cannot be read.* leave graft.table.path out"),
        (foreign_table, "table.path", "has target 'another target'.* leave graft.table.path out"),
    ):
        section = {"calibration": str(path)} if setting == "calibration" else {"table": {"path": str(path)}}
        configured(json.dumps({"graft": section}))
        with pytest.raises(ValueError, match=rf"(?s){path}.*{named}"):
            check_graft(arguments(model_path=str(tmp_path)))
    assert Config().graft.calibration is None


@pytest.mark.parametrize("scope", ["group", "request"])
def test_a_private_table_is_not_stored(scope):
    with pytest.raises(ValueError, match=f"scope {scope}.* is never stored"):
        load_config_text(f'{{"graft": {{"table": {{"scope": "{scope}", "path": "x"}}}}}}')


def test_api_keys_make_tables_private(configured):
    keys = arguments(api_key="k")
    assert with_scope(GraftConfig(), keys).table.scope == "request"
    assert with_scope(GraftConfig(), arguments()).table.scope == "shared"
    configured('{"graft": {"table": {"save_path": "x"}}}')
    check_graft(arguments())
    with pytest.raises(ValueError, match=r"with API keys .* set graft.table.scope to shared"):
        check_graft(keys)
    configured('{"graft": {"table": {"save_path": "x", "scope": "shared"}}}')
    check_graft(keys)


def test_lossy_thresholds_belong_to_the_engines_own_verify(configured):
    lossy = arguments(speculative_accept_threshold_acc=0.9)
    with pytest.raises(
        ValueError, match=r"--speculative-accept-threshold-acc 0.9 .* graft.verify to target_only"
    ):
        check_graft(lossy)
    configured('{"graft": {"verify": "target_only"}}')
    check_graft(lossy)


def test_ranks_do_not_empty_their_tables_by_the_clock(configured):
    configured('{"graft": {"table": {"save_path": "x", "retain_days": 7}}}')
    check_graft(arguments())
    with pytest.raises(ValueError, match=r"retain_days 7.0 needs --tp 1.*sgl-graft forget"):
        check_graft(arguments(tp_size=2))


@pytest.mark.parametrize(("device", "tree"), [("cpu", (2, 4, 8)), ("cuda", (5, 4, 16))])
def test_what_is_left_out_of_the_tree_is_filled_in(configured, device, tree):
    """SGLang would choose a chain for most models, which GRAFT refuses once the model is loaded."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    args = arguments(device=device, **dict.fromkeys(names))
    check_graft(args)
    assert tuple(getattr(args, name) for name in names) == tree
    args = arguments(device=device, **(dict.fromkeys(names) | {names[2]: 12}))
    check_graft(args)
    assert tuple(getattr(args, name) for name in names) == (*tree[:2], 12)


def test_costs_of_another_tree_are_refused_at_start(configured, tmp_path):
    path = tmp_path / "costs.json"
    costs = {
        "slots": 8,
        "steps": 2,
        "accept_len": 2.0,
        "device": "cpu",
        "seconds": {"1": {"1": 1.0, "8": 1.5}},
    }
    path.write_text(json.dumps(costs))
    configured(json.dumps({"graft": {"load_cap": {"costs": str(path)}}}))
    check_graft(arguments(speculative_num_steps=2, speculative_num_draft_tokens=8))
    with pytest.raises(ValueError, match="8 slots, 2 steps on cpu; this server has 16 slots, 5 steps"):
        check_graft(arguments())


@pytest.mark.parametrize("key", ["collect", "load_cap.measure"])
def test_a_file_that_could_not_be_written_is_refused_at_start(configured, tmp_path, key):
    section = {}
    at = section
    for part in key.split(".")[:-1]:
        at = at.setdefault(part, {})
    at[key.split(".")[-1]] = str(tmp_path / "no" / "file.json")
    configured(json.dumps({"graft": section}))
    with pytest.raises(ValueError, match=rf"graft.{key} .* cannot be written"):
        check_graft(arguments())
