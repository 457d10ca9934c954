"""Mixtures of experts: router, dispatch, exchange, matmuls, losses."""
