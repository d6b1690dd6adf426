"""List every string that a user or a developer reads, with its place and kind.

    python tools/strings.py --kind error src/unspool/data
    python tools/strings.py --docs --sample 50 --seed 1

Strings are found in the syntax tree: help texts, messages of errors, log lines, printed text, docstrings and comments
of Python files, texts of page templates, comments and sentences of YAML files. `--sample` draws whole sentences, the
same number of each kind if there are enough. Prompts of evaluation suites are data and are not listed.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
KINDS = ("help", "error", "log", "text", "doc", "comment", "yaml", "html", "page")
HELP_KEYWORDS = {"help", "description", "epilog", "short_help"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception"}
# Texts of these calls count even if they have a single word.
PRINTING = {"echo", "print", "add_column", "progress_bar", "long_bar", "Table", "entries"}
SUFFIXES = (".py", ".pyi", ".yaml", ".yml", ".j2", ".html", ".md")
# Prompts and documents that models read are data.
PROMPTS = re.compile(r"evals/suites/|sources/synthetic/|synthesis/templates|assets/")
ERROR_CALL = re.compile(r"Problem|\w*Error|warn|fail|_?refuse")
COMMAND = re.compile(r"\.(command|callback)\(")
DIRECTIVE = re.compile(r"#\s*(type:|noqa|mypy:|pragma|!)")
MARKUP = re.compile(r"<(style|script)\b.*?</\1>|{%.*?%}|{#.*?#}|<[^>]*>", re.S)
ATTRIBUTE = re.compile(r'\b(?:title|aria-label|placeholder|alt)="([^"]+)"')
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"{(])")
WORD = re.compile(r"[A-Za-z]{2,}")


@dataclass(frozen=True)
class Found:
    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.kind}: {self.text}"


def strings_of(path: Path) -> Iterator[Found]:
    """Yield the strings of one Python, YAML, template or Markdown file."""
    text = path.read_text(encoding="utf-8")
    readers = {".yaml": _yaml, ".yml": _yaml, ".j2": _template, ".html": _template, ".md": _markdown}
    if path.suffix in (".py", ".pyi"):
        found = [*_Strings(text, is_report="reporting" in path.parts).found, *_comments(text)]
    else:
        found = [*readers[path.suffix](text)]
    is_prompt = PROMPTS.search(path.as_posix()) is not None
    for line, kind, string in sorted(found):
        if WORD.search(string) and not (is_prompt and kind in ("text", "yaml", "html", "page")):
            yield Found(path, line, kind, " ".join(string.split()))


class _Strings(ast.NodeVisitor):
    """Collect the strings of a Python file with the kind of the innermost call or statement around them."""

    def __init__(self, source: str, *, is_report: bool) -> None:
        self._other = "html" if is_report else "text"
        self._kind: str | None = None  # None: a string in plain code, shown if it reads like a phrase
        self.found: list[tuple[int, str, str]] = []
        self.visit(ast.parse(source))

    def _within(self, kind: str | None, node: ast.AST) -> None:
        outer, self._kind = self._kind, kind
        self.generic_visit(node)
        self._kind = outer

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        is_command = any(COMMAND.search(ast.unparse(decorator)) for decorator in node.decorator_list)
        doc = ast.get_docstring(node)
        if is_command and doc:
            self.found.append((node.body.pop(0).lineno, "help", doc))
        self._within(None, node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            self.found.append((node.lineno, "doc", node.value.value))
        else:
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._within("error", node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = str(getattr(function, "attr", None) or getattr(function, "id", ""))
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        kind = self._kind
        if ERROR_CALL.fullmatch(name):
            kind = "error"
        elif owner.endswith(("logger", "logging")) and name in LOG_METHODS:
            kind = "log"
        elif name in PRINTING:
            kind = self._other
        elif self._kind not in ("error", "log") and name not in ("join", "format"):
            kind = None
        self._within(kind, node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self._within("help" if node.arg in HELP_KEYWORDS else self._kind, node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if not isinstance(node.slice, ast.Constant):  # a key is no text
            self.visit(node.slice)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Strings that are compared are names."""

    def visit_BinOp(self, node: ast.BinOp) -> None:
        literals = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        if isinstance(node.op, ast.Add) and literals:
            self._add(node, _shown(node))
        else:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._add(node, _shown(node))

    def visit_Constant(self, node: ast.Constant) -> None:
        self._add(node, node.value if isinstance(node.value, str) else "")

    def _add(self, node: ast.expr, text: str) -> None:
        literal = re.sub(r"{[^}]*}", " ", text)
        is_phrase = len(WORD.findall(literal)) > 1 and " " in literal.strip() and not re.search(r"\(\?|\\[dswb]", text)
        if is_phrase or (self._kind is not None and WORD.search(literal) and not re.fullmatch(r"[a-z_.]+", text)):
            self.found.append((node.lineno, self._kind or self._other, text))


