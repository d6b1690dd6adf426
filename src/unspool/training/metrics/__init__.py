"""The logs of a run: metrics, throughput, validation, samples, external trackers."""
