"""The instructions of HELMET's tasks, in words of our own: they ask for the same and fix the same forms of answers.

What scorers depend on is as in HELMET (`Answer:`, `Ranking: ID3 > ID1 > ID2`, `label: …`, `[x]` for citations); the
sentences around it are not, so that scores can differ from published ones by what wording does. A user's own words can
stand for any of them: `FORMS` says which texts a task has.
"""

from unspool.evals.suites.ruler.task_texts import FORMS as RULER
from unspool.evals.wording import PREFIX, TEMPLATE, Form, Text, Wording, literal

RAG = (
    "Read the documents and answer the question in as few words as possible. Give your answer in this form:\n"
    "Answer: [answer]\n\n"
)
KV = "\n\nLook up the key that is asked for in the JSON object and give the value that belongs to it.\n\n"
RERANK = (
    "Below are documents, each with an ID. Order all of them by how well they help to answer the question, the best "
    "one first, and leave none out. Answer with their IDs in this form:\nRanking: ID3 > ID1 > ID2\n\n"
)
ICL = (
    "The examples show which label each text has. Give the last text its label. "
    'Answer with "label: {label}" and nothing more. \n\n'
)
CITE = {
    "asqa": (
        "Instruction: Answer the question precisely and in a few sentences, from the search results alone; not all of "
        "them are about it. Stay neutral. Say where every statement comes from: write the number of the document in "
        "square brackets, as in [x], and several numbers one after another, as in [x][y][z]. Every sentence needs one "
        "to three documents, and no more than are needed to support it."
    ),
    "qampari": (
        "Instruction: List the answers to the question, from the search results alone; not all of them are about it. "
        "Put commas between answers. After each answer write the number of the one document it comes from in square "
        "brackets, as in [x]. Where there are more than five answers, give at least five."
    ),
}
BOOKS = {
    "narrativeqa": (
        "Below is a story, a novel or the script of a film, and then a question about it. Answer with a short phrase "
        "where one is enough.\n\n"
    ),
    "infbench_qa": (
        "Below is a story, and then a question about it. Answer with a short phrase where one is enough.\n\n"
    ),
    "infbench_mc": (
        "Below is a story, and then a question with four options, one of which is right. Answer with its letter (A, B, "
        "C or D) and nothing more.\n\n"
    ),
    "infbench_sum": (
        "Below is a book. Tell its plot and its characters in 1000 to 1200 words. Leave out themes, background, "
        "analysis and opinion.\n\n"
    ),
    "multi_lexsum": (
        "Below are the documents of a civil rights lawsuit. Sum the case up in one paragraph of 200 to 250 words: how "
        "it came about, who the parties were, how it ended.\n\n"
    ),
}
OMITTED = " ... [what follows is left out]"
PASSAGE, DEMO, DEMOS, NO_DEMOS, OMITTED_NOTICE = "passage", "demo", "demos", "no_demos", "omitted"
UNTITLED = "passage_untitled"


def _asked(template: str, prefix: str, *needs: str, demos: bool = True) -> Form:
    return {
        TEMPLATE: Text(own=template, needs=("context", *needs), may=("demos",) if demos else ()),
        PREFIX: Text(own=prefix),
    }


def _demo(own: str, *needs: str) -> Form:
    return {DEMO: Text(own=own, needs=needs)}


def _rag() -> Form:
    return {
        **_asked(literal(RAG) + "{demos}{context}\n\nQuestion: {question}\n", "Answer:", "question"),
        **_demo("{documents}\n\nQuestion: {question}\nAnswer: {answer}\n\n", "documents", "question", "answer"),
        PASSAGE: Text(own="Document (Title: {title}): {text}", needs=("text",), may=("title",)),
    }


def _cite(task: str) -> Form:
    said = literal(CITE[task])
    return {
        **_asked(f"{{demos}}{said}\n\nQuestion: {{question}}\n\n{{context}}\n\n", "Answer:", "question"),
        **_demo(
            f"{said}\n\nQuestion: {{question}}\n\n{{documents}}\n\nAnswer: {{answer}}\n\n\n",
            *("documents", "question", "answer"),
        ),
        PASSAGE: Text(own="Document [{id}](Title: {title}): {text}", needs=("id", "text"), may=("title",), first="id"),
    }


def _book(task: str, asked: str, demo: str, demos: tuple[str, str], *needs: str) -> Form:
    prefix = "Answer:" if "question" in needs else "Summary:"
    listed, none = demos
    return {
        **_asked(literal(BOOKS[task]) + "{demos}{context}\n\n" + asked, prefix, *needs),
        **_demo(demo, *needs, "answer"),
        DEMOS: Text(own=listed, needs=("demos",)),
        NO_DEMOS: Text(own=none),
        OMITTED_NOTICE: Text(own=OMITTED),
    }


_STORY = ("For example:\n\n{demos}\n\nNow, read the following story:\n\n", "")
_CASES = (
    "Example summaries:\n\n{demos}\n\nNow, write a summary of the following legal documents.\nLegal documents:\n",
    "Legal documents:\n",
)
_OPTIONS = "Question: {question}\nOptions:\n{options}"
FORMS: dict[str, Form] = {
    "json_kv": {
        **_asked(
            f"JSON data:\n{{context}}{literal(KV)}{{demos}}Key: {{question}}\n", "Corresponding value:", "question"
        ),
        **_demo("Key: {question}\nCorresponding value: {answer}\n\n", "question", "answer"),
    },
    **{name: RULER[name] for name in ("niah_multikey_2", "niah_multikey_3", "niah_multivalue")},
    **{name: _rag() for name in ("nq", "triviaqa", "hotpotqa", "popqa")},
    "msmarco": {
        **_asked(literal(RERANK) + "{demos}{context}\n\nQuery: {question}\n", "Ranking:", "question"),
        **_demo("{documents}\n\nQuery: {question}\nRanking: {answer}\n\n", "documents", "question", "answer"),
        PASSAGE: Text(
            own="[ID: {id}] Document (Title: {title}): {text}", needs=("id", "text"), may=("title",), first="id"
        ),
        UNTITLED: Text(own="[ID: {id}] Document: {text}", needs=("id", "text"), first="id"),
    },
    **{name: _cite(name) for name in CITE},
    "narrativeqa": _book(
        "narrativeqa",
        "Question: {question}\n",
        "Question: {question}\nAnswer: {answer}",
        ("For example:\n\n{demos}\n\nNow, use the following story to answer the question:\n\n", ""),
        "question",
    ),
    "infbench_qa": _book(
        "infbench_qa",
        "Question: {question}\n\n",
        "[story text]\nQuestion: {question}\nAnswer: {answer}",
        _STORY,
        "question",
    ),
    "infbench_mc": _book(
        "infbench_mc", f"{_OPTIONS}\n\n", f"[story text]\n{_OPTIONS}\nAnswer: {{answer}}", _STORY, "question", "options"
    ),
    "infbench_sum": _book("infbench_sum", "Now summarize the book.\n\n", "[story text]\nSummary: {answer}", _STORY),
    "multi_lexsum": _book("multi_lexsum", "Now please summarize the case.\n\n", "Summary: {answer}", _CASES),
    **{
        name: {
            **_asked(literal(ICL) + "{context}\n\n{question}\n", "label:", "question", demos=False),
            **_demo("{text}\nlabel: {label}", "text", "label"),
        }
        for name in ("trec_coarse", "trec_fine", "banking77", "clinc150", "nlu")
    },
}
OWN = Wording(forms=FORMS)
