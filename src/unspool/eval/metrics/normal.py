"""What answers are compared by: letter case, punctuation, articles and spaces taken away.

In: text. Out: text. English as SQuAD's script does it (HELMET and LV-Eval use it too), Chinese as LV-Eval does.
"""

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII = str.maketrans("", "", string.punctuation)
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠"
    "［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_WIDE = str.maketrans("", "", string.punctuation + _CHINESE)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces; articles go after punctuation, as "a." is one."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ASCII)).split())


def normalize_zh(text: str) -> str:
    """Lower case, no punctuation of either script, no spaces."""
    return "".join(text.lower().translate(_WIDE).split())
