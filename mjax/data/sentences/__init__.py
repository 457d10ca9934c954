"""Samples of sentences: masked, spans, labelled."""
