"""Keeps what the chart repeats equal to its source: `python deploy/helm/sync.py` (`--check` only compares).

* README.md's table of values: from values.yaml and its `# --` lines.
* What values.schema.json allows under `speculative.graft` and its siblings: from `sgl_graft.config`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "sgl-graft"
BEGIN, END = "<!-- values: made by deploy/helm/sync.py -->", "<!-- end of values -->"
KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):(?: |$)")
DESCRIPTION = "# -- "


def descriptions(text: str) -> dict[str, str]:
    """Description of each value by its dotted name, in the order of the file."""
    found: dict[str, str] = {}
    path: list[str] = []
    waiting = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(DESCRIPTION):
            waiting = stripped.removeprefix(DESCRIPTION)
        elif not stripped.startswith("#") and (match := KEY.match(line)):
            path[len(match["indent"]) // 2 :] = [match["key"]]
            if waiting:
                found[".".join(path)] = waiting
            waiting = ""
    return found


def value_at(values: Any, name: str) -> Any:
    for key in name.split("."):
        values = values[key]
    return values


def values_table() -> str:
    """The README's table, one row a described value."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for name, meaning in descriptions(text).items():
        default = json.dumps(value_at(values, name)).replace("|", "\\|")
        rows.append(f"| `{name}` | `{default}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def readme() -> str:
    """README.md with its table made anew."""
    text = (CHART / "README.md").read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{values_table()}\n{END}{after}"


def settings_schema(section: Any) -> dict[str, Any]:
    """JSON schema of a configuration section, without references, titles and defaults."""
    whole = section.model_json_schema()
    definitions = whole.pop("$defs", {})

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return plain(definitions[node["$ref"].rsplit("/", 1)[1]])
        kept = {
            key: value
            for key, value in node.items()
            if key not in ("title", "default", "description", "format")
        }
        if "properties" in node:  # names of settings, which may well be called "title"
            kept["properties"] = {name: plain(value) for name, value in node["properties"].items()}
        return {key: value if key == "properties" else plain(value) for key, value in kept.items()}

    result: dict[str, Any] = plain(whole)
    return result


def schema() -> str:
    """values.schema.json with the settings of the algorithms made anew."""
    from sgl_graft.config import BlockPilotConfig, GraftConfig, SpecBlockConfig

    whole = json.loads((CHART / "values.schema.json").read_text())
    sections = {"graft": GraftConfig, "blockpilot": BlockPilotConfig, "specblock": SpecBlockConfig}
    for name, section in sections.items():
        whole["properties"]["speculative"]["properties"][name] = settings_schema(section)
    return json.dumps(whole, indent=2) + "\n"


def main() -> int:
    made = {CHART / "README.md": readme(), CHART / "values.schema.json": schema()}
    stale = [path for path, text in made.items() if path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is out of date: run python deploy/helm/sync.py", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(made[path])
        print("wrote", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
