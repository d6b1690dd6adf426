"""Tasks about whole sections of real documents, inserted after these sections.

Olmo 3 adds two kinds to a part of its long documents (Common Word Extraction and Rewriting EXpressions). Ours ask for
the same information in our own wordings and need no language model: how often a frequent word occurs in a section, and
all sentences of a section that contain a phrase. Every answer can be computed from the section.
"""
