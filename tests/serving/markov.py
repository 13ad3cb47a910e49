"""A tiny byte-level target that writes something like English, and drafts that it accepts.

The target is a bigram model of the Python manual laid into the embedding and the LM head, disturbed by
random transformer layers: its tokens depend on the whole context, so a wrong KV slot changes the output.
The draft knows the bigrams alone: it attends to occurrences of its own input token and copies their
embedding, so it is right wherever the disturbance did not change the choice. Nothing is trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

BOS, EOS, USER, BOT = 256, 257, 258, 259
WRITTEN = 260  # tokens that the target writes: bytes and specials
VOCAB = 2048  # the others are read as if they were bytes: upstream's kits send any small id
POSITIONS = 2304
WIDE_VOCAB, WIDE_POSITIONS = 32064, 8192  # of `widen`
HIDDEN = 320  # above WRITTEN, so that embeddings can be orthogonal
LAYERS = 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
DRAFT_HEADS, DRAFT_HEAD_DIM = 10, 32
DRAFT_VOCAB = 96
EXPERTS = 4
NORM_EPS = 1e-6
NEVER = 1e-7  # probability of a pair that does not occur
SHARPEN = 1.3  # makes samples at T = 1 predictable enough to be accepted
DISTURBANCE = 0.06  # of the residual stream, by each layer; about half of the choices then differ
COPY_GAIN = 30.0  # makes the copied embedding outweigh what the draft carries over from its last step
MATCH_GAIN = 3.2  # sharpens the draft's attention to occurrences of its own token
DFLASH_BLOCK = 6
DFLASH_MASK = USER  # its embedding is orthogonal to every token that is written
ANCHOR_GAIN = 4.0  # makes masks attend to the anchor and to nothing else

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def build_target(
    folder: Path, family: str = "llama", layers: int = LAYERS, script: Sequence[str] = ()
) -> Path:
    """Write a target of one of `ARCHITECTURES` into `folder`; with fewer `layers`, a draft for STANDALONE.

    Args:
        script: what it says after a chat prompt, one token each; then it ends.
    """
    embedding, head = _embedding_and_head(len(script))
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": _ones(HIDDEN),
    }
    generator = torch.Generator().manual_seed(20)
    for layer in range(layers):
        for name, tensor in _layer(family, generator).items():
            weights[f"model.layers.{layer}.{name}"] = tensor
    config = _base_config() | {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 64,
    }
    if family == "qwen3_moe":
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return _write(folder, config, weights, script)


def build_draft(folder: Path, script: Sequence[str] = ()) -> Path:
    """Write the EAGLE-3 draft, which fits every target of this module with that script, into `folder`."""
    _, head = _embedding_and_head(len(script))
    hot = hot_tokens(len(script))
    width = DRAFT_HEADS * DRAFT_HEAD_DIM
    generator = torch.Generator().manual_seed(21)
    rotation = torch.linalg.qr(torch.randn(HIDDEN, width, generator=generator)).Q
    nothing = torch.zeros(width, HIDDEN)  # what attention takes from the target's features
    layer = "model.layers.0"
    weights = {
        "model.fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": torch.cat((rotation.T * MATCH_GAIN, nothing), 1),
        f"{layer}.self_attn.k_proj.weight": torch.cat((rotation.T * MATCH_GAIN, nothing), 1),
        f"{layer}.self_attn.v_proj.weight": torch.cat((torch.eye(HIDDEN), nothing), 1),
        f"{layer}.self_attn.o_proj.weight": torch.eye(HIDDEN) * COPY_GAIN,
        f"{layer}.mlp.gate_proj.weight": torch.zeros(64, HIDDEN),
        f"{layer}.mlp.up_proj.weight": torch.zeros(64, HIDDEN),
        f"{layer}.mlp.down_proj.weight": torch.zeros(HIDDEN, 64),
        f"{layer}.input_layernorm.weight": _ones(HIDDEN),
        f"{layer}.hidden_norm.weight": _ones(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": _ones(HIDDEN),
        "model.norm.weight": _ones(HIDDEN),
        "lm_head.weight": head[hot],
        "d2t": hot - torch.arange(len(hot)),
    }
    config = _base_config() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_HEADS,
        "head_dim": DRAFT_HEAD_DIM,
        "intermediate_size": 64,
        "draft_vocab_size": len(hot),
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
    }
    return _write(folder, config, weights)


def build_dflash(folder: Path, script: Sequence[str] = ()) -> Path:
    """Write a DFlash draft of the bigrams, which fits every target of this module, into `folder`.

    Every mask attends to the anchor, the only row of the block that is not a mask, and copies its embedding:
    the first proposal is the likeliest bigram, the later ones repeat it. The features are not read.
    """
    embedding, _ = _embedding_and_head(len(script))
    not_a_mask = embedding[: WRITTEN + len(script)].sum(0) - embedding[DFLASH_MASK]
    # The slowest of the rotated pairs: an angle of a few positions does not turn it.
    slowest = torch.arange(DRAFT_HEADS) * DRAFT_HEAD_DIM + DRAFT_HEAD_DIM // 2 - 1
    query, key = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    query[slowest], key[slowest] = embedding[DFLASH_MASK], not_a_mask
    weights = {
        "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": _ones(HIDDEN),
        "norm.weight": _ones(HIDDEN),
        "layers.0.self_attn.q_proj.weight": query,
        "layers.0.self_attn.k_proj.weight": key,
        "layers.0.self_attn.v_proj.weight": torch.eye(HIDDEN),
        "layers.0.self_attn.o_proj.weight": torch.eye(HIDDEN) * COPY_GAIN,
        "layers.0.self_attn.q_norm.weight": _ones(DRAFT_HEAD_DIM) * ANCHOR_GAIN,
        "layers.0.self_attn.k_norm.weight": _ones(DRAFT_HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": torch.zeros(64, HIDDEN),
        "layers.0.mlp.up_proj.weight": torch.zeros(64, HIDDEN),
        "layers.0.mlp.down_proj.weight": torch.zeros(HIDDEN, 64),
        "layers.0.input_layernorm.weight": _ones(HIDDEN),
        "layers.0.post_attention_layernorm.weight": _ones(HIDDEN),
    }
    config = _base_config() | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "num_target_layers": LAYERS,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_HEADS,
        "head_dim": DRAFT_HEAD_DIM,
        "intermediate_size": 64,
        "block_size": DFLASH_BLOCK,
        "dflash_config": {"mask_token_id": DFLASH_MASK, "target_layer_ids": [0, 1]},
    }
    return _write(folder, config, weights)


def build_eagle_draft(folder: Path) -> Path:
    """Write a draft for the EAGLE algorithm (one layer over embedding and target state) into `folder`.

    Its layer adds nothing and its input weighs the target's state lightly, so it proposes bigrams, too.
    """
    generator = torch.Generator().manual_seed(23)
    light = torch.randn(HIDDEN, HIDDEN, generator=generator) * (0.02 / HIDDEN**0.5)
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = "layers.0"
    weights = {
        # RMSNorm, which this draft lacks, would have stretched the embedding to this length.
        "fc.weight": torch.cat((torch.eye(HIDDEN) * HIDDEN**0.5, light), 1),
        "fc.bias": torch.zeros(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": torch.zeros(width, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": torch.zeros(kv_width, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": torch.zeros(kv_width, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(HIDDEN, width),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(64, HIDDEN),
        f"{layer}.mlp.up_proj.weight": torch.zeros(64, HIDDEN),
        f"{layer}.mlp.down_proj.weight": torch.zeros(HIDDEN, 64),
        f"{layer}.post_attention_layernorm.weight": _ones(HIDDEN),
    }
    config = _base_config() | {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": 64,
    }
    return _write(folder, config, weights)


def widen(source: Path, folder: Path) -> Path:
    """Write a model of this module with the vocabulary and the context of an upstream kit's 8B model.

    The tokens beyond are read as if they were bytes, and never written, like those below them.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": WIDE_VOCAB, "max_position_embeddings": WIDE_POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    more = torch.arange(VOCAB, WIDE_VOCAB)
    for name, tensor in weights.items():
        if tensor.shape[0] == VOCAB:
            rows = tensor[more % 256] if "embed" in name else tensor[more % 256] * 0
            weights[name] = torch.cat((tensor, rows))
    save_file(weights, folder / "model.safetensors")
    return folder


