"""Attention distillation: fit queries and keys to the attention before a RoPE change."""
