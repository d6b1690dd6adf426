"""From one output and its references to one number, as pure functions; what many numbers say of a context's length."""
