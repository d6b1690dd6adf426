"""What answers prompts besides a model in this process: servers, vLLM, and pretenders for tests."""
