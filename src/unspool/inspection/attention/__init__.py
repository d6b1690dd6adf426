"""Attention maps and how far each head looks."""
