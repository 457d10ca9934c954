"""`mjax docs`: its site builds without a warning, and what it lacks is one line."""

import importlib.util
import re
import socket

import pytest

from mjax import docs
from mjax.errors import UserError
from tests.marks import slow

HAS_MKDOCS = importlib.util.find_spec("material") is not None


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mjax\[docs\]'$"):
        docs.main([])


def test_without_pages_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(docs, "PACKAGE", tmp_path / "mjax")
    with pytest.raises(UserError, match="^mjax docs: no pages are beside this mjax"):
        docs.main([])
    for name in ("mjax/_site", "."):  # a wheel has its own, a checkout those beside the package
        (tmp_path / name / "docs").mkdir(parents=True)
        (tmp_path / name / "mkdocs.yml").touch()
    assert docs.config_of_site() == tmp_path / "mjax" / "_site" / "mkdocs.yml"


@pytest.mark.parametrize(
    "argv, said", [(["--port", "99999"], "--port 99999"), (["--out", "."], "exists")]
)
def test_wrong_arguments_are_one_line(argv, said, monkeypatch):
    monkeypatch.setattr(docs, "config_of_site", lambda: None)
    with pytest.raises(UserError, match=said) as e:
        docs.main(argv)
    assert "\n" not in str(e.value)


def test_a_port_that_is_taken_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(docs, "config_of_site", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(UserError, match=f"--port {port}: .*in use.* --port 0"):
            docs.main(["--port", port])


@slow
@pytest.mark.skipif(not HAS_MKDOCS, reason="needs the extra `docs`")
def test_the_site_builds_strictly_and_has_every_page(tmp_path, capfd):
    """mkdocs checks each link and anchor of the site; a warning ends the build."""
    out = tmp_path / "site"
    docs.main(["--out", str(out)])
    said = capfd.readouterr()
    assert "WARNING" not in said.err and str(out) in said.out
    root = docs.PACKAGE.parent
    pages = [page.relative_to(root / "docs") for page in (root / "docs").rglob("*.md")]
    missing = [page for page in sorted(pages) if not (out / page.with_suffix(".html")).is_file()]
    assert [str(page) for page in missing] == ["README.md", "lab/README.md"]  # index.html
    listed = re.findall(r"\]\((\S+\.html)\)", (out / "llms.txt").read_text())
    assert len(listed) > 35 and all((out / name).is_file() for name in listed)
    home = (out / "index.html").read_text()
    assert "figures/quickstart_loss.svg" in home and (out / "figures/quickstart_loss.svg").is_file()
    assert not re.search(r'(?:src|href)="https?://(?!squidfunk)[^"]*\.(?:js|css|woff2?)"', home)
    assert (out / "files/configs/recipes/lora_llama3_1_8b.yaml.html").is_file()
