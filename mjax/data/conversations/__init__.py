"""Conversations: files, formats, tokens with a loss, packed rows."""
