"""sgl_graft: speculative decoding in stock SGLang that drafts less and accepts more."""

__version__ = "0.1.0"
