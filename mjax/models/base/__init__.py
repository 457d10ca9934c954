"""What every branch stands on: parameters, weights, context, norms, tensor parallelism."""
