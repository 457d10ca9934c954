"""The rules about `distill`: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator

from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config


@rule("take a decoder of text alone, with model.num_nextn_predict_layers=0")
def students_are_decoders(c: Config) -> Iterator[str]:
    name = c.model.architecture.name
    if c.train.objective in ("distill", "policy", "value") and name != "decoder":
        yield f"`train.objective` is not built for the architecture {name}"


@rule("write the teacher's tokens with mjax distill --write on a mesh with mesh.pp=1")
def teachers_have_no_pipeline(c: Config) -> Iterator[str]:
    if c.train.objective == "distill" and c.mesh.pp > 1 and c.distill.stored is None:
        yield "`mesh.pp`: the teacher of a step needs `distill.stored`"


DISTILL_RULES = rules_of(globals())
