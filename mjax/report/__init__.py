"""One HTML page on runs: curves, events, what differs (`python -m mjax.report RUN...`)."""
