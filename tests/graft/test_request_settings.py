"""`custom_params.graft`: checked where the request comes in, tolerated where it cannot be refused."""

from types import SimpleNamespace

import pytest

from sgl_graft.config import load_config_text
from sgl_graft.serving import request_settings
from sgl_graft.serving.request_settings import RequestSettings, check_request, parse_settings, settings_of


def params(custom, n=1):
    return SimpleNamespace(custom_params=custom, n=n)


@pytest.fixture(autouse=True)
def scope(monkeypatch):
    def use(name):
        config = load_config_text(f'{{"graft": {{"table": {{"scope": "{name}"}}}}}}')
        monkeypatch.setattr(request_settings, "current_config", lambda: config)

    use("group")
    return use


@pytest.mark.parametrize("custom", [None, {}, {"thinking_budget": 5}, {"graft": None}, {"graft": {}}])
def test_nothing_said_is_the_default(custom):
    assert parse_settings(custom) == RequestSettings() == settings_of(custom)
    before = params(custom)
    check_request(before, 100)
    assert before.custom_params == custom


def test_what_can_be_said():
    said = {"graft": {"group": "team-a/chat@eu:1", "enabled": False}, "other": 1}
    assert parse_settings(said) == RequestSettings(group="team-a/chat@eu:1", enabled=False)
    assert settings_of(said) == parse_settings(said)


@pytest.mark.parametrize(
    ("custom", "named"),
    [
        ({"graft": {"grup": "a"}}, r"custom_params.graft.grup is unknown; allowed are group, "),
        ({"graft": {"group": ""}}, "use 1 to 64 letters"),
        ({"graft": {"group": "a" * 65}}, "use 1 to 64 letters"),
        ({"graft": {"group": "~mine"}}, "begin with a letter or digit"),
        ({"graft": {"group": 7}}, r"custom_params.graft.group: .*string \(got 7\)"),
        ({"graft": {"group": {"a": 1}}}, "custom_params.graft.group"),
        ({"graft": {"enabled": "no"}}, "custom_params.graft.enabled: .*boolean"),
        ({"graft": {"enabled": 1}}, "custom_params.graft.enabled"),
        ({"graft": ["a"]}, "must be a mapping with any of group, .*, got list"),
        ({"graft": "a"}, "must be a mapping"),
        (["graft"], "custom_params must be a mapping, got list"),
    ],
)
def test_a_mistake_is_refused_and_never_reaches_a_table(custom, named, caplog):
    with pytest.raises(ValueError, match=named):
        check_request(params(custom), 100)
    if isinstance(custom, dict) and custom != {"graft": {"group": "~mine"}}:  # as the samples' own label
        assert settings_of(custom) == RequestSettings(enabled=False)
        assert "leaves a request out" in caplog.text


def test_samples_of_one_prompt_form_a_group(scope):
    first, second = params(None, n=3), params({"other": 1}, n=2)
    for each in (first, second):
        check_request(each, 100)
    labels = {settings_of(each.custom_params).group for each in (first, second)}
    assert len(labels) == 2 and second.custom_params["other"] == 1
    named = params({"graft": {"group": "mine"}}, n=3)
    check_request(named, 100)
    assert settings_of(named.custom_params).group == "mine"
    out = params({"graft": {"enabled": False}}, n=3)
    check_request(out, 100)
    assert not settings_of(out.custom_params).enabled
    scope("shared")
    unlabelled = params(None, n=3)
    check_request(unlabelled, 100)
    assert unlabelled.custom_params is None
