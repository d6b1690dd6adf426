"""What every other package builds on: artifacts, configs, errors, logging, progress, random numbers, sizes."""

import logging

# A library prints nothing unless the program that uses it configures logging.
logging.getLogger("unspool").addHandler(logging.NullHandler())
