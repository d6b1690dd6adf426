"""Readers of users' own copies of public benchmarks, one file per suite; the suite names its reader."""
