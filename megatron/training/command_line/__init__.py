"""The command line: flags generated from configuration dataclasses, and what is said of flags that do not work."""
