"""Weights of other codebases: Hugging Face and GGUF, in and out."""
