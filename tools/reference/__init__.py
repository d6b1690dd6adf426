"""Generate the reference pages of the documentation site from the code.

`build.py` lists the pages; `hooks.py` adds them to the site while MkDocs builds it.
"""
