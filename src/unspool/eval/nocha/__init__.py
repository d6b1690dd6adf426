"""True and false claims about a long text, in pairs, from the user's own file (the protocol of NoCha)."""

from unspool.eval.nocha.suite import SUITE

__all__ = ["SUITE"]
