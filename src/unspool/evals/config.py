"""Base classes of the entries in a recipe's `evals`. Each suite defines its own class next to its code."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from unspool.core.config import Config, FromRegistry
from unspool.core.sizes import Size, format_size

Lengths = Annotated[list[Size], Field(min_length=1)]


BeyondContext = Literal["skip", "truncate", "ask"]


class EvalConfig(Config):
    """One entry of `evals`. The key `suite` selects its class."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # settings of papers' protocols, by name
    suite: str
    after: list[str] | None = Field(
        None, description="stages after which it is scored, or base for the model before training; all if none"
    )
    beyond_context: BeyondContext | None = Field(
        None,
        description="questions longer than the model's context: skip, truncate (cut the middle of the text) or ask; "
        "if none, they are asked, on a server skipped",
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

    preset: str | None = Field(None, description="a paper's settings by name; keys that stand beside it override them")
    lengths: Lengths
    samples: int = Field(100, ge=1, description="questions per task and length, spread evenly over depths and labels")
    tasks: list[str] = Field([], description="names of tasks; all of the suite when not given")
    mode: Literal["fixed", "reference"] = Field(
        "fixed", description="reference follows the suite's own code, defects included"
    )
    chat: Literal["auto", "on", "off"] = Field(
        "auto", description="auto: where the suite does, if the model has a template"
    )
    paths: dict[str, str] = Field(
        {}, description="name: file or folder that the suite reads instead of what is shipped"
    )
    answer_tokens: int | None = Field(
        None, ge=1, description="room for every answer, within the length; each task's own if none"
    )
    target_length: Size | None = Field(
        None, description="adaptation rate: the score at this length ÷ that at reference_length; 128K, else the longest"
    )
    reference_length: Size | None = Field(
        None, description="adaptation rate: what target_length is compared with; 32K, else the shortest"
    )

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
        description="your clone of the benchmark's public repository, or prompt files that its scripts wrote: makes "
        "scores comparable with published ones; our own words and data if none",
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
        None, description="YAML or JSON file with the words of tasks, such as a paper's own; our own words if none"
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
