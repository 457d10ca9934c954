"""The rules about `distill`: a part of the table of rules (`validate.py`)."""

from collections.abc import Iterator
from math import prod

from mjax.config.rules.rule import rule, rules_of
from mjax.config.schema.run import Config, MeshConfig


@rule("take a decoder of text alone, with model.num_nextn_predict_layers=0")
def students_are_decoders(c: Config) -> Iterator[str]:
    name = c.model.architecture.name
    if c.train.objective in ("distill", "policy", "value") and name != "decoder":
        yield f"`train.objective` is not built for the architecture {name}"


@rule("give the teacher devices, or write its tokens with mjax distill --write and mesh.pp=1")
def teachers_have_no_pipeline(c: Config) -> Iterator[str]:
    shares = c.distill.stored is None and not c.distill.teacher_mesh
    if c.train.objective == "distill" and c.mesh.pp > 1 and shares:
        yield "`mesh.pp`: the teacher of a step needs `distill.teacher_mesh` or `distill.stored`"


@rule("leave distill.hidden_layers out, or train with distill.teacher")
def outputs_of_layers_are_computed(c: Config) -> Iterator[str]:
    if not c.distill.hidden_layers or c.train.objective != "distill":
        return
    if c.distill.stored is not None:
        yield "`distill.hidden_layers`: `distill.stored` has no outputs of layers"
    if not c.distill.hidden_losses:
        yield "`distill.hidden_layers` has no loss: `distill.hidden_losses` is empty"
    if max(c.distill.hidden_layers) >= c.model.num_hidden_layers:
        last = c.model.num_hidden_layers - 1
        yield f"`distill.hidden_layers` names a layer of the student, whose last is {last}"


@rule("set distill.teacher, and leave distill.stored out")
def answers_are_rated_live(c: Config) -> Iterator[str]:
    if c.distill.student_share and c.distill.stored is not None:
        yield "`distill.student_share`: `distill.stored` has no answers that are yet to be drawn"


@rule("give {devices: 4, tp: 2}, say: a number of devices, which the sizes divide")
def teachers_have_a_mesh(c: Config) -> Iterator[str]:
    own = c.distill.teacher_mesh
    if not own:
        return
    if "devices" not in own:
        yield "`distill.teacher_mesh` has no number of devices"
    elif own["devices"] % prod(size for name, size in own.items() if name != "devices"):
        yield "`distill.teacher_mesh` has sizes that do not divide its devices"


@rule("leave devices out of it")
def students_draw_on_their_devices(c: Config) -> Iterator[str]:
    if c.train.objective == "distill" and "devices" in c.reinforce.engine:
        yield "`reinforce.engine` has devices, but students of `train.objective` draw on their own"


@rule("leave distill.teacher_mesh out, or give distill.teacher alone")
def teachers_on_devices_are_live(c: Config) -> Iterator[str]:
    if c.distill.teacher_mesh and c.distill.stored is not None:
        yield "`distill.teacher_mesh`: `distill.stored` needs no devices"


def mesh_of_teacher(c: Config) -> MeshConfig:
    """The mesh of the teacher: that of the run, or the one of `distill.teacher_mesh`."""
    own = {name: size for name, size in c.distill.teacher_mesh.items() if name != "devices"}
    if not c.distill.teacher_mesh:
        return c.mesh
    return MeshConfig.model_validate({"zero": c.mesh.zero, **own})


DISTILL_RULES = rules_of(globals())
