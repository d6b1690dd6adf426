"""Backends that answer prompts: local models, servers, vLLM, and mocks for tests."""
