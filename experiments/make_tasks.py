"""Make the packaged offline tasks from the held-out State of the Union addresses: `python -m experiments.make_tasks`.

Only addresses that no training run sees, and nothing random but a seeded generator: the same corpus gives the same
files. `sotu_cloze`: which word ends the sentence. `sotu_continuation`: which words go on. `sotu_copy`: repeat a quoted
clause. `sotu_words`: passages for a word perplexity.
"""

import json
import random
import re
from pathlib import Path

from wide.data.corpus import Corpus
from wide.options import DataConfig

FOLDER = Path(__file__).parent.parent / "wide" / "evaluation" / "tasks"
SEED = 28418
NUM_ITEMS = {"sotu_cloze": 360, "sotu_continuation": 360, "sotu_copy": 120, "sotu_words": 40}
NUM_CHOICES = 4
CONTINUATION_WORDS = 8
CLAUSE_WORDS = 6


def main() -> None:
    for name, items in make().items():
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(items)} items")


def make() -> dict[str, list[dict]]:
    """Items of every task, each naming the address it comes from."""
    documents = [d for d in Corpus.from_config(DataConfig()).documents() if d.split == "eval"]
    sentences = {d.name: split_sentences(d.text) for d in documents}
    makers = {"sotu_cloze": cloze, "sotu_continuation": continuation, "sotu_copy": copy, "sotu_words": passages}
    return {
        name: spread(maker(sentences, random.Random(f"{SEED}/{name}")), NUM_ITEMS[name])
        for name, maker in makers.items()
    }


def split_sentences(text: str) -> list[str]:
    """Sentences of plain prose; those with brackets, quotes or digits (tables, applause) are left out."""
    joined = re.sub(r"\s+", " ", text)
    found = re.findall(r"[A-Z][^.?!]*[a-z]\.(?= [A-Z])", joined)
    return [s for s in found if not re.search(r"[\[\]()\"“”0-9:;—]", s) and s.isascii()]


def cloze(sentences: dict[str, list[str]], rng: random.Random) -> list[dict]:
    """Sentences of 14 to 30 words without their last one; wrong words end other sentences of the same address."""
    items = []
    for name, texts in sentences.items():
        usable = [t for t in texts if 14 <= len(t.split()) <= 30]
        endings = sorted({last_word(t) for t in texts if len(last_word(t)) >= 4})
        for text in usable:
            word = last_word(text)
            others = [w for w in endings if w != word and w not in text and abs(len(w) - len(word)) <= 2]
            if len(word) >= 4 and text.count(word) == 1 and len(others) >= NUM_CHOICES - 1:
                context = text.removesuffix(f" {word}.")
                items.append(with_choices(name, context, word, rng.sample(others, NUM_CHOICES - 1), rng))
    return items


def continuation(sentences: dict[str, list[str]], rng: random.Random) -> list[dict]:
    """The first words of a sentence; wrong continuations are cut in the same way from others of the same address."""
    items = []
    for name, texts in sentences.items():
        usable = [t for t in texts if 2 * CONTINUATION_WORDS <= len(t.split()) <= 40]
        halves = {t: halve(t) for t in usable}
        for text, (context, end) in halves.items():
            others = [tail for other, (_, tail) in halves.items() if other != text]
            if len(others) >= NUM_CHOICES - 1:
                items.append(with_choices(name, context, end, rng.sample(others, NUM_CHOICES - 1), rng))
    return items


def copy(sentences: dict[str, list[str]], rng: random.Random) -> list[dict]:
    """One clause said twice, a second one said once; the answer is the second said again."""
    items = []
    for name, texts in sentences.items():
        clauses = [" ".join(t.split()[:CLAUSE_WORDS]).rstrip(",") for t in texts if len(t.split()) >= 12]
        clauses = list(dict.fromkeys(clauses))
        rng.shuffle(clauses)
        for shown, asked in zip(clauses[::2], clauses[1::2], strict=False):
            prompt = f'Say: "{shown}"\nAgain: "{shown}"\n\nSay: "{asked}"\nAgain: "'
            items.append({"document": name, "context": prompt, "target": asked})
    return items


def passages(sentences: dict[str, list[str]], rng: random.Random) -> list[dict]:
    """Whole sentences in a row, about a hundred words."""
    items = []
    for name, texts in sentences.items():
        start = rng.randrange(max(1, len(texts) - 4))
        items += [{"document": name, "text": " ".join(texts[i : i + 4])} for i in range(start, len(texts) - 4, 12)]
    return items


def halve(text: str) -> tuple[str, str]:
    """The first words of a sentence, and the fixed number that follow them."""
    words = text.split()
    return " ".join(words[:-CONTINUATION_WORDS]), " ".join(words[-CONTINUATION_WORDS:])


def last_word(text: str) -> str:
    return text.rsplit(" ", 1)[-1].rstrip(".")


def with_choices(name: str, context: str, right: str, wrong: list[str], rng: random.Random) -> dict:
    """The right choice takes a random place among the wrong ones."""
    label = rng.randrange(len(wrong) + 1)
    return {"document": name, "context": context, "choices": [*wrong[:label], right, *wrong[label:]], "label": label}


def spread(items: list[dict], number: int) -> list[dict]:
    """`number` of the items, evenly over all addresses."""
    assert len(items) >= number, f"only {len(items)} of {number} items"
    return [items[i * len(items) // number] for i in range(number)]


if __name__ == "__main__":
    main()
