"""Stand-in data in the public layout of HELMET's files and Hub datasets, for comparisons without network."""

import json
import random
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = [
    a + b + c for a in ("ba", "do", "ke", "mi") for b in ("la", "no", "ri", "su", "te") for c in ("n", "r", "s", "x")
]
CURSED = ["{braces}", "“quoted”", "naïve", "tab\there", "100%", "[4]", "end."]
QUESTIONS = 130
LABELS = {"trec_coarse": 6, "trec_fine": 50, "banking77": 77, "clinc150": 151, "nlu": 68}


def say(rng: random.Random, count: int) -> str:
    """Return words, some with characters that are difficult for templates and tokenizers."""
    return " ".join(rng.choice(CURSED) if rng.random() < 0.03 else rng.choice(WORDS) for _ in range(count))


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def passages(rng: random.Random, count: int, gold: int, answer: str) -> list[dict[str, Any]]:
    return [
        {
            "id": str(rng.randint(1, 10**6)),
            "title": say(rng, 2),
            "text": say(rng, rng.randint(20, 90)) + (f" {answer}." if at == gold else ""),
            "has_answer": at == gold,
        }
        for at in range(count)
    ]


def qa_rows(seed: int, count: int, depths: int, *, has_id: bool, is_popqa: bool) -> list[dict[str, Any]]:
    found = []
    for number in range(QUESTIONS):
        rng = random.Random(seed * 1000 + number)
        answer = say(rng, 2)
        row = {"question": f"{say(rng, 6)} {number}?", "answers": [answer, say(rng, 1)]}
        if has_id:
            row = {"id": f"q{number}" if not is_popqa else number, **row}
        if is_popqa:
            row["s_pop"] = 10 ** rng.randint(1, 4) + rng.randint(0, 5)
        for depth in range(depths):
            gold = round(depth / max(1, depths - 1) * (count - 1))
            found.append({**row, "ctxs": passages(rng, count, gold, answer), "depth": depth / max(1, depths - 1)})
    return found


def write_kilt(data: Path, count: int) -> None:
    for at, task in enumerate(("nq", "triviaqa", "hotpotqa", "popqa")):
        depths, has_id = (3, True) if task == "hotpotqa" else (6, task != "nq")
        names = (
            ("popqa_test", "popqa_test") if task == "popqa" else (f"{task}-dev-multikilt", f"{task}-train-multikilt")
        )
        options = {"has_id": has_id, "is_popqa": task == "popqa"}
        write_lines(data / f"kilt/{names[0]}_1000_k{count}_dep{depths}.jsonl", qa_rows(at, count, depths, **options))
        seed = at if task == "popqa" else 10 + at
        write_lines(data / f"kilt/{names[1]}_1000_k3_dep{depths}.jsonl", qa_rows(seed, 3, depths, **options))


def rank_rows(seed: int, count: int, *, titled: bool) -> list[dict[str, Any]]:
    found = []
    for number in range(QUESTIONS):
        rng = random.Random(seed * 1000 + number)
        for _ in range(3):
            ids = [str(one) for one in rng.sample(range(1, 5000), count)]
            judged = [
                {"id": ids[at], "text": say(rng, rng.randint(10, 70)), "label": rng.choice((0, 0, 0, 1, 2, 3))}
                | ({"title": say(rng, 2)} if titled else {})
                for at in range(count)
            ]
            found.append({"qid": f"m{number}", "query": f"{say(rng, 5)} {number}", "ctxs": judged})
    return found


def write_msmarco(data: Path, count: int) -> None:
    write_lines(data / f"msmarco/test_reranking_data_k{count}_dep3.jsonl", rank_rows(3, count, titled=False))
    write_lines(data / "msmarco/test_reranking_data_k10_dep3.jsonl", rank_rows(3, 10, titled=False))


def write_json_kv(data: Path, count: int) -> None:
    rows = []
    for number in range(QUESTIONS):
        rng = random.Random(number)
        pairs = [[str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(2)] for _ in range(count)]
        text = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
        asked = rng.randrange(count)
        demos = [pair for pair in rng.sample(pairs, 4) if pair is not pairs[asked]][:3]
        row = {"context": f"JSON data:\n{{{text}}}", "question": pairs[asked][0], "answer": pairs[asked][1]}
        rows.append({**row, "demos": demos, "num_kvs": count, "depth": (number % 6) / 5})
    write_lines(data / f"json_kv/test_k{count}_dep6.jsonl", rows)


def write_ruler(data: Path, length: int) -> None:
    for task, values in (("niah_multikey_2", 1), ("niah_multikey_3", 1), ("niah_multivalue", 4)):
        rows = []
        for number in range(QUESTIONS):
            rng = random.Random(number)
            answers = [str(rng.randint(10**6, 10**7)) for _ in range(values)]
            context = "\n".join(say(rng, 12) for _ in range(60)) + " " + " ".join(answers)
            kind = "numbers" if values > 1 else "number"
            rows.append({"context": context, "query": say(rng, 1), "type_needle_v": kind, "answer": answers})
        write_lines(data / f"ruler/{task}/validation_{length}.jsonl", rows)


