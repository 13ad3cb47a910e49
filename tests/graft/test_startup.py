"""What GRAFT refuses before a model is loaded."""

from types import SimpleNamespace

import pytest

from sgl_graft.config import Config, load_config_text
from sgl_graft.graft import startup
from sgl_graft.graft.startup import check_graft


def arguments(**changed):
    values = {
        "speculative_num_draft_tokens": 16,
        "speculative_eagle_topk": 4,
        "speculative_num_steps": 5,
        "enable_multi_layer_eagle": False,
        "speculative_adaptive": False,
        "model_path": "someone/somewhere",
        "trust_remote_code": False,
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
        ('{"graft": {"rule": "staged", "thresholds": [0.1]}}', "has 1 values; the 3 gates"),
        ('{"graft": {"table": {"order2_rows": 1000}}}', "power of two"),
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
    for section in (f'"calibration": "{missing}"', f'"table": {{"path": "{missing}"}}'):
        configured(f'{{"graft": {{{section}}}}}')
        with pytest.raises(ValueError, match=str(missing)):
            check_graft(arguments(model_path=str(tmp_path)))
    assert Config().graft.calibration is None
