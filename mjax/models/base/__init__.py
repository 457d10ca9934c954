"""The base of every branch: parameters, weights, context, norms, tensor parallelism."""