def write_alce(data: Path, most: int) -> None:
    for seed, task in enumerate(("asqa", "qampari")):
        rows = []
        for number in range(QUESTIONS):
            rng = random.Random(seed * 1000 + number)
            names = [[say(rng, rng.randint(1, 2)) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 8))]
            documents = [
                {"id": str(at), "title": say(rng, 2), "text": say(rng, rng.randint(20, 100)), "score": rng.random()}
                for at in range(most)
            ]
            row = {"id": f"a{number}", "question": f"{say(rng, 6)}?", "answer": say(rng, 20), "docs": documents}
            pairs = {"qa_pairs": [{"question": say(rng, 4), "short_answers": one} for one in names]}
            rows.append(row | (pairs if task == "asqa" else {"answers": names}))
        (data / "alce").mkdir(parents=True, exist_ok=True)
        (data / f"alce/{task}_eval_gtr_top2000.json").write_text(json.dumps(rows), encoding="utf-8")


def write_helmet(root: Path, length: int, counts: dict[str, int]) -> None:
    """Write the clone's data/ for one length; `counts` has the passages or keys of rag, msmarco, cite and json_kv."""
    data = root / "data"
    write_kilt(data, counts["rag"])
    write_msmarco(data, counts["msmarco"])
    write_json_kv(data, counts["json_kv"])
    write_ruler(data, length)
    write_alce(data, counts["cite"] + 3)


def labeled(seed: int, labels: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        label = number % labels if number < labels else rng.randrange(labels)
        found.append({"text": f"{say(rng, rng.randint(3, 14))} {number}", "label": label})
    rng.shuffle(found)
    return found


def story(rng: random.Random, words: int) -> str:
    return "\n".join(say(rng, 50) for _ in range(words // 50 + 1))


def hub_sets() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return rows of the Hub datasets that HELMET loads, by name and split; long texts are longer than needed."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    coarse = {"train": labeled(1, 6, 900), "test": labeled(2, 6, 500)}
    fine = {"train": labeled(3, 50, 900), "test": labeled(4, 50, 500)}
    found["CogComp/trec"] = {
        split: [
            {"text": one["text"], "coarse_label": one["label"], "fine_label": other["label"]}
            for one, other in zip(coarse[split], fine[split], strict=True)
        ]
        for split in coarse
    }
    found["PolyAI/banking77"] = {"train": labeled(5, 77, 1200), "test": labeled(6, 77, 700)}
    found["clinc_oos"] = {
        split: [{"text": one["text"], "intent": one["label"]} for one in labeled(seed, 151, count)]
        for split, seed, count in (("train", 7, 1500), ("validation", 8, 900))
    }
    found["xingkunliuxtracta/nlu_evaluation_data"] = {"train": labeled(9, 68, 2000)}
    rng = random.Random(11)
    stories = [story(rng, 131_300) for _ in range(3)] + [story(rng, 70_000)]
    texts = [f"{text}" for text in stories]
    narrative = [
        {
            "document": {"text": texts[at % 4]},
            "question": {"text": f"{say(rng, 5)} {at}?"},
            "answers": [{"text": say(rng, 2)}, {"text": say(rng, 3)}],
        }
        for at in range(12)
    ]
    short = [{**row, "document": {"text": say(rng, 5)}, "question": {"text": say(rng, 4)}} for row in narrative]
    found["narrativeqa"] = {"test": narrative, "train": short}
    books = []
    for number in range(9):
        options = [say(rng, 2) for _ in range(4)]
        row = {"id": number, "context": texts[number % 4], "input": f" {say(rng, 5)} {number}? ", "options": options}
        books.append({**row, "answer": [options[number % 4]]})
    found["xinrongzhang2022/infinitebench"] = {
        "longbook_qa_eng": [{**row, "answer": [f" {say(rng, 2)}", say(rng, 2)], "options": []} for row in books],
        "longbook_choice_eng": books,
        "longbook_sum_eng": [{**row, "input": "", "answer": [f" {say(rng, 30)}\n"], "options": []} for row in books],
    }
    cases = [
        {
            "id": f"case{number}",
            "sources": [texts[number % 4][:200_000], texts[(number + 1) % 4][: 300_000 if number % 3 else 3000]],
            "summary/short": None if number % 5 == 4 else say(rng, 30),
        }
        for number in range(12)
    ]
    found["allenai/multi_lexsum"] = {
        "validation": cases,
        "train": [{"id": f"t{number}", "sources": [say(rng, 9)], "summary/short": say(rng, 25)} for number in range(9)],
    }
    return found
