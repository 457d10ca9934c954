"""Hooks of mkdocs.yml: the site shows the repository's pages as GitHub does.

Pages outside of docs/ (README.md, the cookbook, ..), notebooks and the files that pages link to
become pages of the site; links are rewritten to them. The navigation is read from the tables of
docs/README.md, so a page is listed in one place. `llms.txt` lists all pages for programs to read.
"""

import html
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".jsonl": "json"}
MOST_LETTERS = 40_000  # of a file that is shown
PLACES = {"README.md": "index.md", "docs/README.md": "contents.md"}  # where pages lie in the site
FIGURES = (".svg", ".png", ".jsonl")


def on_config(config):
    """Make anchors as GitHub does, and the navigation from docs/README.md."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": github_anchor}
    config.nav = navigation(root_of(config))
    return config


def on_files(files: Files, config) -> Files:
    """Add what lies outside of docs/ and is linked from a page; take READMEs to their places."""
    root = root_of(config)
    for file in list(files):
        if file.src_uri == "README.md" or file.src_uri.endswith(".ipynb"):
            files.remove(file)
    pending, known = [path for path in PLACES if (root / path).is_file()], set()
    while pending:
        path = pending.pop()
        if path in known:
            continue
        known.add(path)
        if path.endswith((".md", ".ipynb")):
            pending += links_of(root, path)
        if files.get_file_from_path(place_of(root, path)) is None:
            content = page_of(root, path)
            added = File.generated(config, place_of(root, path), content=content)
            added.inclusion = InclusionLevel.INCLUDED
            files.append(added)
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Rewrite links to the places of what they name."""
    root = root_of(config)
    source = source_of(root, page.file.src_uri)
    if source is None:  # a file that is shown as it is
        return markdown
    if source.startswith("docs/lab/"):
        page.meta["search"] = {"boost": 0.2}  # dated notes come after pages that are kept up

    def rewritten(match: re.Match) -> str:
        target, _, anchor = match[2].partition("#")
        if "://" in target or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (root / path).exists():
            return match[0]
        start = posixpath.dirname(page.file.src_uri) or "."
        place = posixpath.relpath(place_of(root, path), start)
        return f"{match[1]}{place}{'#' * bool(anchor)}{anchor}{match[3]}"

    return outside_code(markdown, lambda text: LINK.sub(rewritten, text))


def on_post_build(config) -> None:
    """Write llms.txt: each page with its title and first sentence."""
    root = root_of(config)
    lines = ["# mjax", "", f"> {config.site_description}"]
    for group in config.nav:
        ((title, places),) = group.items()
        lines += ["", f"## {title}", ""]
        for place in places:
            text = text_of(root, source_of(root, place))
            title = text.splitlines()[0].lstrip("# ")
            lines.append(f"- [{title}]({html_of(place)}): {first_sentence(text)}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def html_of(place: str) -> str:
    """The file that mkdocs makes of a page."""
    return re.sub(r"README\.md$", "index.md", place).removesuffix("md") + "html"


def first_sentence(text: str) -> str:
    """The first sentence of a page's first paragraph, without links."""
    for paragraph in text.split("\n\n"):
        if paragraph[:1].isalnum() or re.match("`[^`]", paragraph):
            plain = LINK.sub("]", " ".join(paragraph.split())).replace("[", "").replace("]", "")
            return re.split(r"(?<=[.!?]) ", plain)[0]
    return ""


def root_of(config) -> Path:
    """The folder that mkdocs.yml lies in."""
    return Path(config.config_file_path).parent


def navigation(root: Path) -> list[dict]:
    """The groups of docs/README.md with their pages, and the cookbook's."""
    groups: list[dict] = [{"mjax": ["index.md", "contents.md", "features.md"]}]
    text = (root / "docs/README.md").read_text(encoding="utf-8")
    for title, body in re.findall(r"^## (.*)\n((?:.|\n)*?)(?=^## |\Z)", text, re.M):
        linked = re.findall(r"^\| \[.*?\]\(([^)#]+)\)", body, re.M)
        paths = [posixpath.normpath(posixpath.join("docs", link)) for link in linked]
        groups.append({title: [place_of(root, path) for path in paths]})
    recipes = links_of(root, "cookbook/README.md")
    pages = [path for path in recipes if re.match(r"(cookbook|docs)/.*\.(md|ipynb)$", path)]
    places = [place_of(root, path) for path in ["cookbook/README.md", *dict.fromkeys(pages)]]
    taken = {place for group in groups for each in group.values() for place in each}
    return [*groups, {"Cookbook": [place for place in places if place not in taken]}]


def links_of(root: Path, path: str) -> list[str]:
    """What a page links to: paths within the repository."""
    found = []
    for _, link, _ in LINK.findall(text_of(root, path)):
        target = link.partition("#")[0]
        if target and "://" not in target:
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if (root / linked).exists() and not linked.startswith(".."):
                found.append(linked)
    return found


def place_of(root: Path, path: str) -> str:
    """Where the page or file at a path of the repository lies in the site."""
    if path in PLACES:
        return PLACES[path]
    if (root / path).is_dir():
        has_page = (root / path / "README.md").is_file()
        return place_of(root, f"{path}/README.md") if has_page else f"files/{path}/index.md"
    if path.startswith("docs/") and not path.endswith(".ipynb"):
        return path.removeprefix("docs/")
    if path.endswith((".md", *FIGURES)):
        return f"files/{path}" if not path.startswith("cookbook/") else path
    if path.endswith(".ipynb"):
        return path.removeprefix("docs/").replace(".ipynb", "_notebook.md")
    return f"files/{path}.md"


def source_of(root: Path, place: str) -> str | None:
    """The page of the repository that lies at a place of the site, or None."""
    for path, at in PLACES.items():
        if at == place:
            return path
    notebook = place.replace("_notebook.md", ".ipynb")
    tried = [f"docs/{place}", place, place.removeprefix("files/"), notebook, f"docs/{notebook}"]
    return next((path for path in tried if (root / path).is_file()), None)


def text_of(root: Path, path: str) -> str:
    """The Markdown of a page or of a notebook; "" of another file."""
    if path.endswith(".md"):
        return (root / path).read_text(encoding="utf-8")
    if not path.endswith(".ipynb"):
        return ""
    cells = json.loads((root / path).read_text(encoding="utf-8"))["cells"]
    parts = ["".join(cell["source"]) for cell in cells]
    is_code = [cell["cell_type"] == "code" for cell in cells]
    return "\n\n".join(
        f"```python\n{p}\n```" if c else p for p, c in zip(parts, is_code, strict=True)
    )


def page_of(root: Path, path: str) -> str | bytes:
    """The page that shows a path: a page as it is, a folder as a list, another file as code."""
    if path.endswith((".md", ".ipynb")):
        return text_of(root, path)
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    if (root / path).is_dir():
        names = sorted(each.name for each in (root / path).iterdir() if each.name[0] not in "._")
        return f"{hidden}# {path}\n\n" + "\n".join(f"- `{name}`" for name in names)
    if path.endswith(FIGURES):
        return (root / path).read_bytes()
    text = (root / path).read_text(encoding="utf-8")[:MOST_LETTERS]
    language = LANGUAGES.get(Path(path).suffix, "text")
    return (
        f"{hidden}# {html.escape(Path(path).name)}\n\n`{path}`\n\n`````{language}\n{text}\n`````\n"
    )


def outside_code(markdown: str, change) -> str:
    """The text with its parts outside of fenced code changed."""
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def github_anchor(text: str, separator: str) -> str:
    """The name of a heading in links, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", separator)
