"""`mjax serve RUN_OR_FOLDER [options]`: a server of OpenAI's form for a model."""

from mjax.errors import or_user_error, run_cli


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    from mjax.serve.options import read_options

    options = read_options(argv)
    with or_user_error("mjax serve needs `pip install 'mjax[serve]'`: {reason}", ImportError):
        import fastapi  # noqa: F401
        import msgspec  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401
        import zmq  # noqa: F401
    from mjax.serve.processes import Server

    return Server(options).run()


if __name__ == "__main__":
    run_cli(main)
