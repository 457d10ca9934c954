"""`python -m mjax.export`: weights and programs for others."""
