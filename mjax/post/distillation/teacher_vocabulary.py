"""Vocabularies of unequal size: the teacher's may go on where the student's ends.

Its first tokens are then the student's. The rest, of padding say, is left out when it is loaded.
"""

import functools

from mjax.checkpoint.base.companion_files import tokenizer_of
from mjax.data.base.tokenizer import Tokenizer, load_tokenizer
from mjax.errors import UserError


@functools.lru_cache(maxsize=4)
def require_leading_tokens(folder: str, size: int, wanted: int, spec: str | None) -> None:
    """Raise `UserError` unless the first tokens of the teacher in `folder` are the student's.

    size, wanted: the vocabularies of teacher and student. spec: `data.tokenizer`, the student's.
    """
    sizes = f"distill.teacher={folder} has model.vocab_size={size}, and the student {wanted}"
    if size < wanted:
        raise UserError(
            f"{sizes}: the teacher lacks tokens; if those are padding, set model.vocab_size={size} "
            "(checkpoint.init_changes=[vocab_size] cuts weights), else distil between models of "
            "one tokenizer"
        )
    theirs = tokenizer_of(folder)
    if theirs is None or spec is None or spec.startswith("train:"):
        missing = (
            "data.tokenizer is not set to the student's" if theirs else "no tokenizer is there"
        )
        raise UserError(
            f"{sizes}; {missing}, so tokens cannot be compared: mend that, or distil between "
            "models of one vocabulary"
        )
    ours, teacher = load_tokenizer(spec), load_tokenizer(theirs)
    for number in range(min(ours.vocab_size, wanted)):
        pair = _token_text(ours, number), _token_text(teacher, number)
        if pair[0] != pair[1]:
            raise UserError(
                f"{sizes}; token {number} is {pair[0]!r} in {spec} and {pair[1]!r} in the "
                "teacher's tokenizer; distil between models of one tokenizer"
            )


def _token_text(tokenizer: Tokenizer, number: int) -> str | None:
    """The text of a token, None where there is none of that number."""
    if number >= tokenizer.vocab_size:
        return None
    decode = tokenizer.decode_whole or tokenizer.decode
    piece = tokenizer.piece_of(number) if tokenizer.piece_of else None
    return decode([number]) if piece is None else piece
