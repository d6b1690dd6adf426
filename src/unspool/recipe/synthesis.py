"""Generate the `synth` sets of a recipe: tokenize their sources, then write a folder of conversations per set.

All checks run before the first request is sent. A set whose inputs and settings have not changed is not generated
again.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unspool.core.artifacts import digest, file_digest, read_manifest, stale_reason, write_atomic
from unspool.core.config import lookup
from unspool.data.sources.files import find_files
from unspool.data.tokenize.chat_template import load_template
from unspool.data.tokenize.encoder import build_encoder
from unspool.evals.backends.base import Backend
from unspool.evals.backends.transformers import ModelBackend
from unspool.evals.config import EvalConfig
from unspool.evals.heldout import heldout_digest
from unspool.evals.suites import suite_of
from unspool.models.weight_files import model_digest
from unspool.recipe.context import RunContext
from unspool.recipe.load import LoadedRecipe
from unspool.recipe.prepare import build_source, check_data_inputs
from unspool.recipe.schema import dump_recipe
from unspool.synthesis.config import SynthConfig
from unspool.synthesis.conversation import SynthInputs, TokenCounter
from unspool.synthesis.decontamination import NgramIndex, eval_texts, file_texts
from unspool.synthesis.documents import Documents
from unspool.synthesis.generators import build_client
from unspool.synthesis.requests import GeneratorReplies
from unspool.synthesis.run import KIND, generate
from unspool.synthesis.scheduler import Estimate, estimate
from unspool.synthesis.templates import load_templates

logger = logging.getLogger(__name__)

# Settings that do not affect a result: speed, retries, prices and the server's address.
_NOT_HASHED = {"concurrency", "requests_per_minute", "tokens_per_minute", "timeout", "attempts", "pause", "seconds"}
_NOT_HASHED |= {"url", "key_env", "price_in", "price_out"}


class Synthesis:
    """The sets of one recipe; the constructor runs all checks that need no work."""

    def __init__(self, loaded: LoadedRecipe, names: Sequence[str] = ()) -> None:
        sets = loaded.recipe.synth
        self.sets = {name: lookup(sets, name, kind="synth set") for name in names} if names else sets
        used = {source for config in self.sets.values() for source in config.sources}
        sources = {name: source for name, source in loaded.recipe.sources.items() if name in used}
        # Datasets and stages may use sets that are not generated yet, so they are not checked.
        narrowed = loaded.recipe.model_copy(update={"sources": sources, "datasets": {}, "stages": []})
        self.loaded = replace(loaded, recipe=narrowed)
        self.recipe, self.out = narrowed, narrowed.out
        self.context = RunContext(loaded=self.loaded)
        check_data_inputs(self.context)
        self.tokenizer = self.context.tokenizer
        self._whole_recipe = loaded.recipe
        self.templates = {
            name: load_templates(None if config.templates is None else Path(loaded.path(config.templates)))
            for name, config in self.sets.items()
        }
        self.counters = {name: self._counter(name, config) for name, config in self.sets.items()}
        for config in self.sets.values():
            self._files(config)

    def corpora(self) -> dict[str, dict[str, Any]]:
        """Create the run folder and tokenize the documents of all sets; return the counts by source."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomic(self.out / "recipe.yaml", dump_recipe(self._whole_recipe))
        self.context.note()
        return {name: build_source(self.context, name) for name in self.recipe.sources}

    def estimates(self) -> dict[str, Estimate]:
        """Estimate requests, cost and time of every set; the corpora must exist."""
        with self._replies() as replies:
            return {name: estimate(config, self._documents(config), replies) for name, config in self.sets.items()}

    def make(self) -> dict[str, dict[str, Any]]:
        """Generate every set that is not up to date; return the counts of their manifests and of this process."""
        results = {}
        with self._replies() as replies:
            for name, config in self.sets.items():
                with self.context.timed(f"synth/{name}"):
                    results[name] = self._make(name, config, replies)
        return results

    def folder(self, name: str) -> Path:
        return self.out / "synth" / name

    def _make(self, name: str, config: SynthConfig, replies: GeneratorReplies) -> dict[str, Any]:
        documents = self._documents(config)
        generator = build_client(config.generator, replies, open_backend=self._open_backend)
        judge = None if config.judge is None else build_client(config.judge, replies, open_backend=self._open_backend)
        input_hashes = self._input_hashes(name, config)
        input_hashes |= {"generator": generator.identity, "judge": judge and judge.identity}
        settings = {"synth": _settings(config), "seed": self._seed(config)}
        reason = stale_reason(self.folder(name), kind=KIND, inputs=input_hashes, settings=settings)
        if reason is None:
            logger.info(f"synth {name}: up to date")
            return self._result(name, made=False)
        logger.info(f"synth {name}: {estimate(config, documents, replies)} ({reason})")
        inputs = SynthInputs(
            config=config,
            documents=documents,
            templates=self.templates[name],
            generator=generator,
            judge=judge,
            counter=self.counters[name],
            evaluations=self._evaluations(config),
            seed=self._seed(config),
        )
        generate(name, inputs, self.folder(name), input_hashes=input_hashes, settings=settings)
        stats = vars(generator.stats) | {"errors": dict(generator.stats.errors)}
        return self._result(name, made=True) | {"requests": stats, "errors_of_all_runs": dict(replies.errors)}

    def _result(self, name: str, *, made: bool) -> dict[str, Any]:
        manifest = read_manifest(self.folder(name))
        assert manifest is not None
        return {"folder": str(self.folder(name)), "made": made, **manifest["counts"]}

    def _documents(self, config: SynthConfig) -> Documents:
        corpora = {source: self.out / "corpus" / source for source in config.sources}
        return Documents(config, corpora, self.tokenizer, seed=self._seed(config))

    def _input_hashes(self, name: str, config: SynthConfig) -> dict[str, Any]:
        corpora = {source: read_manifest(self.out / "corpus" / source) or {} for source in config.sources}
        evals = self.loaded.evals() if config.decontaminate.evals else []
        return {
            "corpora": {source: digest(manifest.get("files")) for source, manifest in corpora.items()},
            "tokenizer": build_encoder(self.tokenizer).digest,
            "wording": self.templates[name].digest,
            "chat_template": self.counters[name].digest,
            "evals": [[entry.model_dump(mode="json"), _heldout(entry)] for entry in evals],
            "files": {path.name: file_digest(path) for path in self._files(config)},
        }

    def _evaluations(self, config: SynthConfig) -> NgramIndex:
        index = NgramIndex(config.decontaminate.ngram)
        if config.decontaminate.evals:
            index.add(eval_texts(self.loaded.evals(), self.tokenizer, seed=self.recipe.seed, root=Path()))
        index.add(file_texts([self.loaded.path(path) for path in config.decontaminate.files]))
        if index.num_texts:
            logger.info(f"decontamination: {len(index):,} n-grams of {index.num_texts:,} evaluation texts")
        return index

    def _files(self, config: SynthConfig) -> list[Path]:
        """List the files with evaluation texts; ConfigError if one is missing."""
        given = [self.loaded.path(path) for path in config.decontaminate.files]
        return [file for path in given for file in find_files(path, Path(), kind="text", endings=("",))]

    def _counter(self, name: str, config: SynthConfig) -> TokenCounter:
        given = config.chat_template
        template = None if given is None else load_template(Path(self.loaded.path(given)))
        counter = TokenCounter(self.tokenizer, template, name=name)
        if counter.encoder is None:
            logger.warning(
                f"synth {name}: the tokenizer has no chat template, so only the tokens of messages are counted"
            )
        return counter

    def _open_backend(self, ref: str) -> tuple[Backend, str]:
        path = self.loaded.model_path(ref)
        device = torch.device("cuda" if self.recipe.device != "cpu" and torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return ModelBackend(path, device=device, dtype=dtype), model_digest(path)

    def _replies(self) -> GeneratorReplies:
        return GeneratorReplies(self.out / "replies" / "synth.jsonl")

    def _seed(self, config: SynthConfig) -> int:
        return self.recipe.seed if config.seed is None else config.seed


def _settings(config: SynthConfig) -> dict[str, Any]:
    plain = config.model_dump(mode="json", by_alias=True, exclude={"templates", "chat_template"})
    plain["decontaminate"].pop("files")
    for name in ("generator", "judge"):
        if plain[name] is not None:
            plain[name] = {key: value for key, value in plain[name].items() if key not in _NOT_HASHED}
    return plain


def _heldout(entry: EvalConfig) -> dict[str, str] | None:
    heldout = suite_of(entry).heldout(entry)
    return None if heldout is None else heldout_digest(heldout.text, Path())