def hot_tokens(script: int = 0) -> torch.Tensor:  # [DRAFT_VOCAB + script], rising
    """The tokens that a draft can propose: the most frequent ones, and those of the script."""
    counts = _bigram_counts(script).sum(0)
    counts[WRITTEN:] = np.inf
    return torch.from_numpy(np.sort(np.argsort(-counts)[: DRAFT_VOCAB + script].copy()))


def _bigram_counts(script: int = 0) -> np.ndarray:  # [WRITTEN + script] twice, row: the token before
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    codes = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    pairs = np.bincount(codes[:-1] * WRITTEN + codes[1:], minlength=WRITTEN**2)
    counts = pairs.reshape(WRITTEN, WRITTEN).astype(np.float64)
    counts[ord("\n"), EOS] = counts[ord("\n")].sum() / 50
    for special in (BOS, EOS, USER, BOT):
        counts[special] = counts[ord("\n")]
    if script:
        counts = np.pad(counts, (0, script))
        counts[BOT] = 0
        said = [BOT, *range(WRITTEN, WRITTEN + script), EOS]
        counts[said[:-1], said[1:]] = 1
    return counts


def _embedding_and_head(script: int = 0) -> tuple[torch.Tensor, torch.Tensor]:  # [VOCAB, HIDDEN] each
    """Orthonormal embeddings, and the head that turns one into its bigram log-probabilities.

    Shifted so that a pair that never occurs scores 0, as do tokens that are never written.
    """
    written = WRITTEN + script
    counts = _bigram_counts(script)
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    scores = torch.from_numpy(np.log1p(shares / NEVER) * SHARPEN).float()
    generator = torch.Generator().manual_seed(22)
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q[:written]
    head = torch.zeros(VOCAB, HIDDEN)
    head[:written] = scores.T @ basis / HIDDEN**0.5  # RMSNorm stretches a unit vector to length sqrt(HIDDEN)
    reads_as = torch.arange(VOCAB)
    reads_as[written:] %= 256
    return basis[reads_as], head


