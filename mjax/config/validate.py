"""The rules across config keys, as one table: what is wrong, and the remedy.

`schema/` has checked each key alone. Rules are tried in order and the first that fails is raised.
They see `mesh.dp` as a number once the device count is known.
"""

from mjax.config.rules.data_rules import DATA_RULES
from mjax.config.rules.distill_rules import DISTILL_RULES
from mjax.config.rules.encoder_rules import ENCODER_RULES
from mjax.config.rules.fim_rules import FIM_RULES
from mjax.config.rules.mesh_rules import MESH_RULES, mesh_sizes
from mjax.config.rules.model_rules import MODEL_RULES
from mjax.config.rules.optimizer_rules import OPTIMIZER_RULES
from mjax.config.rules.preference_rules import PREFERENCE_RULES
from mjax.config.rules.reinforce_rules import REINFORCE_RULES
from mjax.config.rules.retro_rules import RETRO_RULES
from mjax.config.rules.rule import Rule
from mjax.config.rules.tower_rules import TOWER_RULES
from mjax.config.rules.train_rules import TRAIN_RULES
from mjax.config.rules.unread_rules import every_key_is_read
from mjax.config.rules.vision_rules import VISION_RULES
from mjax.config.schema.run import Config
from mjax.errors import UserError

RULES: tuple[Rule, ...] = (
    *MESH_RULES,
    *MODEL_RULES,
    *RETRO_RULES,
    *VISION_RULES,
    *TOWER_RULES,
    *ENCODER_RULES,
    *DATA_RULES,
    *OPTIMIZER_RULES,
    *FIM_RULES,
    *TRAIN_RULES,
    *PREFERENCE_RULES,
    *DISTILL_RULES,
    *REINFORCE_RULES,
    every_key_is_read,
)


def validate(cfg: Config, device_count: int | None = None) -> None:
    """Raise the first broken rule as `UserError`.

    Without a `device_count`, rules that need it are left out.
    """
    for rule in RULES:
        error = rule.error(cfg)
        if error:
            raise UserError(error)
    if device_count is None:
        return
    sizes = mesh_sizes(cfg.mesh, device_count)
    if cfg.mesh.dp == "auto":
        mesh = cfg.mesh.model_copy(update={"dp": sizes["dp"]})
        validate(cfg.model_copy(update={"mesh": mesh}))
