"""Compiled programs on disk, so that a later process begins sooner."""

import os
from pathlib import Path

import jax


def keep_compiled_programs() -> None:
    """Let JAX keep programs in MJAX_CACHE_DIR, by default ~/.cache/mjax.

    Nothing happens where JAX has a folder already (JAX_COMPILATION_CACHE_DIR), and on CPUs: there
    the collectives of a program from disk can go astray.
    """
    if jax.default_backend() == "cpu" or jax.config.jax_compilation_cache_dir is not None:
        return
    folder = os.environ.get("MJAX_CACHE_DIR", str(Path.home() / ".cache" / "mjax"))
    jax.config.update("jax_compilation_cache_dir", folder)
