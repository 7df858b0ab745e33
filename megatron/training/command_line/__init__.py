"""Implements the command line: flags generated from configuration dataclasses, configuration files, and validation."""
