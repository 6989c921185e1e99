"""Hugging Face folders in, specs and lazily read named weights out."""
