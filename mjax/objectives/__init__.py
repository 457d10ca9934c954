"""What is trained for: an objective names its batch fields and returns named losses."""
