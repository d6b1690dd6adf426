"""Run a generator of NVIDIA/RULER as it is, on our word list and sentence splitter where it would download others.

python run_ruler.py FOLDER SCRIPT WORDS ARGUMENTS...

FOLDER is a copy of RULER's `scripts/data`, SCRIPT the name of a generator in its `synthetic`, WORDS a word list.
"""

import runpy
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

from unspool.evals.suites.ruler.haystacks import Essay


def split_sentences(text: str) -> list[str]:
    essay = Essay.of([text])
    return [" ".join(essay.words[start:end]) for start, end in pairwise([0, *essay.ends.tolist()])]


def main() -> None:
    folder, script, words = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).read_text(encoding="utf-8").split()
    sys.modules["wonderwords"] = MagicMock()
    sys.modules["wonderwords"].random_word._get_words_from_text_file = lambda name: words
    sys.modules["nltk.tokenize"] = MagicMock(sent_tokenize=split_sentences)
    sys.modules["tenacity"] = MagicMock()  # only for tokenizers behind an API
    sys.path.insert(0, str(folder / "synthetic"))
    sys.argv = [script, *sys.argv[4:]]
    runpy.run_path(str(folder / "synthetic" / f"{script}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
