"""Hugging Face folders: files, formats of 8 and 4 bits, Whisper."""
