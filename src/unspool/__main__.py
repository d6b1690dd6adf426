"""`python -m unspool`: the same as the command `unspool`."""

from unspool.cli.main import main

main()
