"""Tiny random models for tests: built in a second, no download, loaded by transformers and stock SGLang.

target = tiny.build(tmp_path / "llama", "llama")
draft = tiny.build_draft(tmp_path / "draft", target)  # EAGLE-3; build_dflash for DFlash
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import LlamaConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

FAMILIES = ("llama", "qwen3", "qwen3_moe")
VOCAB_SIZE = 320  # 3 control tokens, 256 bytes, fillers up to a multiple of 64
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token per byte, any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"<|filler_{i}|>" for i in range(VOCAB_SIZE - len(alphabet) - len(CONTROL_TOKENS))]
    vocab = {token: i for i, token in enumerate([*CONTROL_TOKENS, *alphabet, *fillers])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build(folder: Path, family: str = "llama", *, seed: int = 0, **changes: object) -> Path:
    """Write a random model of `family` with its tokenizer to `folder` (kept if already there).

    `changes` override config fields. Weights are large enough that the likeliest token usually leads clearly,
    so that greedy outputs can be compared between implementations. Raises ValueError for an unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown tiny family {family!r}; choose from {FAMILIES}")
    if (folder / "config.json").is_file():
        return folder
    fields = {**_SHAPE, **changes}
    config: LlamaConfig | Qwen3Config | Qwen3MoeConfig
    if family == "llama":
        config = LlamaConfig(**fields)
    elif family == "qwen3":
        config = Qwen3Config(**fields)
    else:
        config = Qwen3MoeConfig(**{**_EXPERTS, **fields})
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                wide = "lm_head" in name or "embed" in name
                param.normal_(0.0, 0.3 if wide else 0.08, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def build_draft(folder: Path, target: Path, *, seed: int = 1, draft_vocab_size: int = 256) -> Path:
    """Write a random EAGLE-3 draft for the target in `target` (kept if already there).

    It loads in stock SGLang and proposes almost nothing that is accepted: the other end of the scale from a
    trained draft.
    """
    from sgl_graft.draft_training.eagle3 import Eagle3Draft, draft_config
    from sgl_graft.draft_training.eagle3_recipe import export_eagle3
    from sgl_graft.draft_training.vocab import DraftVocab

    if (folder / "config.json").is_file():
        return folder
    config = AutoConfig.from_pretrained(target)
    draft = Eagle3Draft(draft_config(config, draft_vocab_size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in draft.parameters():
            if param.ndim > 1:
                param.normal_(0.0, 0.05, generator=generator)
    tokens = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab_size]
    export_eagle3(draft, DraftVocab.of(tokens, config.vocab_size), folder)
    return folder


def build_dflash(
    folder: Path, target: Path, *, seed: int = 2, block_size: int = 6, kv_heads: int | None = None
) -> Path:
    """Write a random two-layer DFlash draft for the target in `target` (kept if already there)."""
    from sgl_graft.draft_training.dflash import DFlashDraft, draft_config
    from sgl_graft.draft_training.dflash_recipe import export_dflash

    if (folder / "config.json").is_file():
        return folder
    config = AutoConfig.from_pretrained(target)
    draft = DFlashDraft(
        draft_config(
            config,
            target_layer_ids=(1, 2, 3),
            mask_token_id=VOCAB_SIZE - 1,
            block_size=block_size,
            layers=2,
            intermediate_size=config.intermediate_size,
            kv_heads=kv_heads,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in draft.parameters():
            if param.ndim > 1:
                param.normal_(0.0, 0.08, generator=generator)
    export_dflash(draft, folder)
    return folder
