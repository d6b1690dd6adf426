"""Synthetic long-context instruction data, written by a language model: questions, RAG and summaries."""
