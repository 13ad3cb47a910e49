"""SGLang's own server test kits, imported from its wheel, against every speculative variant."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import requests
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

from .kit_table import FUNCTIONS, KITS, WIDE, KitRun, OfVariant, markdown
from .server import Server
from .variants import SPECULATIVE, Variant

PAGE = Path(__file__).parents[2] / "docs" / "test-kits.md"


class KitCase(SpecEagleServerBase):
    """What upstream's fixture offers to its kits, on a server that the session already has."""

    kit_run: KitRun
    variant: Variant

    @classmethod
    def setUpClass(cls) -> None:
        cls._tokenizer = None

    @classmethod
    def tearDownClass(cls) -> None:
        pass

    @pytest.fixture(autouse=True)
    def _use_server(self, kit_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.kit_run.seed is not None:
            monkeypatch.setattr(requests, "post", functools.partial(_post_seeded, self.kit_run.seed))
        server: Server = kit_server(self.kit_run, self.variant)
        self.base_url = server.url
        self.process = server
        self.model = self.target_model = str(server.model)


def _post_seeded(seed: int, url: str, *, json: dict[str, Any], **options: Any) -> requests.Response:
    sampling = json.get("sampling_params", {}) | {"sampling_seed": seed}
    return requests.request("POST", url, json=json | {"sampling_params": sampling}, **options)


def case(run: KitRun, variant: Variant) -> type:
    """The kit's tests as a test class for one variant."""
    body: dict[str, Any] = {
        name: getattr(variant, value) if isinstance(value, OfVariant) else value
        for name, (value, _) in run.settings.items()
    }
    body |= dict.fromkeys(run.excluded)
    body |= {"kit_run": run, "variant": variant, "__module__": __name__}
    name = f"Test_{run.name}{'_wide' if run.target == WIDE else ''}_{variant.name}"
    return type(name, (run.load(), KitCase), body)


for _variant in SPECULATIVE:
    for _run in KITS:
        _case = case(_run, _variant)
        globals()[_case.__name__] = _case


def test_multi_turn_cache_hits(speculative: Server, tmp_path: Path) -> None:
    texts = [topics[name] for name in sorted(topics, key=lambda name: -len(topics[name]))[:8]]
    talks = [{"conversations": [{"value": text}, {"value": text}]} for text in texts]
    dataset = tmp_path / "talks.json"
    dataset.write_text(json.dumps(talks))
    result = run_multiturn_cache_hit_test(
        speculative.url,
        str(speculative.model),
        num_clients=4,
        request_length=128,
        output_length=24,
        dataset_path=str(dataset),
        miss_tolerance=2,
    )
    assert result["overall"]["cache_hit_rate"] > 0.4


def test_the_page_about_kits_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown()


def test_every_test_of_these_kits_is_decided() -> None:
    """A kit class or function that upstream adds to a module we run must get a line, too."""
    decided = {run.kit for run in KITS} | {function for function, _ in FUNCTIONS}
    for name in sorted({kit.split(".")[0] for kit in decided}):
        module = importlib.import_module(f"sglang.test.kits.{name}")
        for item, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__
            kit = isinstance(value, type) and any(test.startswith("test_") for test in vars(value))
            if own and (kit or (callable(value) and item.startswith("run_"))):
                assert f"{name}.{item}" in decided
