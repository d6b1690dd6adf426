"""The page of a study file's keys, and of the bundled studies."""

from reference.keys import keys_table
from reference.markdown import anchor, code, fence, page, table
from reference.recipe_page import example, link
from unspool.recipe.paths import bundled_studies
from unspool.studies.paper_numbers import KEYS as PAPER_KEYS
from unspool.studies.schema import ARM_KEYS, KEYS, Margin

# Title and anchor of each section with keys.
SECTIONS = {"study": ("Top level", KEYS), "arms": ("arms", ARM_KEYS), "paper": ("paper", PAPER_KEYS)}


def study_page() -> str:
    intro = (
        "A study runs one recipe in several arms and seeds, and compares the arms with statistical tests. "
        "`unspool study FILE --dry-run` lists the runs."
    )
    listed = ((code(study.name), study.summary) for study in bundled_studies().values())
    parts = ["## Bundled studies { #bundled }\n", table(("name", "what it compares"), listed)]
    for name, (title, keys) in SECTIONS.items():
        rows = ((anchor(f"{name}-{key}") + code(key), text) for key, text in keys.items())
        parts += [
            f"## {title} {{ #{name} }}\n",
            fence(example(f"study: {name}"), "yaml"),
            table(("key", "meaning"), rows),
        ]
    parts += ["## margin { #margin }\n", fence(example("study: margin"), "yaml"), keys_table(Margin, "margin", link)]
    return page("Study keys", intro, parts)
