"""`transformers` models with exact document attention, per-head rotary and a chunked loss."""
