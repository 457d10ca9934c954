"""The page to talk to a model: one HTML file, and the headers under which a browser runs it.

Invariant: the browser runs the file's own script and style alone, and speaks to this server alone.
"""

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("index.html")


def page_and_headers() -> tuple[str, dict[str, str]]:
    """The page's HTML and its headers: a content security policy with hashes of its two parts."""
    text = PAGE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", text),
        "style-src": _hash_of("style", text),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }


def _hash_of(tag: str, text: str) -> str:
    """The source that allows the one inline element of this name."""
    (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"
