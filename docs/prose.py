"""Measure the prose of pages and notebooks: ``python docs/prose.py [PAGE ...]`` prints a row for
each.

Columns: words; words per sentence; the share of sentences with more than 30 words; pronouns per
1,000 words. Code, tables, headings and directives do not count. The aims for README, tutorial and
how-tos are in CONTRIBUTING.md; nothing fails when a page misses them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRONOUNS = {"it", "its", "that", "those", "this", "these", "which", "one", "ones", "they", "them"}
LONG = 30


class Prose(NamedTuple):
    """The counts of a text.

    Attributes:
        words: how many.
        sentences: the words of each sentence.
        pronouns: how many of the words are pronouns.
    """

    words: int
    sentences: list[int]
    pronouns: int

    def row(self) -> tuple[str, ...]:
        """The columns of the table."""
        count = max(1, len(self.sentences))
        long = sum(length > LONG for length in self.sentences)
        return (
            f"{self.words}",
            f"{self.words / count:.1f}",
            f"{long / count:.0%}",
            f"{1000 * self.pronouns / max(1, self.words):.0f}",
        )


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and list items of a Markdown page, without code, tables and markup."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+|:::+).*?^\1\2\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[str] = []
    new = True
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("#", "|", "![", "(", "<")):
            new = True
            continue
        item = re.match(r"([-*]|\d+\.)\s+", bare)
        if new or item:
            found.append("")
        found[-1] += " " + (bare[item.end() :] if item else bare)
        new = False
    return found


def measure(text: str) -> Prose:
    """Count the words, sentences and pronouns of a Markdown page."""
    sentences: list[int] = []
    pronouns = 0
    for paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`", "code", paragraph)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = re.sub(r"\b(e\.g|i\.e|etc|vs|cf|Fig)\.", r"\1", plain)
        for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9`])|:\s*$", plain):
            words = re.findall(r"[A-Za-z0-9][\w'.,%-]*", sentence or "")
            if words:
                sentences.append(len(words))
                pronouns += sum(word.strip(".,").lower() in PRONOUNS for word in words)
    return Prose(sum(sentences), sentences, pronouns)


def text_of(page: Path) -> str:
    """Return the Markdown of a page, or of the text cells of a notebook."""
    text = page.read_text()
    if page.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def total(parts: list[Prose]) -> Prose:
    """Add the counts of several pages."""
    return Prose(
        sum(part.words for part in parts),
        [length for part in parts for length in part.sentences],
        sum(part.pronouns for part in parts),
    )


def main(names: list[str]) -> None:
    """Print the table."""
    readers = [ROOT / "README.md", ROOT / "docs" / "index.md", *ROOT.glob("docs/tutorial*.md")]
    readers += sorted(ROOT.glob("docs/howto/*.md"))
    others = [page for page in sorted(ROOT.glob("docs/**/*.md")) if page not in readers]
    notebooks = sorted(ROOT.glob("notebooks/*.ipynb"))
    form = "{:<40} {:>6} {:>15} {:>9} {:>15}"
    print(form.format("page", "words", "words/sentence", "over 30", "pronouns/1,000"))
    groups = [[Path(name).resolve() for name in names]] if names else [readers, notebooks, others]
    for group in groups:
        rows = [(page, measure(text_of(page))) for page in group]
        for page, prose in rows:
            print(form.format(str(page.relative_to(ROOT)), *prose.row()))
        print(form.format("all of these", *total([prose for _, prose in rows]).row()), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
