"""A judge in this process: any model with a chat template."""

from collections.abc import Callable

from unspool.base.errors import ConfigError
from unspool.eval.asking import Asker
from unspool.eval.backend import Backend
from unspool.eval.judge.protocols import REPLY_TOKENS
from unspool.eval.prompt import Prompt, Question
from unspool.eval.task import Asked


def local_judge(backend: Backend) -> Callable[[str], str]:
    asker = Asker(backend.tokenizer)
    if not asker.has_template:
        raise ConfigError(
            "the judge's tokenizer has no chat template; use a model that was trained to follow instructions."
        )

    def ask(prompt: str) -> str:
        asked = Asked(context=prompt, question="", references=("",))
        ids = asker.ids(asked, chat=True)
        question = Question(ids=ids[-1:], reference="", depth=None)
        made = Prompt(
            suite="judge",
            length=len(ids) + REPLY_TOKENS,
            index=0,
            context_ids=ids[:-1],
            questions=[question],
            answer_tokens=REPLY_TOKENS,
            match="contains",
        )
        return backend.answers(made)[0]

    return ask
