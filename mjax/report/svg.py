"""What drawings of runs share: their colors, and texts of an SVG."""

from html import escape

# Okabe and Ito's, which the color-blind tell apart, and a gray.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")


def text_at(x: float, y: float, text: str, anchor: str = "start", color: str = "black") -> str:
    """A text as an SVG element; x, y in pixels, of its `anchor` (start, middle, end)."""
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}">{escape(text)}</text>'
