"""Training on several devices: mesh, FSDP, Ulysses, ring attention, ranks and their watchdog."""
