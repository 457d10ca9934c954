"""A run that lasts for weeks: loop, resume, evaluation, dry run."""
