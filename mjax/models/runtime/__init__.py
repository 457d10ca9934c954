"""How a stack of layers runs: weights' path, scan or list, remat, residuals, buffers."""
