"""The instructions of LV-Eval's tasks, in words of our own: before the article, between it and the question, after.

Every instruction is given twice, so that it is near the question and near the beginning. A user's own words can stand
for them; {input} is what LV-Eval calls the question.
"""

from unspool.eval.wording import PREFIX, TEMPLATE, Form, Text, Wording, literal

_ONE = "Only one of the passages matters for it."
_SOME = "Only some of the passages matter for it."
_ONLY = "Give just the answer, without reasons or quotations."
_ZH_ONE = "只有一篇文章与问题相关。"
_ZH_ONLY = "请直接写出答案，不必说明理由或引用原文。"


def _english(before: str, after: str) -> tuple[str, str, str]:
    return f"{before}\n\nArticle: ", f"\n\n{after}\n\nQuestion: ", "Answer:"


def _chinese(before: str, after: str) -> tuple[str, str, str]:
    return f"{before}\n\n文章：", f"\n\n{after}\n\n问题：", "回答："


_LOOGLE = _english(
    f"The passages below answer a question. {_ONE} {_ONLY}",
    f"Answer the question from the passages above. {_ONE} {_ONLY}",
)
_ARTICLES = "下面的文章可以回答一个问题，" + _ZH_ONE
PROMPTS: dict[str, tuple[str, str, str]] = {
    "hotpotwikiqa_mixup": _english(
        f"The passages below answer a question. {_SOME} {_ONLY}",
        f"Answer the question from the passages above. {_SOME} {_ONLY}",
    ),
    "loogle_SD_mixup": _LOOGLE,
    "loogle_CR_mixup": _LOOGLE,
    "loogle_MIR_mixup": _LOOGLE,
    "multifieldqa_en_mixup": _LOOGLE,
    "multifieldqa_zh_mixup": _chinese(
        f"下面的文章可以回答一个问题，请用中文作答。{_ZH_ONE}{_ZH_ONLY}",
        f"请从上面的文章中找出答案。{_ZH_ONE}{_ZH_ONLY}",
    ),
    "factrecall_en": _english(
        "The article below answers a question.",
        "Answer the question from the article above.",
    ),
    "factrecall_zh": _chinese("下面的文章可以回答一个问题。", "请从上面的文章中找出答案。"),
    "cmrc_mixup": _chinese(_ARTICLES, f"请从上面的文章中找出答案，{_ZH_ONE}"),
    "lic_mixup": _chinese(_ARTICLES, f"请从上面的文章中找出答案，{_ZH_ONE}"),
    "dureader_mixup": _chinese(_ARTICLES, f"请从上面的文章中找出答案，{_ZH_ONE}"),
}
FORMS: dict[str, Form] = {
    task: {
        TEMPLATE: Text(own=f"{literal(before)}{{context}}{literal(between)}{{input}}\n", needs=("context", "input")),
        PREFIX: Text(own=cue),
    }
    for task, (before, between, cue) in PROMPTS.items()
}
OWN = Wording(forms=FORMS)
