"""Bad input is refused before a model is loaded, with a message that says what to do instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
DRAFT = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 128,
}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Resolver:
    """One process that resolves arguments on the CPU platform."""

    def __init__(self, folder: Path):
        self.target = write_model(folder / "target", TARGET)
        self.draft = write_model(folder / "draft", DRAFT)
        ours = ("SGLGRAFT_ALGORITHM", "SGLGRAFT_CONFIG", "SGLGRAFT_DISABLE")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        self.process = subprocess.Popen(
            # -P: the script's folder would put tests/packaging before PyPI's packaging
            [sys.executable, "-P", Path(__file__).with_name("resolve_arguments.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"SGLANG_PLATFORM": "sgl_graft_cpu", "HF_HUB_OFFLINE": "1"},
        )

    def __call__(self, *argv: str | Path, **env: str) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        words = ["--model-path", self.target, "--device", "cpu", *argv]
        case = json.dumps({"argv": [str(word) for word in words], "env": env})
        print(case, file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def __enter__(self) -> Resolver:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)

    def tree(
        self, *argv: str | Path, algorithm: str = "EAGLE3", draft: Path | None = None, **env: str
    ) -> dict[str, Any]:
        shape = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2")
        slots = ("--speculative-num-draft-tokens", "8")
        named = ("--speculative-draft-model-path", draft or self.draft)
        return self("--speculative-algorithm", algorithm, *named, *shape, *slots, *argv, **env)


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resolver]:
    with Resolver(tmp_path_factory.mktemp("models")) as resolver:
        yield resolver


def test_an_algorithm_that_a_file_names_is_patched_in_like_one_on_the_command_line(
    resolver: Resolver, tmp_path: Path
) -> None:
    """SGLang reads its --config after plugins were loaded."""
    file = tmp_path / "server.yaml"
    file.write_text("speculative-algorithm: GRAFT\n")
    shape = ("--speculative-draft-model-path", resolver.draft, "--speculative-num-steps", "3")
    shape += ("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8")
    named, by_file = resolver.tree(algorithm="GRAFT"), resolver("--config", file, *shape)
    assert named["code"] is None and by_file["code"] is None, by_file
    assert by_file["graft"] == "GRAFT"
    assert by_file["patched"] == named["patched"]
    assert "sglang.srt.utils.auth.add_api_key_middleware" in by_file["patched"]


def refused(answer: dict[str, Any], *parts: str) -> None:
    assert answer["code"] not in (None, 0), answer
    message = answer["message"] or answer["stderr"]
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("algorithm", ["EAGLE3", "GRAFT", "graft"])
def test_good_arguments_pass(resolver: Resolver, algorithm: str) -> None:
    answer = resolver.tree(algorithm=algorithm)
    assert answer["code"] is None, answer
    assert answer["algorithm"] == "EAGLE3"
    assert answer["graft"] == ("GRAFT" if algorithm != "EAGLE3" else None)


def test_no_speculation_passes(resolver: Resolver) -> None:
    assert resolver()["code"] is None


@pytest.mark.parametrize("algorithm", ["EAGLE3", "GRAFT", "STANDALONE"])
def test_missing_draft(resolver: Resolver, algorithm: str) -> None:
    refused(resolver("--speculative-algorithm", algorithm), "needs a draft", "--speculative-draft-model-path")


@pytest.mark.parametrize("algorithm", ["EAGLE3", "GRAFT"])
def test_draft_folder_that_is_not_there(resolver: Resolver, algorithm: str, tmp_path: Path) -> None:
    refused(resolver.tree(algorithm=algorithm, draft=tmp_path / "no"), "no such folder", "sgl-graft train")
    refused(
        resolver.tree(algorithm=algorithm, draft=tmp_path),
        "no config.json",
        "folder that a training run wrote",
    )


@pytest.mark.parametrize("algorithm", ["EAGLE3", "GRAFT"])
def test_draft_of_another_vocabulary(resolver: Resolver, algorithm: str, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "d", DRAFT | {"vocab_size": 600})
    answer = resolver.tree(algorithm=algorithm, draft=draft)
    refused(answer, "vocabulary of 600", "one of 512", "Use a draft that was trained for")


def test_draft_of_another_width(resolver: Resolver, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "d", DRAFT | {"target_hidden_size": 96})
    refused(resolver.tree(draft=draft), "hidden states of 96", "makes 64")


def test_whole_model_as_an_eagle3_draft(resolver: Resolver) -> None:
    refused(resolver.tree(draft=resolver.target), "whole language model", "STANDALONE")


def test_draft_that_reaches_less_far_than_the_server(resolver: Resolver, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "d", DRAFT | {"max_position_embeddings": 128})
    refused(resolver.tree(draft=draft), "128 positions", "context of 256", "--context-length 128")
    assert resolver.tree("--context-length", "128", draft=draft)["code"] is None
    allowed = resolver.tree(draft=draft, SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1")
    assert allowed["code"] is None, allowed


SPECBLOCK = TARGET | {
    "architectures": ["LlamaForCausalLMSpecBlockShift"],
    "num_hidden_layers": 2,
    "draft_vocab_size": 64,
    "diffspec_draft_token_num": 4,
    "rank_classes": 4,
}


def specblock(resolver: Resolver, folder: Path, *argv: str, **changes: Any) -> dict[str, Any]:
    draft = write_model(folder / "d", SPECBLOCK | changes)
    return resolver("--speculative-algorithm", "SPECBLOCK", "--speculative-draft-model-path", draft, *argv)


def test_specblock_passes_under_its_own_name(resolver: Resolver, tmp_path: Path) -> None:
    answer = specblock(resolver, tmp_path)
    assert answer["code"] is None, answer
    assert answer["algorithm"] == answer["graft"] == "SPECBLOCK"


@pytest.mark.parametrize(
    ("argv", "changes", "words"),
    [
        (("--speculative-adaptive",), {}, ("--speculative-adaptive", "Leave the flag out")),
        (("--speculative-draft-window-size", "64"), {}, ("--speculative-draft-window-size",)),
        (("--speculative-num-steps", "2"), {}, ("--speculative-num-steps", "specblock.blocks")),
        (("--speculative-num-draft-tokens", "1"), {}, ("--speculative-num-draft-tokens 1", "2 or more")),
        ((), {"diffspec_draft_token_num": None}, ("diffspec_draft_token_num",)),
        ((), {"vocab_size": 1024}, ("vocabulary of 1024", "trained for")),
        ((), {"architectures": ["LlamaForCausalLMEagle3"]}, ("not a SpecBlock draft",)),
    ],
)
def test_specblock_refusals(
    resolver: Resolver, tmp_path: Path, argv: tuple[str, ...], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(specblock(resolver, tmp_path, *argv, **changes), *words)


DFLASH = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "num_target_layers": 4,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 2]},
}


def dflash(resolver: Resolver, folder: Path, *argv: str, **changes: Any) -> dict[str, Any]:
    draft = write_model(folder / "d", DFLASH | changes)
    return resolver("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft, *argv)


@pytest.mark.parametrize("argv", [(), ("--speculative-num-draft-tokens", "12")])
def test_dflash_passes_at_any_block_size(resolver: Resolver, tmp_path: Path, argv: tuple[str, ...]) -> None:
    answer = dflash(resolver, tmp_path, *argv)
    assert answer["code"] is None, answer
    assert answer["algorithm"] == "DFLASH"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": 32}, ("hidden states of 32", "makes 64")),
        (
            {"dflash_config": {"mask_token_id": 512, "target_layer_ids": [1]}},
            ("masks with token 512", "vocabulary has 512"),
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 7]}},
            ("layers [7]", "the target has 4"),
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ("LlamaForCausalLMEagle3", "not a DFlash draft")),
        ({"max_position_embeddings": 128}, ("128 positions", "--context-length 128")),
    ],
)
def test_dflash_draft_of_another_target(
    resolver: Resolver, tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused(dflash(resolver, tmp_path, **changes), *parts)


@pytest.mark.parametrize(("algorithm", "reason"), [("NGRAM", "kernel library"), ("UNO", "CUDA only")])
def test_what_cannot_run_on_a_cpu(resolver: Resolver, algorithm: str, reason: str) -> None:
    answer = resolver("--speculative-algorithm", algorithm, "--speculative-draft-model-path", resolver.draft)
    refused(answer, "cannot run on a CPU", reason, "Use one of EAGLE, EAGLE3")


@pytest.mark.parametrize(
    "argv",
    [
        ("--attention-backend", "torch_native"),
        ("--speculative-draft-attention-backend", "triton"),
        ("--speculative-accept-threshold-single", "0.5"),
        ("--speculative-accept-threshold-acc", "0.5"),
        ("--enable-multi-layer-eagle",),
    ],
)
def test_flags_that_speculation_on_a_cpu_cannot_honour(resolver: Resolver, argv: tuple[str, ...]) -> None:
    refused(
        resolver.tree(*argv), argv[0], "cannot be combined with speculation on a CPU", f"Leave {argv[0]} out"
    )


def test_page_size_that_upstream_does_not_admit(resolver: Resolver) -> None:
    refused(resolver.tree("--page-size", "16"), "page_size == 1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{graft: {rul: value}}", "unknown key 'graft.rul'; allowed here: "),
        ("{graft: {rule: 'value'", "not valid YAML or JSON"),
        ("/no/such.yaml", "no such file"),
    ],
)
def test_bad_configuration(resolver: Resolver, text: str, expected: str) -> None:
    answer = resolver.tree("--graft-config", text, algorithm="GRAFT")
    refused(answer, expected)
    assert answer["code"] == 2


def test_a_verify_rule_that_a_cpu_does_not_have(resolver: Resolver) -> None:
    answer = resolver.tree("--graft-config", '{"graft": {"verify": "target_only"}}', algorithm="GRAFT")
    refused(answer, "graft.verify target_only is a rule for GPUs", "Leave graft.verify out")


def test_switched_off_its_names_are_unknown(resolver: Resolver) -> None:
    answer = resolver.tree(algorithm="GRAFT", SGLGRAFT_DISABLE="1")
    assert answer["code"] not in (None, 0)
    answer = resolver("--graft-config", "{}", SGLGRAFT_DISABLE="1")
    refused(answer, "unrecognized arguments: --graft-config")