def _layer(family: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    # The stream has unit length, so a layer's output of length DISTURBANCE has entries this large.
    gain = DISTURBANCE / HIDDEN**0.5
    tensors = {
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 3.0),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 3.0),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 3.0 * gain),
        "input_layernorm.weight": _ones(HIDDEN),
        "post_attention_layernorm.weight": _ones(HIDDEN),
    }
    if family != "llama":
        tensors["self_attn.q_norm.weight"] = _ones(HEAD_DIM)
        tensors["self_attn.k_norm.weight"] = _ones(HEAD_DIM)
    if family == "qwen3_moe":
        tensors["mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
        parts = [(f"mlp.experts.{expert}.", 32) for expert in range(EXPERTS)]
    else:
        parts = [("mlp.", 64)]
    for prefix, width in parts:
        tensors[f"{prefix}gate_proj.weight"] = matrix(width, HIDDEN)
        tensors[f"{prefix}up_proj.weight"] = matrix(width, HIDDEN)
        tensors[f"{prefix}down_proj.weight"] = matrix(HIDDEN, width, 2.0 * gain)
    return tensors


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def _base_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": POSITIONS,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
        "use_sliding_window": False,
    }


def _write(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], script: Sequence[str] = ()
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    _write_tokenizer(folder, script)
    return folder


def _write_tokenizer(folder: Path, script: Sequence[str]) -> None:
    """Byte-level BPE without merges: token i is byte i. No text is read as the script's tokens."""
    # GPT-2's visible stand-ins: printable bytes stand for themselves, the others for what follows 255.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    vocab = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    shown = {byte: char for char, byte in vocab.items()}
    said = {"".join(shown[byte] for byte in text.encode()): WRITTEN + i for i, text in enumerate(script)}
    specials = {"<s>": BOS, "</s>": EOS, "<user>": USER, "<bot>": BOT}
    added = [
        {"id": index, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text, index in specials.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab | specials | said, "merges": []},
    }
    template = "<s>{% for m in messages %}<user>{{ m.content }}\n{% endfor %}<bot>"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
