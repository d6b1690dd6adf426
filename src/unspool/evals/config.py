"""Base classes of the entries in a recipe's `evals`. Each suite defines its own class next to its code."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, TypeAdapter, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from unspool.core.config import Config, FromRegistry
from unspool.core.sizes import Size, format_size

Lengths = Annotated[list[Size], Field(min_length=1)]


BeyondContext = Literal["skip", "truncate", "ask"]


class EvalConfig(Config):
    """One entry of `evals`. The key `suite` selects its class."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # settings of papers' protocols, by name
    suite: str = Field(description="Name of the suite.")
    after: list[str] | None = Field(
        None,
        description="Stages after which the suite is scored. `base` means the model before training. Default: `base` "
        "and every stage.",
    )
    beyond_context: BeyondContext | None = Field(
        None,
        description="What happens to questions that exceed the model's context length: `skip` them, `truncate` the "
        "middle of their text, or `ask` them unchanged. Default: `ask`; on a server, `skip`.",
    )

    def asked_lengths(self, lengths: list[int], context: int | None) -> list[int]:
        """The lengths to run for a model with this context length."""
        if context is None or self.beyond_context != "skip":
            return lengths
        return [length for length in lengths if length <= context]

    def cut_to(self, context: int | None) -> int | None:
        """Number of tokens to which longer prompts are cut; None if they are not cut."""
        return context if self.beyond_context == "truncate" else None


class TaskEval(EvalConfig):
    """Settings common to all suites with tasks."""

    preset: str | None = Field(
        None, description="Name of a paper's settings. Keys of this entry override the preset's."
    )
    lengths: Lengths = Field(
        description="Context lengths to score. Template, prompt and answer together never exceed the length. "
        "Required unless `preset` sets them."
    )
    samples: int = Field(100, ge=1, description="Questions per task and length, spread evenly over depths and labels.")
    tasks: list[str] = Field([], description="Names of the tasks to score. Default: all tasks of the suite.")
    mode: Literal["fixed", "reference"] = Field(
        "fixed",
        description="`reference` follows the benchmark's own code, including its defects; `fixed` corrects them.",
    )
    chat: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Use of the model's chat template in prompts. `auto` uses it if the benchmark does and the "
        "model has one.",
    )
    paths: dict[str, str] = Field(
        {}, description="Files or folders that replace the suite's bundled data, by data set name."
    )
    answer_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens reserved for each answer within the length. Default: the number set by each task.",
    )
    target_length: Size | None = Field(
        None,
        description="Length whose score is divided by the score at `reference_length` to give the adaptation rate. "
        "Default: 128K if 32K and 128K are scored, otherwise the longest.",
    )
    reference_length: Size | None = Field(
        None,
        description="Length whose score divides the score at `target_length`. Default: 32K if 32K and 128K are "
        "scored, otherwise the shortest.",
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Require `lengths` only of entries without a preset."""
        found = handler.resolve_ref_schema(handler(schema))
        if cls.presets:
            found["required"].remove("lengths")
            found |= {"if": {"not": {"required": ["preset"]}}, "then": {"required": ["lengths"]}}
        return found

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        name = data.get("preset") if isinstance(data, dict) else None
        if name is None:
            return data
        if name not in cls.presets:
            known = f"known: {', '.join(cls.presets)}" if cls.presets else "the suite has none"
            raise ValueError(f"preset {name!r} is not known; {known}")
        return {**cls.presets[name], **data}

    @model_validator(mode="after")
    def _rate_was_scored(self) -> Self:
        for key in ("target_length", "reference_length"):
            length = getattr(self, key)
            if length is not None and length not in self.lengths:
                scored = ", ".join(map(format_size, self.lengths))
                raise ValueError(f"{key} {format_size(length)} is not among lengths, which are {scored}")
        return self


class ReferenceEval(TaskEval):
    """Settings of suites that can read a user's own copy of the public benchmark."""

    reference: str | None = Field(
        None,
        description="Your clone of the benchmark's public repository, or prompt files written by its scripts. Scores "
        "are then comparable with published ones. Default: the suite's own wording and data.",
    )

    @model_validator(mode="before")
    @classmethod
    def _reference_decides(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("reference") is None:
            return data
        if data.get("mode", "reference") != "reference":
            raise ValueError("reference follows the benchmark's own code; remove mode, or set mode: reference")
        if data.get("wording") is not None:
            raise ValueError("reference and wording both set the wording of tasks; keep one of them")
        return {**data, "mode": "reference"}


class WordedEval(ReferenceEval):
    """Settings of suites whose instructions a user may replace."""

    wording: str | None = Field(
        None,
        description="YAML or JSON file with the wording of the tasks, such as a paper's. Default: the suite's own "
        "wording.",
    )


class _SuiteConfigs(FromRegistry):
    """Looks up an entry's class by its suite, including suites registered later."""

    def classes(self) -> tuple[type[EvalConfig], ...]:
        # Import late: suites import their base classes from here.
        from unspool.evals.suites import SUITES

        return tuple(suite.config for suite in SUITES.values())


_BY_SUITE = _SuiteConfigs({}, "suite")
Eval = Annotated[EvalConfig, _BY_SUITE]


def eval_adapter() -> TypeAdapter[Any]:
    """Validate an entry with the config class of its suite."""
    return _BY_SUITE.adapter()
