"""What every other package may use: errors, sizes, configs, artifacts, progress. Imports nothing of ours."""
