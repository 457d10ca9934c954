"""A run's own reports: metrics, console, diagnostics, profiles."""
