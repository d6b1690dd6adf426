"""What every other package may use: errors, sizes, configs, artefacts, progress. Imports nothing of ours."""