def _shown(node: ast.expr) -> str:
    """The text of a string expression, with what is filled in between braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_shown(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _shown(node.left) + _shown(node.right)
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"


def _comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Comments; those on consecutive lines of their own are one."""
    lines = source.splitlines()
    blocks: list[tuple[int, list[str]]] = []
    next_line = -1  # where a comment continues the last one
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            line, column = token.start
            is_own_line = not lines[line - 1][:column].strip()
            if not (is_own_line and line == next_line):
                blocks.append((line, []))
            blocks[-1][1].append(token.string.lstrip("# "))
            next_line = line + 1 if is_own_line else -1
    return ((line, "comment", " ".join(texts)) for line, texts in blocks)


def _yaml(source: str) -> Iterator[tuple[int, str, str]]:
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        before, mark, comment = line.partition("#")
        if block and (before.strip() or not comment.strip()):  # also at an empty comment line
            yield number - len(block), "yaml", " ".join(block)
            block = []
        if comment.strip() and not before.strip():
            block.append(comment.strip())
        elif mark and before.endswith(" "):
            yield number, "yaml", comment.strip()
    nodes = [yaml.compose(source)]
    for node in nodes:  # grows
        if isinstance(node, yaml.ScalarNode) and len(WORD.findall(node.value)) > 2 and " " in node.value:
            yield node.start_mark.line + 1, "yaml", node.value
        elif isinstance(node, yaml.CollectionNode):
            nodes += [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]


def _template(source: str) -> Iterator[tuple[int, str, str]]:
    at = 0
    for mark in [*MARKUP.finditer(source), None]:
        text = source[at : mark.start() if mark else len(source)]
        if WORD.search(re.sub(r"{{.*?}}", "", text, flags=re.S)):
            line = source.count("\n", 0, at + len(text) - len(text.lstrip())) + 1
            yield line, "html", re.sub(r"{{\s*(.*?)\s*}}", r"{\1}", text, flags=re.S)
        if mark:
            line = source.count("\n", 0, mark.start()) + 1
            yield from ((line, "html", attribute) for attribute in ATTRIBUTE.findall(mark[0]))
            at = mark.end()


def _markdown(source: str) -> Iterator[tuple[int, str, str]]:
    """Paragraphs, list items and rows of tables; code blocks are left out."""
    text = re.sub(r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), source, flags=re.S | re.M)
    for found in re.finditer(r"\S.*(?:\n(?!\s*(?:[-*|#>]|\d+\.))[^\n]*\S.*)*", text):
        yield text.count("\n", 0, found.start()) + 1, "page", found[0]


def sample(strings: Sequence[Found], count: int, seed: int) -> list[Found]:
    """Draw whole sentences at random, in turn from each kind."""
    by_kind: dict[str, list[Found]] = {}
    for found in strings:
        for sentence in SENTENCE_END.split(found.text):
            if len(WORD.findall(sentence)) > 3 and sentence.count("{") == sentence.count("}"):
                by_kind.setdefault(found.kind, []).append(Found(found.path, found.line, found.kind, sentence))
    draw = random.Random(seed)
    for sentences in by_kind.values():
        draw.shuffle(sentences)
    drawn: list[Found] = []
    while len(drawn) < count and any(by_kind.values()):
        drawn += [by_kind[kind].pop() for kind in KINDS if by_kind.get(kind)]
    return drawn[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders; default: src/unspool")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; may be given several times")
    parser.add_argument("--docs", action="store_true", help="also README.md and the pages in docs/")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N sentences at random")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the draw; default: 1")
    options = parser.parse_args(arguments)
    roots = [path.resolve() for path in options.paths] or [ROOT / "src" / "unspool"]
    if options.docs:
        roots += [ROOT / "README.md", ROOT / "docs"]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *roots], cwd=ROOT, capture_output=True, check=True
    )
    files = {ROOT / name for name in listed.stdout.decode().splitlines() if name.endswith(SUFFIXES)}
    found = [string for path in sorted(files) if path.exists() for string in strings_of(path)]
    found = [string for string in found if string.kind in (options.kind or KINDS)]
    for string in found if options.sample is None else sample(found, options.sample, options.seed):
        print(string)


if __name__ == "__main__":
    main()
