"""The configuration: strict, frozen, and explained when it is wrong."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from sgl_graft.config import CONFIG_VARIABLE, Config, current_config, load_config_text, parse_config


def test_an_empty_configuration_is_the_default() -> None:
    assert parse_config(None, "here") == Config()
    assert load_config_text("{}") == Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{grafft: {}}", "unknown key 'grafft'; allowed here: blockpilot, graft, specblock"),
        ("{graft: {rul: value}}", "unknown key 'graft.rul'; allowed here: "),
        (
            "{graft: {table: {rows: 3}}}",
            "unknown key 'graft.table.rows'; allowed here: context_len, context_rows, folder, groups, path, ",
        ),
        ("{graft: {rule: magic}}", "graft.rule: Input should be 'value' or 'staged' (got 'magic')"),
        (
            "{graft: {table: {row_width: 99}}}",
            "graft.table.row_width: Input should be less than or equal to 16",
        ),
        ("{graft: {thresholds: [0.5, 1.5]}}", "thresholds must be probabilities in [0, 1], got 1.5"),
        ("{graft: 3}", "graft: Input should be a valid dictionary"),
        ("{graft: {rule: 'value'", "not valid YAML or JSON"),
    ],
)
def test_a_mistake_is_refused_with_its_place_and_what_is_allowed(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as error:
        load_config_text(text)
    message = str(error.value)
    assert message.startswith("--graft-config: ")
    assert expected in message


def test_a_file_is_read_as_yaml_or_json(tmp_path: Path) -> None:
    yaml_file, json_file = tmp_path / "c.yaml", tmp_path / "c.json"
    yaml_file.write_text("graft:\n  rule: staged\n")
    json_file.write_text(json.dumps({"graft": {"rule": "staged"}}))
    assert load_config_text(str(yaml_file)) == load_config_text(str(json_file))
    assert load_config_text(str(yaml_file)).graft.rule == "staged"


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match=r"c\.yaml: expected a mapping of sections, got list"):
        load_config_text(str(file))


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file; give a YAML or JSON file, or inline JSON"):
        load_config_text(str(tmp_path / "none.yaml"))


def test_it_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().graft.rule = "staged"  # type: ignore[misc]


def test_children_inherit_it_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert current_config() == Config()
    chosen = load_config_text('{"graft": {"rule": "staged", "table": {"path": "/tmp/t"}}}')
    monkeypatch.setenv(CONFIG_VARIABLE, chosen.model_dump_json(exclude_defaults=True))
    assert current_config() == chosen


def test_every_setting_is_described() -> None:
    """A setting that its section's docstring does not explain is not finished."""
    pending = [Config]
    while pending:
        section = pending.pop()
        for name, field in section.model_fields.items():
            if isinstance(field.default, Config.__mro__[1]):
                pending.append(type(field.default))
            else:
                assert f" {name}:" in (section.__doc__ or ""), f"{section.__name__}.{name}"
