"""Rules across keys; each breaks with one line that says the remedy."""
