"""Which words do not count as a keyword found, and how Chinese is split into words.

In: paths that the user gave. Out: `Words` for each language.
LV-Eval's own lists (38 English, 85 Chinese words) are not shipped. `blacklist` takes its metrics.py, from which both
lists are read without running it; `blacklist_en` and `blacklist_zh` take files with a word on each line. Without them
our own function words stand in, and results say so: scores are then close to LV-Eval's but not the same.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from unspool.base.errors import ConfigError, DataError
from unspool.eval.metrics.keywords import Language, Words

Segmenter = Literal["jieba", "characters"]
_NAMES: dict[Language, str] = {"en": "ABANDON_WORDS_EN", "zh": "ABANDON_WORDS_ZH"}
# Articles, prepositions, conjunctions, pronouns and auxiliary verbs: words that any answer may have.
_ENGLISH = (
    "about after all also and are as at be been before being both but by can could did do does during each for from "
    "had has have he her hers him his how if in into is it its may might more most not of on or our she should so "
    "some such than that their them then there these they this those to under was we were what when where which "
    "while who whom whose why will with would you your"
)
_CHINESE = "的了和与及或是在有为以于对从到由被把将也都就而但并等这那其之他她它我你们个不中上下"
OWN: dict[Language, frozenset[str]] = {"en": frozenset(_ENGLISH.split()), "zh": frozenset(_CHINESE)}


def read_blacklists(paths: Mapping[str, str]) -> dict[Language, tuple[frozenset[str], bool]]:
    """The words of each language, and whether they are the user's."""
    found: dict[Language, tuple[frozenset[str], bool]] = {}
    for language, variable in _NAMES.items():
        if f"blacklist_{language}" in paths:
            found[language] = frozenset(_text(paths[f"blacklist_{language}"]).split()), True
        elif "blacklist" in paths:
            found[language] = frozenset(_variable(paths["blacklist"], variable)), True
        else:
            found[language] = OWN[language], False
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"blacklist {path}: cannot be read ({error}); give a text file with a word on each line."
        ) from error


def _variable(path: str, name: str) -> list[str]:
    """A list of words that a Python file assigns to a name; the file is parsed, never run."""
    try:
        tree = ast.parse(_text(path))
    except SyntaxError as error:
        raise DataError(f"blacklist {path}: not Python ({error.msg}); give LV-Eval's metrics.py.") from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            return [str(word) for word in ast.literal_eval(node.value)]
    raise DataError(
        f"blacklist {path}: it assigns no {name}; give LV-Eval's metrics.py, or blacklist_en and blacklist_zh."
    )


@cache
def cutter(segmenter: Segmenter) -> Callable[[str], Sequence[str]]:
    if segmenter == "characters":
        return list
    try:
        import jieba  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "lveval: Chinese answers are split into words by jieba, which is not installed; `pip install jieba`, or "
            "set segmenter: characters under paths for scores that are not LV-Eval's."
        ) from error
    jieba.setLogLevel(60)  # it tells of its dictionary on every start
    return lambda text: list(jieba.cut(text, cut_all=False))


def words_for(language: Language, blacklist: frozenset[str], segmenter: Segmenter) -> Words:
    return Words(language=language, blacklist=blacklist, cut=cutter(segmenter) if language == "zh" else list)
