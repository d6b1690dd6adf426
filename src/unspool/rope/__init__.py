"""RoPE methods: which rotary frequencies a longer context uses."""
