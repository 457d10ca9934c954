"""Objectives of training. Each names its batch fields and returns named losses."""
