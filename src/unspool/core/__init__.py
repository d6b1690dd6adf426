"""Foundations of every other package: artifacts, configs, errors, logging, progress, random generators, sizes."""

import logging

# A library prints nothing unless the program that uses it configures logging.
logging.getLogger("unspool").addHandler(logging.NullHandler())
