"""The `unspool` command: one file per verb."""
