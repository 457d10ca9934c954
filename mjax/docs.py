"""`mjax docs`: these pages as a site in a browser, offline and with a search.

A checkout has the pages in docs/; a wheel carries them in `_site`, so they are of the version that
is installed. The site is built by mkdocs-material (the extra `docs`) into a temporary folder.
"""

import contextlib
import functools
import http.server
import importlib.util
import logging
import os
import sys
import tempfile
from pathlib import Path

from mjax.config.languages.paths import as_path
from mjax.errors import CommandParser, UserError, or_user_error, run_cli
from mjax.files import PACKAGE


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(argv: list[str] | None = None) -> int:
    """The command line: builds the site, then serves it until Ctrl-C."""
    about = "Show the documentation in a browser, offline."
    parser = CommandParser("docs", description=about)
    parser.add_argument("--port", type=int, default=8001, help="default: 8001; 0 takes a free one")
    where = "write the site there and end; it must not exist"
    parser.add_argument("--out", type=as_path, metavar="DIR", help=where)
    args = parser.parse_args(argv)
    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port}: a port is a number from 0 to 65535")
    config = config_of_site()
    if args.out is not None:
        if args.out.exists():
            raise UserError(f"--out {args.out} exists already; give a folder that does not")
        build_site(config, args.out)
        print(f"{args.out}: the site; open {args.out / 'index.html'}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mjax-docs-") as folder:
        serve_site(config, Path(folder), args.port)
    return 0


def config_of_site() -> Path:
    """Return mkdocs.yml of the checkout or of the wheel. Raises `UserError` without mkdocs."""
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocs") is None:
        raise UserError("mjax docs builds its site with mkdocs-material; pip install 'mjax[docs]'")
    for folder in (PACKAGE / "_site", PACKAGE.parent):
        if (folder / "mkdocs.yml").is_file() and (folder / "docs").is_dir():
            return folder / "mkdocs.yml"
    raise UserError("mjax docs: no pages are beside this mjax; install its wheel, or a checkout")


def build_site(config: Path, out: Path) -> None:
    """Build the site strictly: a warning, such as a broken link, ends it."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # of mkdocs-material, to writers of sites
    logging.getLogger("mkdocs").addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    loaded = load_config(str(config), site_dir=str(out), strict=True)
    with or_user_error("mjax docs: the site has the faults above ({reason})", Abort):
        loaded.plugins.on_startup(command="build", dirty=False)
        build(loaded)


def serve_site(config: Path, folder: Path, port: int) -> None:
    """Build into a folder, and serve it to this machine alone."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with or_user_error(f"--port {port}: {{reason}}; give another, such as --port 0"):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    with server:
        build_site(config, folder)
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    run_cli(main)
