"""What a run logs: metrics, throughput, validation, samples, external trackers."""
