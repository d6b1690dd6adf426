"""What each suite asks: pure functions from settings, materials and seed to prompts."""
