import json
from pathlib import Path

import pytest

from sgl_graft.cli import serve
from sgl_graft.cli.serve import TreeSettings, default_server_args, tree_to_serve
from sgl_graft.embedded import EMBEDDED_MODEL


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def flags(args: list[str]) -> dict[str, str]:
    return dict(zip(args[::2], args[1::2], strict=True))


def test_no_speculation_on_a_cpu(tmp_path: Path) -> None:
    given = flags(default_server_args("none", target=tmp_path, device="cpu"))
    assert given.pop("--max-total-tokens").isdigit()
    assert given == {"--model-path": str(tmp_path), "--device": "cpu", "--dtype": "float32"}


def test_a_tree_and_a_chain(draft: Path) -> None:
    def spec(tree: TreeSettings) -> list[str]:
        given = flags(default_server_args("EAGLE3", target=draft, draft=draft, tree=tree, device="cpu"))
        assert given["--speculative-draft-model-path"] == str(draft)
        keys = ("num-steps", "eagle-topk", "num-draft-tokens")
        return [given[f"--speculative-{key}"] for key in keys]

    assert spec(TreeSettings()) == ["5", "4", "16"]
    assert spec(TreeSettings(steps=3, slots=8)) == ["3", "4", "8"]
    assert spec(TreeSettings(topk=1)) == ["5", "1", "6"]
    with pytest.raises(ValueError, match="chain of 6 slots, not 16"):
        spec(TreeSettings(topk=1, slots=16))


def test_the_served_tree_suits_the_machine_unless_one_is_asked_for() -> None:
    given = TreeSettings(config=Path("graft.yaml"))
    assert tree_to_serve("GRAFT", given, "cpu") == TreeSettings(2, 4, 8, Path("graft.yaml"))
    assert tree_to_serve("GRAFT", given, "cuda") == given
    assert tree_to_serve("EAGLE3", given, "cpu") == given
    asked = TreeSettings(slots=16)
    assert tree_to_serve("GRAFT", asked, "cpu") == asked


def test_a_gpu_sizes_its_own_pool(draft: Path) -> None:
    given = flags(default_server_args("none", target=draft, device="cuda", dtype="bfloat16"))
    assert given == {"--model-path": str(draft), "--device": "cuda", "--dtype": "bfloat16"}


def test_what_ships_is_found_and_what_does_not_is_named(draft: Path) -> None:
    with pytest.raises(ValueError, match="needs a draft trained for"):
        default_server_args("EAGLE3", target=draft, device="cpu")
    with pytest.raises(ValueError, match="no draft ships for STANDALONE"):
        serve.embedded_draft("STANDALONE")
    with pytest.raises(ValueError, match="unknown algorithm 'EAGLE4'"):
        default_server_args("EAGLE4", target=draft, device="cpu")


def test_embedded_draft_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sgl_graft

    monkeypatch.setattr(sgl_graft, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ValueError, match="sgl-graft train eagle3"):
        serve.embedded_draft("GRAFT")
    folder = tmp_path / "drafts" / f"{EMBEDDED_MODEL}-eagle3"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({}))
    assert serve.embedded_draft("GRAFT") == serve.embedded_draft("EAGLE3") == folder
