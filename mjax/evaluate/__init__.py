"""`python -m mjax.evaluate`: perplexity, accuracy, lm-evaluation-harness."""
