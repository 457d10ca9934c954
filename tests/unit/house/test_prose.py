"""Pages for users read well: short sentences, plain words, lines that fit a screen.

Rules (b), (c), (e) and (f) of docs/design.md, "Prose". Code, links and dated pages of the lab are
exempt, from the rules of length also tables and headings.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAB = ROOT / "docs" / "lab"
PAGES = [page for at in ("docs", "mjax", "cookbook") for page in (ROOT / at).rglob("*.md")]
PAGES = [page for page in PAGES if LAB not in page.parents]
PAGES += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
NAMES = sorted(str(page.relative_to(ROOT)) for page in PAGES)
FOR_USERS = [name for name in NAMES if name.startswith(("README", "cookbook/", "docs/"))]
MOST_WORDS, MOST_SEMICOLONS, MOST_LETTERS = 25, 1, 120
# after or before; rotated, transposed or became; predicted or distinguished; with; more or later
UNCLEAR = re.compile(r"\b(behind|turned|told|besides|further)\b", re.I)
COMMIT = re.compile(r"(?<![\w/@.-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![\w/.-])")
HISTORY = re.compile(r"\b(formerly|previously|since then|used to be|until now|in older versions)\b")


def lines_of_text(text: str) -> Iterator[str]:
    """Yield all lines that are not code, links as their words and code as one word."""
    in_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield plain(line)


def found_in(text: str, pattern: re.Pattern) -> list[str]:
    """The lines of a text that a pattern is found in."""
    return [line for line in lines_of_text(text) if pattern.search(line)]


def prose_lines(text: str) -> Iterator[str]:
    """Yield the lines that are prose; "" stands for code, a table, a heading or a comment."""
    in_code, last = False, ""
    for line in text.splitlines():
        is_indented_code = not last.strip() and line.startswith("    ")
        last = "" if is_indented_code else line
        if line.lstrip().startswith("```"):
            in_code = not in_code
            yield ""
        elif in_code or is_indented_code or re.match(r"\s*(\||#|<!--|!\[)", line):
            yield ""
        else:
            yield line


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, each in one line, links as their words."""
    found: list[str] = []
    for line in [*prose_lines(text), ""]:
        if not line.strip() or re.match(r"\s*([-*]|\d+\.) ", line):
            yield " ".join(found)
            found = []
        found.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line).strip())
    yield " ".join(found)


def plain(paragraph: str) -> str:
    """The paragraph with links as their words, and code as one word."""
    words = re.sub(r"`[^`]*`", "code", paragraph)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words).replace("**", "")


def sentences(paragraph: str) -> list[str]:
    """Sentences end at a full stop, a question or an exclamation mark before a space."""
    return re.split(r"(?<=[.!?])\)? +(?=[\[(A-Z\d\"'`a-z])", plain(paragraph))


def faults(text: str) -> list[str]:
    """What breaks the rules of sentences."""
    found = []
    for paragraph in paragraphs(text):
        if plain(paragraph).count(";") > MOST_SEMICOLONS:
            found.append(f"semicolons: {paragraph[:100]}")
        for sentence in sentences(paragraph):
            count = len(re.findall(r"[A-Za-z0-9][\w'’./-]*", sentence))
            if count > MOST_WORDS:
                found.append(f"{count} words: {sentence}")
    return found


def test_the_rules_are_counted():
    assert faults("One sentence of words. Another; one.\n\n- an item\n- `a; b; c`; one") == []
    assert faults("a; b; c.") == ["semicolons: a; b; c."]
    assert faults(" ".join(["word"] * 26) + ".")[0].startswith("26 words: ")
    assert faults("```\n" + "word " * 30 + "\n```\n| " + "word " * 30) == []
    assert faults("[" + "word " * 20 + "](link) and so on.") == []


@pytest.mark.parametrize("name", NAMES)
def test_sentences_are_short(name):
    assert not faults((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_lines_fit_a_screen(name):
    """Links and code, which cannot be cut, do not count."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not [line for line in prose_lines(text) if len(plain(line)) > MOST_LETTERS]


def test_words_are_found_outside_of_code():
    text = "A norm behind it.\n```\nbehind\n```\n`besides` [x](told.md)\n| as told | 1 |"
    assert found_in(text, UNCLEAR) == ["A norm behind it.", "| as told | 1 |"]
    assert found_in("since 5f1dd97 and d9d21bf4. Not `5f1dd97`, 2026112, a.b/5f1dd97", COMMIT)
    assert not found_in("`5f1dd97`, 2026112, defaced, a.b/5f1dd97", COMMIT)


@pytest.mark.parametrize("name", NAMES)
def test_words_have_one_meaning(name):
    assert not found_in((ROOT / name).read_text(encoding="utf-8"), UNCLEAR)


@pytest.mark.parametrize("name", FOR_USERS)
def test_pages_for_users_have_no_commit_and_no_history(name):
    """Figures come with a link to the lab or to benchmarks/, which name commits and machines."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not found_in(text, COMMIT) and not found_in(text, HISTORY)
