"""What datasets stand on: tokenizers, chat templates, caches, sentences."""
