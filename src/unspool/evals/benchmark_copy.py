"""Read wording, data or complete prompts from a user's copy of a public benchmark.

Unspool ships nothing of a benchmark. A reader extracts texts from the copy without running its code, and compares every
file's content with the known version. Only if they are equal is a score comparable with published tables.
"""

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from unspool.core.artifacts import digest, digest_once
from unspool.core.errors import ConfigError, DataError
from unspool.core.formatting import join_words
from unspool.evals.prompt_encoder import PromptEncoder
from unspool.evals.suite import Question
from unspool.evals.wording import Wording

_HASH_LENGTH = 16
# Files that git may check out with other line endings.
_TEXT_FILES = {".py", ".sh", ".txt", ".yaml", ".yml"}
_NAMED_FILES = 5
OWN_WORDS = "wording and data are not the benchmark's; set reference to use its own"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The parts of a user's benchmark copy that the chosen tasks need."""

    repo: str  # such as NVIDIA/RULER
    version: str  # known version with which `files` were compared
    files: Mapping[str, str]  # name: content hash of every used file
    kind: Literal["clone", "prompts"] = "clone"  # prompts: prompt files written by the benchmark's scripts
    differs: tuple[str, ...] = ()  # files that differ from the version
    unchecked: tuple[str, ...] = ()  # data files without a known hash
    wording: Wording | None = None
    paths: Mapping[str, str] = field(default_factory=dict)  # data paths by the names that the suite's `load` uses
    prompts: Mapping[tuple[str, int], Sequence[Question]] = field(default_factory=dict)  # by task and length
    fit: "Fit | None" = None  # cuts overlong prompts like the benchmark
    counts_opening: bool = True  # whether the benchmark counts a BOS token as part of the length

    @property
    def hash(self) -> str:
        return digest(dict(self.files))[:_HASH_LENGTH]

    @property
    def facts(self) -> dict[str, Any]:
        """Fields that every sample and the summary record."""
        facts = {"repo": self.repo, "version": self.version, "from": self.kind, "differs": list(self.differs)}
        return facts | ({"unchecked": list(self.unchecked)} if self.unchecked else {})


class Fit(Protocol):
    def __call__(self, asked: Question, encoder: PromptEncoder, *, chat: bool, limit: int) -> Question: ...


Reader = Callable[[Path, Any], Reference]
"""Arguments: the path and the entry of `evals`, with all tasks named and all paths resolved. Raises ConfigError if the
path is not a copy of the benchmark or lacks a file."""


def comparability(facts: Mapping[str, Any] | None, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a suite's summary. `changes` are settings that the benchmark lacks. `comparable` None means unknown."""
    if facts is None:
        return {"comparable": False, "comparability": _no(OWN_WORDS), "benchmark": None}
    name, differs = f"{facts['repo']} {facts['version']}", facts["differs"]
    said = {"clone": f"wording and data of {name}", "prompts": f"prompts that scripts of {name} wrote"}[facts["from"]]
    found = [f"{join_files(differs)} differ{'' if len(differs) > 1 else 's'} from {name}"] if differs else []
    why = [*found, *changes]
    data = facts.get("unchecked", [])
    if why:
        comparable, sentence = False, _no("; ".join(why))
    elif data:
        comparable = None
        sentence = (
            f"comparable with published numbers only if these files are the published ones. This was not checked, "
            f"because their hashes are not known: {join_files(data)}; {said}"
        )
    else:
        comparable, sentence = True, f"comparable with published numbers: {said}"
    return {"comparable": comparable, "comparability": sentence, "benchmark": dict(facts)}


def _no(why: str) -> str:
    return f"not comparable with published numbers: {why}"


def join_files(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_FILES
    return join_words([*names[:_NAMED_FILES], *([f"{rest} more files"] if rest > 0 else [])])


def hash_files(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Hash the content of files; ConfigError for a missing one."""
    found = {}
    for name in names:
        path = root / name
        if not path.is_file():
            raise ConfigError(f"reference {root}: {name} is missing; pass a complete clone of the public repository.")
        is_text = path.suffix in _TEXT_FILES
        found[name] = hash_text(path.read_bytes()) if is_text else digest_once(path)[:_HASH_LENGTH]
    return found


def hash_text(text: str | bytes) -> str:
    """Hash a text, independent of its line endings."""
    plain = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(plain.replace(b"\r\n", b"\n")).hexdigest()[:_HASH_LENGTH]


def differing(files: Mapping[str, str], known: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of files whose hash is not among the known hashes."""
    return tuple(name for name, found in files.items() if found not in known.get(name, ()))


def python_literals(path: Path) -> dict[str, list[Any]]:
    """Literals that a Python file assigns to names, in file order. Does not run the file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"reference {path}: cannot be read as Python ({error}); pass a clean clone.") from error
    found: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            continue
        try:
            found.setdefault(node.targets[0].id, []).append(ast.literal_eval(node.value))
        except ValueError:
            continue  # not a literal
    return found


class PromptFile(Sequence[Question]):
    """Questions of a JSONL file. Reads one at a time, because all together may not fit in memory."""

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], Question]) -> None:
        self._path, self._parse = path, parse
        self._starts: list[int] = []
        with path.open("rb") as file:
            start = 0
            for line in file:
                self._starts += [start] if line.strip() else []
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            return self._parse(json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{self._path}, record {index + 1}: not a prompt of this benchmark ({type(error).__name__}: {error})."
            ) from error


def cut_prompt(asked: Question, tokenizer: Any, most: int, *, apart: bool) -> Question:
    """Cut the middle out of a prompt longer than `most` tokens, like LongBench, LV-Eval and ∞Bench.

    The result is decoded from the kept tokens. `apart` decodes the two halves separately. A character that is split
    between two tokens may change.
    """
    ids = tokenizer(asked.context + asked.question + asked.prefix, verbose=False)["input_ids"]
    if len(ids) <= most:
        return asked
    head, tail = ids[: most // 2], ids[-(most // 2) :]
    parts = [head, tail] if apart else [head + tail]
    text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
    end = asked.question + asked.prefix
    if not text.endswith(end):
        return replace(asked, context=text, question="", prefix="")
    return replace(asked, context=text.removesuffix(end))
