"""Megatron-LM's saved arguments, by name."""

from collections.abc import Mapping

from mjax.errors import UserError


class Args:
    """The arguments, with errors that name the one and the file."""

    def __init__(self, values: Mapping[str, object], where: str):
        self.values, self.where = values, where

    def __call__(self, name: str, default: object = None) -> object:
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> object:
        if self(name) is None:
            raise UserError(f"{self.where}: args.{name} is missing; save with a newer Megatron-LM")
        return self(name)

    def refuse(self, name: str, why: str = "has no counterpart in mjax") -> UserError:
        return UserError(
            f"{self.where}: args.{name}={self(name)!r} {why}; such a model cannot be imported "
            "(docs/start/from-megatron.md)"
        )
