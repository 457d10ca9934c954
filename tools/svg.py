"""Texts of an SVG."""

from html import escape


def text_at(x: float, y: float, text: str, anchor: str = "start", color: str = "black") -> str:
    """A text as an SVG element; x, y in pixels, of its `anchor` (start, middle, end)."""
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}">{escape(text)}</text>'
