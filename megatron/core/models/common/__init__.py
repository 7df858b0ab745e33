"""Modules shared by several kinds of models."""
