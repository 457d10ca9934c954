"""What a run says of itself: metrics, console, diagnostics, profiles."""
