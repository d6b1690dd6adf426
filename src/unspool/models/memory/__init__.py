"""Settings that reduce activation memory and change no result."""
