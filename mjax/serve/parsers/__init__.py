"""Parsers of replies while they come: reasoning, tool calls, and the rest of the text."""
