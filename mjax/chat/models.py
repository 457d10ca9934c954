"""Settings of requests and pieces of answers, which a session and a model have in common.

A model is in this process (`local.py`) or on a server (`remote.py`). `check` raises `UserError` for
settings that no answer can have. `stream` answers messages; a caller that leaves early ends the
answer. `open` comes before all answers, `close` after them.
"""

from typing import NamedTuple

# Names of settings, as requests have them, with a line of help.
CHAT_SETTINGS = {
    "temperature": "0: always the likeliest token",
    "top_p": "1: off",
    "top_k": "0: off",
    "min_p": "0: off",
    "max_tokens": "most new tokens",
    "seed": "fixes the draws of each answer",
    "stop": "text that ends an answer, or a JSON list of texts",
    "repetition_penalty": "1: off",
    "presence_penalty": "0: off",
    "frequency_penalty": "0: off",
}


class ChatPiece(NamedTuple):
    """The new part of an answer.

    reasoning: what the model thinks before it answers. call: parts of calls of tools.
    tokens: made since the piece before.
    """

    text: str = ""
    reasoning: str = ""
    call: str = ""
    tokens: int = 0
