"""The instructions of HELMET's tasks, in words of our own: they ask for the same and fix the same forms of answers.

What scorers depend on is as in HELMET (`Answer:`, `Ranking: ID3 > ID1 > ID2`, `label: …`, `[x]` for citations); the
sentences around it are not, so that scores can differ from published ones by what wording does.
"""

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


def document(title: str, text: str) -> str:
    return f"Document (Title: {title}): {text}"


def numbered(number: str, title: str, text: str) -> str:
    return f"[ID: {number}] " + (document(title, text) if title else f"Document: {text}")


def cited(number: int, title: str, text: str) -> str:
    return f"Document [{number}](Title: {title}): {text}"
