"""Write src/unspool/assets/ruler_words.txt: English words that two or more of the shipped books share.

Lower-case words of 4 to 9 letters, no names. Only authors whose vocabulary is inoffensive without context.
"""

import io
import json
import re
from collections import Counter
from pathlib import Path

import zstandard

ASSETS = Path(__file__).parents[1] / "src" / "unspool" / "assets"
AUTHORS = ("Austen", "Bront", "Eliot", "Gaskell", "Wilde", "Shelley", "Carroll")
# Words that are offensive without context.
NOT_THESE = re.compile("bosom|breast|chink|damned|heathen|hell|idiot|queer|savages?|slaves?")
WORD = re.compile(r"(?<![\w'’-])[a-z]{4,9}(?![\w'’-])")


def main() -> None:
    works: Counter[str] = Counter()
    for name in ("train", "heldout"):
        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO((ASSETS / f"demo/{name}.jsonl.zst").read_bytes()))
        for line in io.TextIOWrapper(raw, encoding="utf-8"):
            work = json.loads(line)
            if any(author in work["author"] for author in AUTHORS):
                works.update(set(WORD.findall(work["text"])))
    shared = sorted(word for word, num_works in works.items() if num_works > 1 and not NOT_THESE.fullmatch(word))
    (ASSETS / "ruler_words.txt").write_text("".join(f"{word}\n" for word in shared), encoding="utf-8")


if __name__ == "__main__":
    main()
