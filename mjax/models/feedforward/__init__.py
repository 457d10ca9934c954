"""Dense feed-forward branches."""
